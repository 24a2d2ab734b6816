"""The gateway: sockets, faces, keys, limits, metrics and the command line. See ``README.md``.

A face is the code of one protocol that clients speak: ``realtime``, ``responses``, ``chat`` or ``messages``.
All faces use the same sessions, which are in memory. ``server`` runs the gateway with an engine in a child
process, ``embedded`` with one in a thread; ``offline`` is a model in Python without a server. Only ``cli``
reads argv and the environment; it, ``embedded`` and ``offline`` use the SDK's client, too. ``sessions`` turns
text into tokens, ``runtime`` tokens into KV.
"""
