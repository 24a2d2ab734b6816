"""The errors of the SDK: one tree; each class has the stable code that the wire uses.

SDKError
├── FrameError                a frame that is not a valid event; it was not sent, or the server ignored it
│   ├── FrameMalformed        not JSON (or MessagePack), not UTF-8, not an object, or too deep
│   ├── FrameTooLarge
│   ├── FieldUnknown          a field that is not in the standard and not ours
│   ├── FieldUnsupported      a field, value or event of the standard that is not served
│   ├── FieldMissing
│   ├── FieldMistyped
│   ├── FieldInvalid          right type, wrong value
│   └── ExportInvalid         not an exported session, or not one that this version reads
├── ServerError               the server refused an event
│   └── ResponseFailed        a response ended `failed`; its text so far is kept here
├── ConnectionFault           something is wrong with the connection; names the server and the session's handle
│   ├── ConnectionFailed      the connection could not be made
│   │   ├── KeyRejected       the server wants another API key (401, 403)
│   │   ├── ModelUnknown      there is no such model or path on the server (404)
│   │   └── ServerUnavailable the server takes no connection now (429, 503)
│   ├── ConnectionLost        the connection ended while something waited for it
│   │   └── SessionLost       and the session cannot be resumed
│   └── ProtocolBroken        the server sent what this client cannot understand
├── NotEntered                a client or session is used without `async with`
├── ChatBusy                  a second turn was begun while one is being read on this chat
├── InputClosed               text was sent for an input that was committed or cleared
├── ToolInvalid               a callable or dict that cannot be offered as a tool
│   └── ToolTypeUnsupported   a parameter has a type that is no JSON type
├── ToolFailed                a tool reports that it failed; the model reads why
├── LimitInvalid              a limit of a run that is too low
├── NoSummary                 the model wrote nothing when it was asked for a summary
└── ToolRoundsExceeded        the model still calls tools after the last round

`gateway.errors` maps each `FrameError` to a wire error.
"""

from __future__ import annotations

from typing import ClassVar, Self

DELETED = 4004
"""The code with which the server closes the WebSocket of a session that was deleted."""


class SDKError(Exception):
    """Base of the SDK's errors, which its client raises; a `FrameError` is raised by the server, too. `code`: a
    stable word for programs; `message`: one line for people."""

    code: ClassVar[str] = "sdk_error"

    @property
    def message(self) -> str:
        """What went wrong, in one line; `code` if the error has no text."""
        return str(self.args[0]) if self.args else self.code


class FrameError(SDKError):
    """A frame that is not a valid event.

    The client raises it before it sends anything; the server ignores such a frame. `param`: the path of the
    field at fault (`session.tools[0].name`); `event_id`: the event's own id. Each is None if it is not known.
    """

    code = "invalid_frame"

    def __init__(self, message: str, param: str | None = None, event_id: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.event_id = event_id


class FrameMalformed(FrameError):
    """A frame is not JSON, not UTF-8, not an object, or nested too deep.

    Raised by the client before it sends the frame, or by the server for a frame that it received.
    """

    code = "invalid_json"


class FrameTooLarge(FrameError):
    """A frame has more bytes than the server takes.

    Raised by the client before it sends the frame, or by the server for a frame that it received.
    """

    code = "frame_too_large"


class FieldUnknown(FrameError):
    """A frame has a field that is neither in OpenAI's standard nor one of ours.

    Raised by the client before it sends the frame, or by the server for a frame that it received.
    """

    code = "unknown_parameter"


class FieldUnsupported(FrameError):
    """A frame has a field, value or event of OpenAI's standard that this server does not serve; listed in
    `frames.unserved`.

    Raised by the client before it sends the frame, or by the server for a frame that it received.
    """

    code = "unsupported_field"


class FieldMissing(FrameError):
    """A frame lacks a required field.

    Raised by the client before it sends the frame, or by the server for a frame that it received.
    """

    code = "missing_required_parameter"


class FieldMistyped(FrameError):
    """A field of a frame has the wrong JSON type.

    Raised by the client before it sends the frame, or by the server for a frame that it received.
    """

    code = "invalid_type"


class FieldInvalid(FrameError):
    """A field of a frame has the right type and a value that is not allowed.

    Raised by the client before it sends the frame, or by the server for a frame that it received.
    """

    code = "invalid_value"


class ExportInvalid(FrameError):
    """What is to be imported is no exported session, was cut off, or has another version's form.

    Raised by the client before it sends anything, or by the server for what it received.
    """

    code = "invalid_export"


class ServerError(SDKError):
    """The server refused a client event; the client raises this when it reads the refusal. `code`: the
    server's, or `kind` if it gave none; `kind`: the error's `type` on the wire; `param`: the path of the field
    at fault; `event_id`: the id of the event at fault; `retry_after`: seconds after which the same event may be
    served. The last three are None if the server named none."""

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        kind: str = "server_error",
        param: str | None = None,
        event_id: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code or kind  # type: ignore[misc]  # the server's code, per instance
        self.kind = kind
        self.param = param
        self.event_id = event_id
        self.retry_after = retry_after


class ResponseFailed(ServerError):
    """Raised by the client that reads a response: it ended with the status `failed`, and `code` is the server's
    reason; or a turn has no response, because the chat's next turn began before it was read to its end."""


class ConnectionFault(SDKError):
    """Something is wrong with the connection to a server. `cause`: what; `address`: the server's; `handle`: a
    secret with which `Client.resume` opens the session again. The message shows all three; the last two are
    None if they are not known, or there is no session yet."""

    code = "connection_fault"
    with_address: ClassVar[str] = "At {address}: {cause}"
    with_handle: ClassVar[str] = "; client.resume({handle!r}) opens the session again"

    def __init__(self, cause: str, *, address: str | None = None, handle: str | None = None) -> None:
        super().__init__(cause)
        self.cause = cause
        self.address = address
        self.handle = handle

    @property
    def summary(self) -> str:
        """Address and cause in one line, without the handle."""
        known = bool(self.address)
        return self.with_address.format(address=self.address, cause=self.cause) if known else self.cause

    @property
    def message(self) -> str:
        """Address, cause and handle in one line."""
        return self.summary + (self.with_handle.format(handle=self.handle) if self.handle else "")

    def __str__(self) -> str:
        return self.message

    def of(self, address: str | None, handle: str | None) -> Self:
        """The same error, with the address and the handle if it has none yet."""
        self.address = self.address or address
        self.handle = self.handle or handle
        return self


class ConnectionFailed(ConnectionFault):
    """The connection could not be made: the address is wrong, no server listens there, or it refused the
    connection.

    `status`: the HTTP status of a refusal; `server_code`: the server's code for it. Each is None if there was
    no such answer.
    """

    code = "connection_failed"
    with_address = "Cannot connect to {address}: {cause}"

    def __init__(
        self,
        cause: str,
        status: int | None = None,
        server_code: str | None = None,
        *,
        address: str | None = None,
    ) -> None:
        super().__init__(cause, address=address)
        self.status = status
        self.server_code = server_code


class KeyRejected(ConnectionFailed):
    """The server wants another API key, or does not answer to this host or origin (401, 403)."""

    code = "key_rejected"


class ModelUnknown(ConnectionFailed):
    """There is no such model or path on the server (404)."""

    code = "model_unknown"


class ServerUnavailable(ConnectionFailed):
    """The server takes no connection now: it is starting, shutting down, or has too many (429, 503)."""

    code = "server_unavailable"


class ConnectionLost(ConnectionFault):
    """The connection ended, or was closed here, while something waited for it. `close_code`: the code with
    which the server closed the WebSocket; None if the connection broke without one."""

    code = "connection_lost"
    with_address = "The connection to {address} is lost: {cause}"

    def __init__(self, cause: str, close_code: int | None = None) -> None:
        super().__init__(cause)
        self.close_code = close_code

    @staticmethod
    def closed(cause: str, close_code: int | None) -> ConnectionLost:
        """The error for a connection that the server has closed with this code; `SessionLost` for `DELETED`."""
        if close_code == DELETED:
            return SessionLost("The session was deleted", code="session_deleted", close_code=close_code)
        return ConnectionLost(cause, close_code)


class SessionLost(ConnectionLost):
    """The session cannot be resumed on a new connection, so trying again does not help. `code`: the server's
    reason."""

    with_address = "The session at {address} cannot be resumed: {cause}"
    with_handle = "; its handle was {handle!r}"

    def __init__(self, cause: str, *, code: str | None = None, close_code: int | None = None) -> None:
        super().__init__(cause, close_code)
        self.code = code or "session_not_found"  # type: ignore[misc]  # the server's code, per instance


class ProtocolBroken(ConnectionFault):
    """The server sent something that this client cannot read, or that may not come at this point of the
    protocol."""

    code = "protocol_broken"


class NotEntered(SDKError, AttributeError):
    """A client or a session is used that was made and not opened: it lacks its `async with`, or `with`. The
    message says what to write."""

    code = "not_entered"


class ChatBusy(SDKError):
    """A turn is being read on this chat: read it to its end, or cancel it, before you begin another."""

    code = "chat_busy"


class InputClosed(SDKError):
    """The `TextInput` was committed or cleared, so it takes no more text."""

    code = "input_closed"


class ToolInvalid(SDKError):
    """A callable or dict that cannot be offered to the model as a tool, or two tools with one name."""

    code = "tool_invalid"


class ToolTypeUnsupported(ToolInvalid):
    """A parameter of a callable has a type that is no JSON type. ``parameter``: its name; ``type_name``: the
    type, as text."""

    code = "tool_type_unsupported"

    def __init__(self, message: str, *, parameter: str, type_name: str) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.type_name = type_name


class ToolFailed(SDKError):
    """A tool failed, and says why: the model reads the message as the call's output. For tools to raise; the
    SDK also raises it for an output that is too long."""

    code = "tool_failed"


class LimitInvalid(SDKError):
    """A limit in `RunLimits` is too low."""

    code = "limit_invalid"


class NoSummary(SDKError):
    """`Chat.compact` asked the model for a summary, and it wrote no text."""

    code = "no_summary"


class ToolRoundsExceeded(SDKError):
    """The model called tools again after `max_tool_rounds` rounds of tools in one turn, which are all that the
    chat allows."""

    code = "tool_rounds_exceeded"
