"""Tests of `sessions/journal`."""
