"""Tests of `kernels/cpu`."""
