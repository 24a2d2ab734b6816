"""The names by which a backend can be asked for. No torch: settings know them."""

BACKENDS = ("auto", "reference", "cpu", "triton", "triton-invariant")
