"""The Realtime frames (text subset), one msgspec Struct each, shared by client and gateway.

`items`, `session`, `response`: the objects · `client`, `server`: the events · `codec`: bytes to events and
back · `unserved`: what the standard has and we do not. GA names of the Realtime API, as `openai` types them.
"""
