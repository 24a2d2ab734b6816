"""Tests of `sdk/agent`."""
