"""Tests of the room sdk."""
