"""Tests of `runtime/execution`."""
