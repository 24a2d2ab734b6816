"""What several benchmarks use: engines as worker processes, interleaved rounds, seeded traffic, options,
plots."""
