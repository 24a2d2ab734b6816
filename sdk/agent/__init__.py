"""The agent loop: a model that calls tools until it is done, as typed events.

`chat.run` gives a `run.Run`; `events` are what it tells, `limits` where it ends, `tracing` who is told besides.
"""
