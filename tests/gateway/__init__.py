"""Tests of the room gateway."""
