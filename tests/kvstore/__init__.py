"""Tests of the room kvstore."""
