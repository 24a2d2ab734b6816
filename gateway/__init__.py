"""The gateway: sockets, faces, keys, limits, metrics and the command line. See ``README.md``.

A face is one protocol that clients speak, over sessions in memory: ``realtime``, ``chat``. ``server`` composes
an engine in a child process, ``embedded`` one in a thread; ``offline`` is a model in Python without a server.
Only ``cli`` reads argv and the environment; it, ``embedded`` and ``offline`` use the SDK's client, too.
``sessions`` turns text into tokens, ``runtime`` tokens into KV.
"""
