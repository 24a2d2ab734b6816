"""The client's room: wire frames (shared with the gateway), the client, the agent loop.

Holds what is needed to talk to a Holdfast server and nothing else: no torch, no tokenizer, no model.
May import msgspec, websockets, anyio and the standard library; no other room.

    async with connect("ws://127.0.0.1:8000") as client:
        async with client.session(instructions="Be brief.") as chat:
            async for piece in chat.say("Hello!"):
                print(piece, end="")
"""

from .chat import Chat
from .client import Client, connect
from .errors import (
    ChatBusy,
    ConnectionFailed,
    ConnectionLost,
    FrameError,
    InputClosed,
    ProtocolBroken,
    ResponseFailed,
    SDKError,
    ServerError,
    SessionLost,
    ToolInvalid,
    ToolRoundsExceeded,
)
from .reply import Finished, Reply
from .textinput import TextInput
from .turn import Turn

__all__ = [
    "Chat",
    "ChatBusy",
    "Client",
    "ConnectionFailed",
    "ConnectionLost",
    "Finished",
    "FrameError",
    "InputClosed",
    "ProtocolBroken",
    "Reply",
    "ResponseFailed",
    "SDKError",
    "ServerError",
    "SessionLost",
    "TextInput",
    "ToolInvalid",
    "ToolRoundsExceeded",
    "Turn",
    "connect",
]
