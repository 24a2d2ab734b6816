"""The names by which settings choose a backend (``auto`` takes the fastest that can compute), and what weights
are quantised to as a model is loaded. Imports no torch."""

BACKENDS = ("auto", "reference", "cpu", "triton", "triton-invariant")
AT_LOAD = ("int8", "int4", "fp8")
