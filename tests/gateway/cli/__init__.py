"""Tests of `gateway/cli`."""
