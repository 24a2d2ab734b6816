"""The gateway: sockets, faces, keys, limits, metrics and the command line. See ``README.md``.

A face puts live sessions on the wire in one protocol; ``realtime`` is the first. ``server`` composes an engine
in a child process, ``embedded`` one in a thread. Only ``cli`` reads argv and the environment; it and
``embedded`` compose the SDK's client, too. ``sessions`` turns text into tokens, ``runtime`` tokens into KV.
"""
