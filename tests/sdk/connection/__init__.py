"""Tests of `sdk/connection`."""
