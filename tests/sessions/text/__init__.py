"""Tests of `sessions/text`."""
