"""Faults made on purpose, in real processes, while clients talk: what was lost, what was wrong, how long it
took.

``bench`` is the command; ``engine_faults``, ``server_faults``, ``tier_faults`` and ``file_faults`` hold one
function per row of its table, ``badio`` a disk whose k-th write fails, ``crowd`` the clients, ``network`` what
cuts their sockets, ``marked_child`` an engine that dies or hangs of a marked token.
"""
