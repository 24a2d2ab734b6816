"""Tests of `sessions/tools`."""
