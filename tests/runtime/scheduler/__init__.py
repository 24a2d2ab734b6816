"""Tests of `runtime/scheduler`."""
