"""Tests of `gateway/operator`."""
