"""Computes plans: the runner, the sampler, warm-up, and a runner that tells how long a step may take."""
