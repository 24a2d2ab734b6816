"""What the server counts: the metrics for Prometheus, those under the names of vLLM, the counts and times of
turns, and spans for tracing.
"""
