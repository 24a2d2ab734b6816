"""Tests of `gateway/metrics`."""
