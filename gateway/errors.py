"""The one table from typed errors to wire errors: type, code, HTTP status and close code.

`TABLE` has the error classes of ``sdk``, ``sessions`` and ``runtime`` that can reach a client. Those of the
gateway have their row in the class attribute ``wire``. A class without a row uses the row of its nearest
parent. An error that is in none of these trees is a mistake of the server. Errors of ``kvstore`` and
``kernels`` do not leave the engine.

GatewayError
├── AddressUnusable ── PortTaken
├── KeysUnusable ── LimitsTooLarge
├── OptionInvalid, CertificateUnusable, TracingUnavailable
├── KeyInvalid, OperatorWanted, HostRefused, OriginRefused, KeyRemoved
├── SlowReader, SlowSender, TooManyControlFrames, TooManyFragments, TooManyInvalid
├── TooManyChunks, TooManyBodies, EncodingRefused
├── HeadInvalid, HeadTooLarge, NoDescriptors
├── TooManyResponses, TooManyMoves, NothingToCancel, RateLimited, QueueTooLong
├── ResponseUnknown, PreviousResponseUnknown, ConversationUnknown
├── TooManyLanes, TooManyRequests
├── RouteUnknown, MethodRefused, UpgradeNeeded, ThreadsNotServed, AdapterFolderUnset
└── ModelNotServed, SessionMoved, SessionDeleted, SessionRequired, EngineLoading, Draining
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
    an HTTP answer. ``close``: the close code of the WebSocket that the error ends; None if it ends none."""

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
"""The HTTP status that Anthropic uses for an overloaded engine."""
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
"""Anthropic's types of errors by HTTP status. For other statuses the type in `TABLE` is used."""


class GatewayError(Exception):
    """An error that the gateway itself raises."""

    wire: ClassVar[WireError] = INTERNAL

    @property
    def message(self) -> str:
        """What went wrong, in one line; the wire code if the error was raised without a text."""
        return str(self.args[0]) if self.args else self.wire.code


class AddressUnusable(GatewayError):
    """The server cannot listen on this address."""

    wire = _server("address_unusable", 503)


class PortTaken(AddressUnusable):
    """Another program listens on this address."""

    wire = _server("port_taken", 503)


class KeysUnusable(GatewayError):
    """The keys file cannot be read; or a key, tenant or limit in it, or an option that gives a key, is
    invalid."""

    wire = _server("keys_unusable", 503)


class LimitsTooLarge(KeysUnusable):
    """The keys file lets tenants take more than the server or its machine has."""


class OptionInvalid(GatewayError):
    """A setting of the gateway has a value that is not allowed."""

    wire = _server("option_invalid", 503)


class CertificateUnusable(GatewayError):
    """The TLS certificate or its key cannot be read, or they do not belong together."""

    wire = _server("certificate_unusable", 503)


class TracingUnavailable(GatewayError):
    """Traces were asked for, and the extra `otel` is not installed."""

    wire = _server("tracing_unavailable", 503)

    @classmethod
    def without(cls, missing: ImportError) -> TracingUnavailable:
        """For a package that is not installed."""
        install = "in Holdfast's checkout, pip install '.[otel]'"
        return cls(f"--otlp-traces-endpoint needs the extra otel: {install} ({missing})")


class KeyInvalid(GatewayError):
    """A request has no key, or one that is not in the keys file."""

    wire = _unknown("invalid_api_key", 401)


class OperatorWanted(GatewayError):
    """The key is a tenant's, and the route is for operators."""

    wire = _unknown("operator_key_required", 403)


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


class SlowSender(GatewayError):
    """A request's head or body, or a message on a WebSocket, did not end in its time."""

    wire = _invalid("request_timeout", 408, close=1008)


class HeadInvalid(GatewayError):
    """The head of an HTTP request is not valid, or can be read in two ways."""

    wire = _invalid("invalid_http_request")


class HeadTooLarge(GatewayError):
    """The head of an HTTP request has too many bytes or lines."""

    wire = _invalid("headers_too_large", 431)


class NoDescriptors(GatewayError):
    """The process has no file descriptor left for a connection."""

    wire = _server("too_many_connections", 503)


class TooManyChunks(GatewayError):
    """The body of an HTTP request comes in too many small chunks."""

    wire = _invalid("too_many_chunks")


class EncodingRefused(GatewayError):
    """The body of an HTTP request is compressed in a way that is not served."""

    wire = _invalid("unsupported_encoding", 415)


class TooManyBodies(GatewayError):
    """The bodies of a tenant's requests take as much memory as they may."""

    wire = _busy("too_many_bodies")


class TooManyControlFrames(GatewayError):
    """A socket sends pings and pongs faster than it may."""

    wire = _invalid("too_many_control_frames", 429, close=1008)


class TooManyFragments(GatewayError):
    """One message came in more frames than it may."""

    wire = _invalid("too_many_fragments", 429, close=1008)


class TooManyInvalid(GatewayError):
    """A socket sends frames that are no valid events faster than it may."""

    wire = _invalid("too_many_invalid_events", 429, close=1008)


class TooManyResponses(GatewayError):
    """A session has as many responses running as it may."""

    wire = _busy("too_many_responses")


class TooManyMoves(GatewayError):
    """A session has as many requests about the placement of its KV running (lease, stage, settle, block map) as
    it may."""

    wire = _busy("too_many_moves")


class RateLimited(GatewayError):
    """The key has used up its requests or tokens per minute; nothing began. ``retry_after``: seconds until the
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
    """The response that a request names as ``previous_response_id`` is not known."""

    wire = _invalid("previous_response_not_found")

    def __init__(self, response_id: str) -> None:
        super().__init__(f"Previous response with id {response_id[:128]!r} not found")
        self.param = "previous_response_id"


class ConversationUnknown(GatewayError):
    """There is no conversation with this id for this tenant."""

    wire = _invalid("conversation_not_found", 404)


class TooManyLanes(GatewayError):
    """A WebSocket of Responses has used as many ``stream_id``s (each one a queue of requests) as it may."""

    wire = _busy("websocket_stream_limit_reached")


class TooManyRequests(GatewayError):
    """A WebSocket of Responses has as many requests in flight as it may."""

    wire = _busy("websocket_connection_limit_reached")


class ModelNotServed(GatewayError):
    """The client asked for a model that is not this server's."""

    wire = _invalid("model_not_found", 404, close=1008)


class AdapterFolderUnset(GatewayError):
    """An operator loads an adapter, but the server was started without a folder of adapters."""

    wire = _invalid("adapter_folder_unset", 409)


class RouteUnknown(GatewayError):
    """The server does not serve this path."""

    wire = _invalid("not_found", 404)


class MethodRefused(GatewayError):
    """The server serves this path, but not by this method. ``allowed``: the methods that it serves."""

    wire = _invalid("method_not_allowed", 405)
    allowed = ""

    def __init__(self, message: str, allowed: Iterable[str]) -> None:
        super().__init__(message)
        self.allowed = ", ".join(sorted(allowed))


class UpgradeNeeded(GatewayError):
    """The path is for WebSockets only, and the request is a plain HTTP request."""

    wire = _invalid("upgrade_required", 426)


class ThreadsNotServed(GatewayError):
    """A request of Anthropic's Messages uses a thread, which this server does not have. Clients that get this
    error send the whole conversation with each request instead."""

    wire = _invalid("thread_unsupported_request")


class SessionMoved(GatewayError):
    """The session is on a newer socket now; this socket is closed."""

    wire = _invalid("session_moved", 409, close=4001)


class SessionDeleted(GatewayError):
    """The session was deleted, by its operator or a `session.prune`; this socket is closed."""

    wire = _invalid("session_deleted", 410, close=4004)


class SessionRequired(GatewayError):
    """The socket was opened to resume a session, and has not done so yet."""

    wire = _invalid("session_required", 409)


class EngineLoading(GatewayError):
    """The engine was started and still loads; nothing began. The message names the phase."""

    wire = _server("engine_loading", 503)
    retry_after: ClassVar[float] = 5.0


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
    sdk.ExportInvalid: _invalid("invalid_export"),
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
    sessions.StorageFull: _server("storage_unavailable", 503, close=1013),
    sessions.ShareFull: _server("storage_unavailable", 503, close=1013),
    sessions.StoreLost: _server("storage_unavailable", 503, close=1013),
    sessions.RecordDamaged: _server("session_damaged"),
    sessions.StoreUnusable: _server("store_unusable", 503, close=1011),
    sessions.TurnFailed: _server("turn_failed"),
    sessions.EngineUnavailable: _server("engine_unavailable", 503),
    sessions.SequencePoisoned: _server("sequence_poisoned", 500),
    sessions.GrammarRefused: _invalid("invalid_grammar"),
    sessions.GrammarStuck: _invalid("grammar_stuck", 422),
    sessions.GrammarUnavailable: _invalid("grammar_unavailable", 501),
    sessions.EngineFull: _busy("engine_overloaded", 503),
    sessions.AdapterUnavailable: _invalid("adapter_unavailable", 409),
    # what the engine or its link refuses
    runtime.RuntimeFault: INTERNAL,
    runtime.ModelUnreadable: _server("model_unreadable", 503, close=1011),
    runtime.AdapterInvalid: _invalid("adapter_invalid"),
    runtime.SettingsInvalid: _server("settings_invalid", 503, close=1011),
    runtime.VerbRefused: INTERNAL,
    runtime.ContextExceeded: _invalid("context_length_exceeded"),
    runtime.SamplingInvalid: _invalid("invalid_value"),
    runtime.GrammarUnavailable: _invalid("grammar_unavailable", 501),
    runtime.AdapterUnknown: _invalid("adapter_not_found", 404),
    runtime.AdapterExists: _invalid("adapter_already_loaded"),
    runtime.AdapterLimit: _invalid("adapter_limit_reached", 409),
    runtime.GrammarFault: _invalid("invalid_grammar"),
    runtime.GrammarStuck: _invalid("grammar_stuck", 422),
    runtime.EngineOverloaded: _busy("engine_overloaded", 503),
    runtime.EngineGone: _server("engine_unavailable", 503),
    # the gateway's own
    GatewayError: INTERNAL,
    **{kind: kind.wire for kind in OWN},
}


def wire_error(error: BaseException) -> WireError:
    """The wire error of an exception: that of its class in `TABLE` or of its nearest parent; ``internal_error``
    if none of them is there."""
    return next((TABLE[kind] for kind in type(error).__mro__ if kind in TABLE), INTERNAL)


def error_details(error: BaseException, event_id: str | None = None) -> ErrorDetails:
    """The body of the ``error`` event for an exception. ``event_id``: that of the client event that caused it;
    None: the exception's own, if it has one. If the exception is a mistake of the server, its text is not
    shown."""
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
    """The seconds after which the refused request may be tried again, if the error has such a number; else
    None."""
    return getattr(error, "retry_after", None)


def http_answer(error: BaseException) -> tuple[dict[str, object], int, dict[str, str] | None]:
    """The body, status and headers of the HTTP answer that refuses a request because of ``error``, in OpenAI's
    form. Headers of None: there are none."""
    wire, told = wire_error(error), error_details(error)
    body = {"type": wire.type, "code": wire.code, "message": told.message, "param": told.param}
    return {"error": body}, wire.status, _headers(wire.status, error)


def messages_answer(
    error: BaseException, request_id: str
) -> tuple[dict[str, object], int, dict[str, str] | None]:
    """The body, status and headers of the HTTP answer that refuses a request because of ``error``, in the form
    of Anthropic's Messages. ``details`` in the body has the code of `TABLE` and the name of the field at fault.
    Headers of None: there are none."""
    wire, told = wire_error(error), error_details(error)
    kind, status = _MESSAGES_TYPES.get(wire.status, wire.type), wire.status
    if wire.code == "engine_overloaded":
        kind, status = "overloaded_error", OVERLOADED
    elif kind == "server_error":
        kind = "api_error"
    details = {"error_code": wire.code, **({} if told.param is None else {"param": told.param})}
    body = {"type": kind, "message": _messages_text(error) or told.message, "details": details}
    return {"type": "error", "error": body, "request_id": request_id}, status, _headers(status, error)


def _messages_text(error: BaseException) -> str | None:
    """For a prompt that is too long, Anthropic's own text, because clients read the numbers out of it; None for
    other errors."""
    if not isinstance(error, sessions.PromptTooLong) or not error.tokens or not error.context:
        return None
    most = min(error.context, error.tokens - 1)  # one token less has room behind it
    return f"prompt is too long: {error.tokens} tokens > {most} maximum"


def _headers(status: int, error: BaseException) -> dict[str, str] | None:
    """The headers that an HTTP answer with this status and error has besides the usual ones; None if there are
    none."""
    if status in (429, 503, OVERLOADED):
        return {"Retry-After": str(math.ceil(max(1.0, retry_after(error) or 0.0)))}
    if isinstance(error, MethodRefused):
        return {"Allow": error.allowed}
    return _HEADERS.get(status)
