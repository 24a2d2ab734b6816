"""Tests of `kernels/gpu`."""
