"""Tests of `sdk/tools`."""
