"""Tests of `gateway/responses`."""
