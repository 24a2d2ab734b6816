"""Tests of the room link."""
