"""The code of the Chat Completions protocol, and of the older Completions: it translates requests and replies,
and runs turns by `gateway.transcripts`."""
