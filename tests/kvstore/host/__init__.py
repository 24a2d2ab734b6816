"""Tests of `kvstore/host`."""
