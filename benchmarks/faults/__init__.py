"""Faults made on purpose, in real processes, while clients talk: what was lost, what was wrong, how long it
took.

``bench`` is the command; ``engine_faults`` and ``server_faults`` hold one function per row of its table,
``crowd`` the clients, ``marked_child`` an engine that dies or hangs of a marked token. Knows nothing of the KV
store's files.
"""
