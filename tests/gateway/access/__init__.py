"""Tests of `gateway/access`."""
