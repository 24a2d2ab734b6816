"""The names by which settings choose a backend; ``auto`` takes the fastest that can compute. Imports no
torch."""

BACKENDS = ("auto", "reference", "cpu", "triton", "triton-invariant")
