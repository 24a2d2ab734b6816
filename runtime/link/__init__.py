"""The link: how the gateway's process talks to the engine's, in token ids, with one message up per step.

It holds the messages, the gateway's end, the engine's end, the heartbeat, the crash report, and two forms of
the engine behind one interface: a supervised child process and a thread. It knows no text, sessions, models
or schedules. The gateway's end imports no torch.
"""
