"""Chat Completions over a scripted engine."""
