"""The SDK: wire frames (shared with the gateway), the client, tools, the agent loop.

It needs msgspec, websockets and anyio: no torch, no tokenizer, no model. It imports no other room.

    async with connect("ws://127.0.0.1:8040") as client:
        async with client.session(instructions="Be brief.") as chat:
            async for piece in chat.say("Hello!"):
                print(piece, end="")
"""

import inspect

from .agent.events import CallFinished as CallFinished
from .agent.events import CallOutcome as CallOutcome
from .agent.events import CallPiece as CallPiece
from .agent.events import CallProgress as CallProgress
from .agent.events import CallStarted as CallStarted
from .agent.events import RunDone as RunDone
from .agent.events import RunEvent as RunEvent
from .agent.events import RunUsage as RunUsage
from .agent.events import StepFinished as StepFinished
from .agent.events import StopReason as StopReason
from .agent.events import TextPiece as TextPiece
from .agent.events import WaitFinished as WaitFinished
from .agent.run import Run as Run
from .agent.run import RunLimits as RunLimits
from .agent.tracing import TraceFile as TraceFile
from .agent.tracing import Tracer as Tracer
from .chat import Chat as Chat
from .client import Client as Client
from .client import Dial as Dial
from .client import Importing as Importing
from .client import connect as connect
from .connection.reconnect import Patience as Patience
from .connection.reconnect import Retry as Retry
from .connection.responses import Finished as Finished
from .connection.transport import Transport as Transport
from .errors import ChatBusy as ChatBusy
from .errors import ConnectionFailed as ConnectionFailed
from .errors import ConnectionFault as ConnectionFault
from .errors import ConnectionLost as ConnectionLost
from .errors import ExportInvalid as ExportInvalid
from .errors import FieldInvalid as FieldInvalid
from .errors import FieldMissing as FieldMissing
from .errors import FieldMistyped as FieldMistyped
from .errors import FieldUnknown as FieldUnknown
from .errors import FieldUnsupported as FieldUnsupported
from .errors import FrameError as FrameError
from .errors import FrameMalformed as FrameMalformed
from .errors import FrameTooLarge as FrameTooLarge
from .errors import InputClosed as InputClosed
from .errors import KeyRejected as KeyRejected
from .errors import LimitInvalid as LimitInvalid
from .errors import ModelUnknown as ModelUnknown
from .errors import NoSummary as NoSummary
from .errors import NotEntered as NotEntered
from .errors import ProtocolBroken as ProtocolBroken
from .errors import ResponseFailed as ResponseFailed
from .errors import SDKError as SDKError
from .errors import ServerError as ServerError
from .errors import ServerUnavailable as ServerUnavailable
from .errors import SessionLost as SessionLost
from .errors import ToolFailed as ToolFailed
from .errors import ToolInvalid as ToolInvalid
from .errors import ToolRoundsExceeded as ToolRoundsExceeded
from .errors import ToolTypeUnsupported as ToolTypeUnsupported
from .frames.client import ClientEvent as ClientEvent
from .frames.client import TypedRole as TypedRole
from .frames.formats import FunctionTool as FunctionTool
from .frames.items import AnyItem as AnyItem
from .frames.items import FunctionCallItem as FunctionCallItem
from .frames.items import FunctionCallOutputItem as FunctionCallOutputItem
from .frames.items import MessageItem as MessageItem
from .frames.response import KVReceipt as KVReceipt
from .frames.response import Response as Response
from .frames.response import Usage as Usage
from .frames.sampling import TokenLogprob as TokenLogprob
from .frames.server import Relative as Relative
from .frames.server import ServerEvent as ServerEvent
from .frames.server import SessionBlocksListed as SessionBlocksListed
from .frames.server import SessionLeased as SessionLeased
from .frames.server import SessionRewound as SessionRewound
from .frames.server import SessionSettled as SessionSettled
from .frames.server import SessionStaged as SessionStaged
from .frames.server import TextCommitted as TextCommitted
from .frames.session import SessionResource as SessionResource
from .opening import AsyncOpening as AsyncOpening
from .params import ResponseOptions as ResponseOptions
from .params import RunOptions as RunOptions
from .params import SamplingOptions as SamplingOptions
from .params import SessionOptions as SessionOptions
from .params import UpdateOptions as UpdateOptions
from .reading import UnreadTurn as UnreadTurn
from .reply import Reply as Reply
from .text_input import TextInput as TextInput
from .tools.context import Report as Report
from .tools.context import ToolContext as ToolContext
from .tools.context import Wrote as Wrote
from .tools.tool import Invoke as Invoke
from .tools.tool import ResultKind as ResultKind
from .tools.tool import Tool as Tool
from .tools.tool import ToolLike as ToolLike
from .tools.tool import ToolResult as ToolResult
from .tools.tool import tool as tool
from .turn import Turn as Turn

__all__ = [name for name, value in globals().items() if not (name.startswith("_") or inspect.ismodule(value))]
