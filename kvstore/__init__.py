"""Room kvstore: where KV lives and under which name.

Holds: a block's shape (``groups``) and name (``keys``), who holds it (``pool``, ``references``, ``owners``,
``audit``), where it stands in a sequence (``table``) and under which keys (``keychain``), how it is found
again (``index``), who goes first (``eviction``) and whose records below the device (``shares``), the bytes
themselves (``arena``), the interface of what lies below the device (``tiers``), the host tier (``slots`` in a
memfd, ``host`` for which record is where), copies to and from it (``moves``), and the disk tier, a process of
its own (``shelf``).
Does not know: sequences, turns, sessions, models, policies, clocks, sockets.
May import: ``kernels`` (moves). Only ``arena`` and ``moves`` import torch; all bookkeeping runs without it.
"""
