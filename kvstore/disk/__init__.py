"""The disk tier: a process of its own around an LMDB environment, which may die.

The gateway's side starts, kills and reaps it (``process``). ``client`` is the engine's end, ``messages`` is
what crosses, ``server`` is the process's loop, ``store`` its file. ``direct_read`` reads records that lie in
the page cache without the process. ``admin`` is for the operator. Only the process itself ever waits for the
disk.
"""
