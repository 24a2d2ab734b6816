"""Tests of `gateway/live`."""
