"""Tests of `gateway/net`."""
