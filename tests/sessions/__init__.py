"""Tests of the room sessions."""
