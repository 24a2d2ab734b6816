"""The names of the backends, as settings have them. Imports no torch."""

BACKENDS = ("auto", "reference", "cpu", "triton", "triton-invariant")
