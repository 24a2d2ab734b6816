"""The link: how the gateway's process talks to the engine's; token ids only, one message up per step.

Holds the messages (``messages``), their framing (``codec``), the gateway's end (``client``, ``wire``,
``generation``), the engine's end (``uplink``, ``pulse``, ``serve``), what a dead engine leaves (``blackbox``,
``incarnation``) and the two forms behind one interface: a supervised child process (``process``) and a thread
(``thread``).
Does not know text, sessions, models or schedules; the gateway's end imports no torch.
"""
