"""The Realtime frames (text subset), one msgspec Struct each, shared by client and gateway.

Objects: `items`, `session`, `response`, `sampling`, `formats`. Events: `client`, `server`. `codec`: bytes to
events and back. `unserved`: what the standard has and this server has not. Names are those of the Realtime
API's GA version, as the `openai` package types them. "Ours" marks what that API does not have.
"""
