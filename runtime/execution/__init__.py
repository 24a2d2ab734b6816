"""A plan becomes numbers: the runner, the sampler, warm-up, and the watchdog's deadlines."""
