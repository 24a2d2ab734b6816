"""Tests of `kernels/reference`."""
