"""Tests of `gateway/realtime`."""
