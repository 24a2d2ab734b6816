"""The connection to a server: its transport, what it sends and receives, many sessions on one socket,
reconnecting, and the responses by the events read so far.
"""
