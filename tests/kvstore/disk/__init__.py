"""Tests of `kvstore/disk`."""
