"""Tests of `sessions/conversation`."""
