"""What the speed benchmarks share: engines as worker processes, interleaved rounds, models, options, plots."""
