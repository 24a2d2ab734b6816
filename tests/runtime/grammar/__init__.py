"""Tests of `runtime/grammar`."""
