"""Fault injection in real processes while clients talk: counts what was lost or wrong, and how long it took.

``bench`` is the command; ``engine_faults``, ``server_faults``, ``tier_faults``, ``file_faults`` and
``store_faults`` hold one function per row of its table, ``badio`` a disk on which a chosen write fails,
``crowd`` the clients, ``network`` a proxy that cuts their sockets, ``marked_child`` an engine that dies or
hangs on a marked token, ``store_child`` a server's journal without an engine, ``badsystem.c`` a system with a
wrong clock or useless locks.
"""
