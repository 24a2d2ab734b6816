"""The one table from typed errors to wire errors: type, code, HTTP status and close code.

`TABLE` has the error classes of ``sdk``, ``sessions`` and ``runtime`` that can reach a client. Those of the
gateway have their row in the class attribute ``wire``. A class without a row uses the row of its nearest
parent. An error that is in none of these trees is a mistake of the server. Errors of ``kvstore`` and
``kernels`` do not leave the engine.

GatewayError
├── AddressUnusable ── PortTaken
├── KeysUnusable ── LimitsTooLarge
├── NetworkInvalid, CertificateUnusable, NameUnusable, TracingUnavailable
├── KeyInvalid, HostRefused, OriginRefused, KeyRemoved
├── SlowReader, TooManyControlFrames, TooManyFragments, TooManyInvalid
├── TooManyResponses, TooManyMoves, NothingToCancel, RateLimited, QueueTooLong
├── ResponseUnknown, PreviousResponseUnknown, ConversationUnknown
├── TooManyLanes, TooManyRequests
├── RouteUnknown, MethodRefused, UpgradeNeeded, ThreadsNotServed
└── ModelNotServed, SessionMoved, SessionRequired, Draining
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from msgspec import UNSET

from ..runtime import errors as runtime
from ..sdk import errors as sdk
from ..sdk.frames.server import ErrorDetails
from ..sessions import errors as sessions


@dataclass(frozen=True, slots=True)
class WireError:
    """An error as clients see it. ``type``, ``code``: in an ``error`` event and in an HTTP body. ``status``: of
    an HTTP answer. ``close``: the close code of a socket that the error ends; None if it ends none."""

    type: str
    code: str
    status: int
    close: int | None = None


def _invalid(code: str, status: int = 400, close: int | None = None) -> WireError:
    return WireError("invalid_request_error", code, status, close)


def _server(code: str, status: int = 500, close: int | None = None) -> WireError:
    return WireError("server_error", code, status, close)


def _busy(code: str, status: int = 429, close: int | None = None) -> WireError:
    return WireError("rate_limit_error", code, status, close)


def _unknown(code: str, status: int) -> WireError:
    return WireError("authentication_error", code, status)


INTERNAL = _server("internal_error")
OVERLOADED = 529
"""Anthropic's status for an engine that cannot take more."""
_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    426: {"Upgrade": "websocket", "Connection": "Upgrade"},
}
_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
"""Anthropic's types of errors by their status; the table's type stands for the others."""


class GatewayError(Exception):
    """An error that the gateway itself raises."""

    wire: ClassVar[WireError] = INTERNAL

    @property
    def message(self) -> str:
        """What went wrong, in one line; the wire code if no text was given."""
        return str(self.args[0]) if self.args else self.wire.code


class AddressUnusable(GatewayError):
    """The server cannot listen on this address."""

    wire = _server("address_unusable", 503)


class PortTaken(AddressUnusable):
    """Another program listens on this address."""

    wire = _server("port_taken", 503)


class KeysUnusable(GatewayError):
    """The keys file cannot be read, a key, tenant or limit in it is invalid, or a key option is."""

    wire = _server("keys_unusable", 503)


class LimitsTooLarge(KeysUnusable):
    """The keys file lets tenants take more than the server or its machine has."""


class NetworkInvalid(GatewayError):
    """An option about host names, proxies, the root path or TLS is invalid."""

    wire = _server("network_invalid", 503)


class NameUnusable(GatewayError):
    """A name under which the model is to be served is empty, too long, or has blanks."""

    wire = _server("name_unusable", 503)


class CertificateUnusable(GatewayError):
    """The TLS certificate or its key cannot be read, or they do not belong together."""

    wire = _server("certificate_unusable", 503)


class TracingUnavailable(GatewayError):
    """Traces were asked for, and the extra `otel` is not installed, or the endpoint is no URL."""

    wire = _server("tracing_unavailable", 503)


class KeyInvalid(GatewayError):
    """A request has no key, or one that is not in the keys file."""

    wire = _unknown("invalid_api_key", 401)


class HostRefused(GatewayError):
    """The Host header names a host that is not this server."""

    wire = _unknown("host_not_allowed", 403)


class OriginRefused(GatewayError):
    """The request comes from a web page of an origin that is not allowed."""

    wire = _unknown("origin_not_allowed", 403)


class KeyRemoved(GatewayError):
    """The key that opened this socket is not in the keys file any more, or is another tenant's."""

    wire = _invalid("invalid_api_key", 401, close=1008)


class SlowReader(GatewayError):
    """A client took no frame for too long."""

    wire = _invalid("slow_reader", 408, close=1008)


class TooManyControlFrames(GatewayError):
    """A socket sends too many pings and pongs."""

    wire = _invalid("too_many_control_frames", 429, close=1008)


class TooManyFragments(GatewayError):
    """A message came in too many frames."""

    wire = _invalid("too_many_fragments", 429, close=1008)


class TooManyInvalid(GatewayError):
    """A socket sends too many frames that are no events."""

    wire = _invalid("too_many_invalid_events", 429, close=1008)


class TooManyResponses(GatewayError):
    """A session has as many responses running as it may."""

    wire = _busy("too_many_responses")


class TooManyMoves(GatewayError):
    """A session has as many leases, stages, settles and maps of blocks running as it may."""

    wire = _busy("too_many_moves")


class RateLimited(GatewayError):
    """The key has used its requests or tokens of this minute; nothing began. ``retry_after``: seconds until the
    same request may be served."""

    wire = _busy("rate_limit_exceeded")

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueTooLong(GatewayError):
    """A turn would wait longer for the engine than the server's `--max-queue-seconds`; nothing began.
    ``retry_after``: the predicted wait in seconds."""

    wire = _busy("engine_overloaded", 503)

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class NothingToCancel(GatewayError):
    """A cancel names no response that runs, or none runs in the conversation."""

    wire = _invalid("response_cancel_not_active")


class ResponseUnknown(GatewayError):
    """There is no stored or running response with this id for this tenant."""

    wire = _invalid("response_not_found", 404)


class PreviousResponseUnknown(GatewayError):
    """The response from which a request continues is not known."""

    wire = _invalid("previous_response_not_found")

    def __init__(self, response_id: str) -> None:
        super().__init__(f"Previous response with id {response_id[:128]!r} not found")
        self.param = "previous_response_id"


class ConversationUnknown(GatewayError):
    """There is no conversation with this id for this tenant."""

    wire = _invalid("conversation_not_found", 404)


class TooManyLanes(GatewayError):
    """A socket has used as many lanes (``stream_id``) as it may."""

    wire = _busy("websocket_stream_limit_reached")


class TooManyRequests(GatewayError):
    """A socket has as many requests in flight as it may."""

    wire = _busy("websocket_connection_limit_reached")


class ModelNotServed(GatewayError):
    """The client asked for a model that is not this server's."""

    wire = _invalid("model_not_found", 404, close=1008)


class RouteUnknown(GatewayError):
    """The server does not serve this path."""

    wire = _invalid("not_found", 404)


class MethodRefused(GatewayError):
    """The server serves this path, but not by this method."""

    wire = _invalid("method_not_allowed", 405)

    def __init__(self, message: str, allowed: Iterable[str]) -> None:
        """``allowed``: the methods by which it does."""
        super().__init__(message)
        self.allowed = sorted(allowed)


class UpgradeNeeded(GatewayError):
    """The path is for WebSockets only, and the request is a plain HTTP request."""

    wire = _invalid("upgrade_required", 426)


class ThreadsNotServed(GatewayError):
    """A request of Messages wants a thread. Clients then send the whole conversation each time."""

    wire = _invalid("thread_unsupported_request")


class SessionMoved(GatewayError):
    """The session is on a newer socket now, or was pruned; this socket is closed."""

    wire = _invalid("session_moved", 409, close=4001)


class SessionRequired(GatewayError):
    """The socket was opened to resume a session, and has not done so yet."""

    wire = _invalid("session_required", 409)


class Draining(GatewayError):
    """The server is going away and takes no new work."""

    wire = _server("server_going_away", 503, close=1012)


OWN: list[type[GatewayError]] = [*GatewayError.__subclasses__(), PortTaken]

TABLE: dict[type[Exception], WireError] = {
    # invalid frames
    sdk.FrameError: _invalid("invalid_frame"),
    sdk.FrameMalformed: _invalid("invalid_json"),
    sdk.FrameTooLarge: _invalid("frame_too_large", 413),
    sdk.FieldUnknown: _invalid("unknown_parameter"),
    sdk.FieldUnsupported: _invalid("unsupported_field"),
    sdk.FieldMissing: _invalid("missing_required_parameter"),
    sdk.FieldMistyped: _invalid("invalid_type"),
    sdk.FieldInvalid: _invalid("invalid_value"),
    # what a session refuses
    sessions.SessionError: INTERNAL,
    sessions.RequestInvalid: _invalid("invalid_value"),
    sessions.ItemUnknown: _invalid("item_not_found", 404),
    sessions.ItemExists: _invalid("item_already_exists", 409),
    sessions.ItemInvalid: _invalid("invalid_value"),
    sessions.CallUnknown: _invalid("invalid_tool_call_id", 404),
    sessions.CallAnswered: _invalid("tool_call_already_answered", 409),
    sessions.InputInvalid: _invalid("invalid_value"),
    sessions.CutInvalid: _invalid("invalid_value"),
    sessions.MemberUnknown: _invalid("session_not_found", 404),
    sessions.NameInvalid: _invalid("invalid_value"),
    sessions.PruneInvalid: _invalid("invalid_value"),
    sessions.ToolInvalid: _invalid("invalid_value"),
    sessions.SamplingInvalid: _invalid("invalid_value"),
    sessions.GrammarInvalid: _invalid("invalid_grammar"),
    sessions.PromptTooLong: _invalid("context_length_exceeded"),
    sessions.ConversationBusy: _invalid("conversation_already_has_active_response", 409),
    sessions.TemplateFailed: _invalid("template_failed"),
    sessions.TokenizerUnreadable: _server("model_unreadable", 503, close=1011),
    sessions.SessionUnknown: _invalid("session_not_found", 404),
    sessions.SessionLimit: _busy("session_limit_reached", 429, close=1013),
    sessions.TurnLimit: _busy("too_many_responses"),
    sessions.SessionClosed: _server("session_closed", 410, close=1011),
    sessions.HandleUnknown: _invalid("session_not_found", 404),
    sessions.EventsExpired: _invalid("events_expired", 410),
    sessions.StorageUnavailable: _server("storage_unavailable", 503, close=1013),
    sessions.ShareFull: _server("storage_unavailable", 503, close=1013),
    sessions.RecordDamaged: _server("session_damaged"),
    sessions.StoreUnusable: _server("store_unusable", 503, close=1011),
    sessions.TurnFailed: _server("turn_failed"),
    sessions.EngineUnavailable: _server("engine_unavailable", 503),
    sessions.SequencePoisoned: _server("sequence_poisoned", 500),
    sessions.GrammarRefused: _invalid("invalid_grammar"),
    sessions.GrammarStuck: _invalid("grammar_stuck", 422),
    sessions.GrammarUnavailable: _invalid("grammar_unavailable", 501),
    sessions.EngineFull: _busy("engine_overloaded", 503),
    # what the engine or its link refuses
    runtime.RuntimeFault: INTERNAL,
    runtime.ModelUnreadable: _server("model_unreadable", 503, close=1011),
    runtime.SettingsInvalid: _server("settings_invalid", 503, close=1011),
    runtime.VerbRefused: INTERNAL,
    runtime.ContextExceeded: _invalid("context_length_exceeded"),
    runtime.SamplingInvalid: _invalid("invalid_value"),
    runtime.GrammarUnavailable: _invalid("grammar_unavailable", 501),
    runtime.GrammarFault: _invalid("invalid_grammar"),
    runtime.GrammarStuck: _invalid("grammar_stuck", 422),
    runtime.EngineOverloaded: _busy("engine_overloaded", 503),
    runtime.EngineGone: _server("engine_unavailable", 503),
    # the gateway's own
    GatewayError: INTERNAL,
    **{kind: kind.wire for kind in OWN},
}


def wire_error(error: BaseException) -> WireError:
    """The row of the table for an error: that of its class or of its nearest parent, or ``internal_error`` if
    there is none."""
    return next((TABLE[kind] for kind in type(error).__mro__ if kind in TABLE), INTERNAL)


def error_details(error: BaseException, event_id: str | None = None) -> ErrorDetails:
    """The body of the ``error`` event for an error. ``event_id``: the client event that caused it. If the error
    is a mistake of the server, its text is not shown."""
    wire = wire_error(error)
    told = getattr(error, "message", None) if wire is not INTERNAL else None
    return ErrorDetails(
        type=wire.type,
        code=wire.code,
        message=told if isinstance(told, str) else "The server made a mistake; it is logged",
        param=getattr(error, "param", None),
        event_id=event_id or getattr(error, "event_id", None),
        retry_after=UNSET if (seconds := retry_after(error)) is None else round(seconds, 3),
    )


def retry_after(error: BaseException) -> float | None:
    """Seconds after which what was refused may be served; None if the error does not say."""
    return getattr(error, "retry_after", None)


def http_answer(error: BaseException) -> tuple[dict[str, object], int, dict[str, str] | None]:
    """The body, status and headers of the HTTP answer that refuses a request because of ``error``. The headers
    are None if there are none."""
    wire, told = wire_error(error), error_details(error)
    body = {"type": wire.type, "code": wire.code, "message": told.message, "param": told.param}
    return {"error": body}, wire.status, _headers(wire.status, error)


def messages_answer(
    error: BaseException, request_id: str
) -> tuple[dict[str, object], int, dict[str, str] | None]:
    """The same in the form of Anthropic's Messages. ``details`` has the code of the table and the field."""
    wire, told = wire_error(error), error_details(error)
    kind, status = _MESSAGES_TYPES.get(wire.status, wire.type), wire.status
    if wire.code == "engine_overloaded":
        kind, status = "overloaded_error", OVERLOADED
    elif kind == "server_error":
        kind = "api_error"
    details = {"error_code": wire.code, **({} if told.param is None else {"param": told.param})}
    body = {"type": kind, "message": told.message, "details": details}
    return {"type": "error", "error": body, "request_id": request_id}, status, _headers(status, error)


def _headers(status: int, error: BaseException) -> dict[str, str] | None:
    """The headers of an answer with this status; None if there are none."""
    if status in (429, 503, OVERLOADED):
        return {"Retry-After": str(math.ceil(max(1.0, retry_after(error) or 0.0)))}
    if allowed := getattr(error, "allowed", None):
        return {"Allow": ", ".join(allowed)}
    return _HEADERS.get(status)
