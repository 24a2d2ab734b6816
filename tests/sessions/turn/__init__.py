"""Tests of `sessions/turn`."""
