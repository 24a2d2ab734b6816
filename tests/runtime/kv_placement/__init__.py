"""Tests of `runtime/kv_placement`."""
