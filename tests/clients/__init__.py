"""Tests with the clients that others wrote."""
