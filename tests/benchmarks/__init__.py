"""Tests of the room benchmarks."""
