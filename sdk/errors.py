"""The errors of the SDK: one tree; each class has the stable code that the wire uses.

SDKError
├── FrameError                a frame that is not a valid event; it was ignored
│   ├── FrameMalformed        not JSON, not UTF-8, not an object, or nested too deep
│   ├── FrameTooLarge
│   ├── FieldUnknown          a field that is not in the standard and not ours
│   ├── FieldUnsupported      a field, value or event of the standard that is not served
│   ├── FieldMissing
│   ├── FieldMistyped
│   └── FieldInvalid          right type, wrong value
├── ServerError               the server sent an `error` event, or a failed response
│   └── ResponseFailed        a response ended `failed`; its text so far is kept
├── ConnectionFailed          the connection could not be made
│   ├── KeyRejected           the server wants another API key (401, 403)
│   ├── ModelUnknown        there is no such model or path on the server (404)
│   └── ServerUnavailable     the server takes no connection now (429, 503)
├── ConnectionLost            the connection ended while something waited for it
│   └── SessionLost           and the session cannot be resumed
├── ProtocolBroken            the server sent what this client cannot understand
├── ChatBusy                  a second turn was begun while one runs on this chat
├── InputClosed               text was sent for an input that was committed or cleared
├── ToolInvalid               a callable or dict that cannot be offered as a tool
│   └── ToolTypeUnsupported   a parameter has a type that is no JSON type
├── ToolFailed                a tool reports that it failed; the model reads why
├── LimitInvalid              a limit of a run that is too low
└── ToolRoundsExceeded        the model still calls tools after the last round

`gateway.errors` maps them to wire errors.
"""

from __future__ import annotations

from typing import ClassVar


class SDKError(Exception):
    """Base of the SDK's errors. `code` is stable; `message` is one line for people."""

    code: ClassVar[str] = "sdk_error"

    @property
    def message(self) -> str:
        """What went wrong, in one line."""
        return str(self.args[0]) if self.args else self.code


class FrameError(SDKError):
    """A frame that is not a valid event.

    `param` is the path of the field at fault (`session.tools[0].name`), `event_id` the event's own id, where
    one could be read.
    """

    code = "invalid_frame"

    def __init__(self, message: str, param: str | None = None, event_id: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.event_id = event_id


class FrameMalformed(FrameError):
    """Not JSON, not UTF-8, not an object, or nested too deep."""

    code = "invalid_json"


class FrameTooLarge(FrameError):
    """A frame longer than allowed."""

    code = "frame_too_large"


class FieldUnknown(FrameError):
    """A field that is not in the standard and not ours."""

    code = "unknown_parameter"


class FieldUnsupported(FrameError):
    """A field, value or event of the standard that is not served; listed in `frames.unserved`."""

    code = "unsupported_field"


class FieldMissing(FrameError):
    """A required field is missing."""

    code = "missing_required_parameter"


class FieldMistyped(FrameError):
    """A field of the wrong JSON type."""

    code = "invalid_type"


class FieldInvalid(FrameError):
    """A field of the right type with a value that is not allowed."""

    code = "invalid_value"


class ServerError(SDKError):
    """The server refused an event. `code` is the server's, `event_id` names the client event at fault."""

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        kind: str = "server_error",
        param: str | None = None,
        event_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code or kind  # type: ignore[misc]  # the server's code, per instance
        self.kind = kind
        self.param = param
        self.event_id = event_id


class ResponseFailed(ServerError):
    """A response ended with the status `failed`."""


class ConnectionFailed(SDKError):
    """The connection could not be made: no server listens there, or it refused the connection.

    `status` is the HTTP status of a refusal, and `server_code` the server's code for it; None where there was
    no such answer.
    """

    code = "connection_failed"

    def __init__(self, message: str, status: int | None = None, server_code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.server_code = server_code


class KeyRejected(ConnectionFailed):
    """The server wants another API key, or does not answer to this host or origin (401, 403)."""

    code = "key_rejected"


class ModelUnknown(ConnectionFailed):
    """There is no such model or path on the server (404)."""

    code = "model_unknown"


class ServerUnavailable(ConnectionFailed):
    """The server takes no connection now: it starts, leaves, or has too many (429, 503)."""

    code = "server_unavailable"


class ConnectionLost(SDKError):
    """The connection ended while something waited for it. `close_code`: the WebSocket's, if there was one."""

    code = "connection_lost"

    def __init__(self, message: str, close_code: int | None = None) -> None:
        super().__init__(message)
        self.close_code = close_code


class SessionLost(ConnectionLost):
    """The connection ended, and the session cannot be resumed. `code` is the server's."""

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code or "session_not_found"  # type: ignore[misc]  # the server's code, per instance


class ProtocolBroken(SDKError):
    """The server sent something that this client cannot read, or not in the order of the protocol."""

    code = "protocol_broken"


class ChatBusy(SDKError):
    """This chat has a running turn: read it to its end, or cancel it, first."""

    code = "chat_busy"


class InputClosed(SDKError):
    """This text was committed or cleared."""

    code = "input_closed"


class ToolInvalid(SDKError):
    """A callable or dict that cannot be offered to the model as a tool."""

    code = "tool_invalid"


class ToolTypeUnsupported(ToolInvalid):
    """A parameter of a callable has a type that is no JSON type; ``parameter`` and ``type_name`` name both."""

    code = "tool_type_unsupported"

    def __init__(self, message: str, *, parameter: str, type_name: str) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.type_name = type_name


class ToolFailed(SDKError):
    """A tool reports that it failed; the message is for the model."""

    code = "tool_failed"


class LimitInvalid(SDKError):
    """A limit of a run that is too low."""

    code = "limit_invalid"


class ToolRoundsExceeded(SDKError):
    """The model still calls tools after the last round that the chat allows."""

    code = "tool_rounds_exceeded"
