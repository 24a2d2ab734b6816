"""The front door: sockets, protocol, auth, limits, metrics and the command line.

Holds the Starlette app, the Realtime conversation as a pure state machine and the socket glue around it, the
composition of an engine with sessions (``serve`` with a child process, ``embedded`` with a thread), and the
CLI.

Does not know: how text becomes tokens (``sessions``), how tokens become KV (``runtime``), what a tensor is.
May import ``sessions``, ``runtime`` (to compose it, through its link) and ``sdk.frames``; the CLI, the demo
and the embedded engine also compose the SDK's client. Only ``cli.py`` reads argv and the environment.
"""
