"""The SDK: wire frames (shared with the gateway), the client, tools, the agent loop.

It needs msgspec, websockets and anyio: no torch, no tokenizer, no model. It imports no other room.

    async with connect("ws://127.0.0.1:8040") as client:
        async with client.session(instructions="Be brief.") as chat:
            async for piece in chat.say("Hello!"):
                print(piece, end="")
"""

from .agent.events import (
    CallFinished,
    CallPiece,
    CallProgress,
    CallStarted,
    RunDone,
    RunEvent,
    RunUsage,
    StepFinished,
    TextPiece,
    WaitFinished,
)
from .agent.run import Run, RunLimits
from .agent.tracing import TraceFile
from .chat import Chat
from .client import Client, connect
from .connection.reconnect import Patience
from .connection.responses import Finished
from .errors import (
    ChatBusy,
    ConnectionFailed,
    ConnectionLost,
    FrameError,
    InputClosed,
    KeyRejected,
    LimitInvalid,
    ModelUnknown,
    NoSummary,
    ProtocolBroken,
    ResponseFailed,
    SDKError,
    ServerError,
    ServerUnavailable,
    SessionLost,
    ToolFailed,
    ToolInvalid,
    ToolRoundsExceeded,
    ToolTypeUnsupported,
)
from .params import ResponseOptions, SamplingOptions, SessionOptions
from .reply import Reply
from .text_input import TextInput
from .tools.context import ToolContext
from .tools.tool import Tool, tool
from .turn import Turn
from .unread import UnreadTurn

__all__ = [
    "CallFinished",
    "CallPiece",
    "CallProgress",
    "CallStarted",
    "Chat",
    "ChatBusy",
    "Client",
    "ConnectionFailed",
    "ConnectionLost",
    "Finished",
    "FrameError",
    "InputClosed",
    "KeyRejected",
    "LimitInvalid",
    "ModelUnknown",
    "NoSummary",
    "Patience",
    "ProtocolBroken",
    "Reply",
    "ResponseFailed",
    "ResponseOptions",
    "Run",
    "RunDone",
    "RunEvent",
    "RunLimits",
    "RunUsage",
    "SDKError",
    "SamplingOptions",
    "ServerError",
    "ServerUnavailable",
    "SessionLost",
    "SessionOptions",
    "StepFinished",
    "TextInput",
    "TextPiece",
    "Tool",
    "ToolContext",
    "ToolFailed",
    "ToolInvalid",
    "ToolRoundsExceeded",
    "ToolTypeUnsupported",
    "TraceFile",
    "Turn",
    "UnreadTurn",
    "WaitFinished",
    "connect",
    "tool",
]
