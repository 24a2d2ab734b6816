"""Tests of the room shelf."""
