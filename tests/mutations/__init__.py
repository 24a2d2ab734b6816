"""Tests that plant bugs, and must catch them."""
