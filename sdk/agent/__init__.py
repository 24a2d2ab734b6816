"""The agent loop: a model calls tools until it is done, and a run yields typed events.

`chat.run` gives a `run.Run`: its `events`, tool `calls` and tracers (`tracing`) have a file each.
"""
