"""The conversation of a session: its items, the history and its tree, edits, the text that is streamed in,
and how a request with a whole conversation finds its session.
"""
