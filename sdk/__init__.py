"""The SDK: wire frames (shared with the gateway), the client, tools, the agent loop.

It needs msgspec, websockets and anyio: no torch, no tokenizer, no model. It imports no other room.

    async with connect("ws://127.0.0.1:8040") as client:
        async with client.session(instructions="Be brief.") as chat:
            async for piece in chat.say("Hello!"):
                print(piece, end="")
"""

from .agent.events import (
    CallFinished,
    CallOutcome,
    CallPiece,
    CallProgress,
    CallStarted,
    RunDone,
    RunEvent,
    RunUsage,
    StepFinished,
    StopReason,
    TextPiece,
    WaitFinished,
)
from .agent.run import Run, RunLimits
from .agent.tracing import TraceFile, Tracer
from .chat import Chat
from .client import Client, Dial, Importing, connect
from .connection.reconnect import Patience, Retry
from .connection.responses import Finished
from .connection.transport import Transport
from .errors import (
    ChatBusy,
    ConnectionFailed,
    ConnectionFault,
    ConnectionLost,
    ExportInvalid,
    FieldInvalid,
    FieldMissing,
    FieldMistyped,
    FieldUnknown,
    FieldUnsupported,
    FrameError,
    FrameMalformed,
    FrameTooLarge,
    InputClosed,
    KeyRejected,
    LimitInvalid,
    ModelUnknown,
    NoSummary,
    NotEntered,
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
from .frames.client import ClientEvent, TypedRole
from .frames.formats import FunctionTool
from .frames.items import AnyItem, FunctionCallItem, FunctionCallOutputItem, MessageItem
from .frames.response import KVReceipt, Response, Usage
from .frames.sampling import TokenLogprob
from .frames.server import (
    Relative,
    ServerEvent,
    SessionBlocksListed,
    SessionLeased,
    SessionRewound,
    SessionSettled,
    SessionStaged,
    TextCommitted,
)
from .frames.session import SessionResource
from .opening import AsyncOpening
from .params import ResponseOptions, RunOptions, SamplingOptions, SessionOptions, UpdateOptions
from .reply import Reply
from .text_input import TextInput
from .tools.context import Report, ToolContext, Wrote
from .tools.tool import Invoke, ResultKind, Tool, ToolLike, ToolResult, tool
from .turn import Turn
from .unread import UnreadTurn

__all__ = [
    "AnyItem",
    "AsyncOpening",
    "CallFinished",
    "CallOutcome",
    "CallPiece",
    "CallProgress",
    "CallStarted",
    "Chat",
    "ChatBusy",
    "Client",
    "ClientEvent",
    "ConnectionFailed",
    "ConnectionFault",
    "ConnectionLost",
    "Dial",
    "ExportInvalid",
    "FieldInvalid",
    "FieldMissing",
    "FieldMistyped",
    "FieldUnknown",
    "FieldUnsupported",
    "Finished",
    "FrameError",
    "FrameMalformed",
    "FrameTooLarge",
    "FunctionCallItem",
    "FunctionCallOutputItem",
    "FunctionTool",
    "Importing",
    "InputClosed",
    "Invoke",
    "KVReceipt",
    "KeyRejected",
    "LimitInvalid",
    "MessageItem",
    "ModelUnknown",
    "NoSummary",
    "NotEntered",
    "Patience",
    "ProtocolBroken",
    "Relative",
    "Reply",
    "Report",
    "Response",
    "ResponseFailed",
    "ResponseOptions",
    "ResultKind",
    "Retry",
    "Run",
    "RunDone",
    "RunEvent",
    "RunLimits",
    "RunOptions",
    "RunUsage",
    "SDKError",
    "SamplingOptions",
    "ServerError",
    "ServerEvent",
    "ServerUnavailable",
    "SessionBlocksListed",
    "SessionLeased",
    "SessionLost",
    "SessionOptions",
    "SessionResource",
    "SessionRewound",
    "SessionSettled",
    "SessionStaged",
    "StepFinished",
    "StopReason",
    "TextCommitted",
    "TextInput",
    "TextPiece",
    "TokenLogprob",
    "Tool",
    "ToolContext",
    "ToolFailed",
    "ToolInvalid",
    "ToolLike",
    "ToolResult",
    "ToolRoundsExceeded",
    "ToolTypeUnsupported",
    "TraceFile",
    "Tracer",
    "Transport",
    "Turn",
    "TypedRole",
    "UnreadTurn",
    "UpdateOptions",
    "Usage",
    "WaitFinished",
    "Wrote",
    "connect",
    "tool",
]
