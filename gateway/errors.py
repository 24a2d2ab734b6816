"""One table from every typed error to its wire error and close code.

Rows are the error classes that can reach the gateway: of ``sdk.frames``, ``sessions`` and ``runtime``; a
class without a row of its own takes its nearest parent's, and what belongs to no tree is our own mistake.
Errors of ``kvstore`` and ``kernels`` end inside the engine: they arrive as a failed turn or as a dead engine.

GatewayError
├── AddressUnusable           the server cannot listen there
│   └── PortTaken             another program does
├── KeysUnusable              the keys file cannot be read, or a line of it is none
│   └── LimitsTooLarge        what it lets tenants take is more than there is
├── NetworkInvalid            an option says nothing clear of names, proxies or prefixes
├── CertificateUnusable       the TLS certificate or its key cannot be read
├── SlowReader                a client took no frame for too long
├── KeyInvalid                a request has no key, or one that is not in the keys file
├── HostRefused               the Host header is no name of this server
├── OriginRefused             a web page of another origin asks
├── KeyRemoved                the key that opened a socket is not in the keys file any more
├── TooManyControlFrames      a socket sends too many pings and pongs
├── TooManyFragments          a message comes in too many frames
├── TooManyInvalid            a socket sends too many frames that are no events
├── TooManyResponses          a socket has as many responses running as it may
├── TooManyMoves              a session has as many moves of its KV on their way as it may
├── NothingToCancel           a cancel names no response that runs
├── ModelNotServed            the client asked for a model that is not this server's
├── SessionMoved              the session goes on on a newer socket
├── SessionRequired           the socket was opened to resume a session, and has not done so yet
└── Draining                  the server is going away and takes no new work
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..runtime import errors as runtime
from ..sdk import errors as sdk
from ..sdk.frames.server import ErrorDetails
from ..sessions import errors as sessions


class GatewayError(Exception):
    """Anything the gateway refuses by itself."""

    code: ClassVar[str] = "gateway_error"

    @property
    def message(self) -> str:
        """What went wrong, in one line."""
        return str(self.args[0]) if self.args else self.code


class AddressUnusable(GatewayError):
    """The server cannot listen on this address."""

    code = "address_unusable"


class PortTaken(AddressUnusable):
    """Another program listens on this address."""

    code = "port_taken"


class KeysUnusable(GatewayError):
    """The keys file cannot be read, or something in it is no key, tenant or limit."""

    code = "keys_unusable"


class LimitsTooLarge(KeysUnusable):
    """What the keys file lets tenants take is more than the server or its machine has."""

    code = "limits_too_large"


class NetworkInvalid(GatewayError):
    """An option says nothing clear of host names, proxies or the root path."""

    code = "network_invalid"


class CertificateUnusable(GatewayError):
    """The TLS certificate or its key cannot be read, or they are no pair."""

    code = "certificate_unusable"


class KeyInvalid(GatewayError):
    """A request has no key, or one that is not in the keys file."""

    code = "invalid_api_key"


class HostRefused(GatewayError):
    """The Host header is no name of this server."""

    code = "host_not_allowed"


class OriginRefused(GatewayError):
    """A web page of another origin asks."""

    code = "origin_not_allowed"


class KeyRemoved(GatewayError):
    """The key that opened this socket is not in the keys file any more, or is another tenant's."""

    code = "invalid_api_key"


class SlowReader(GatewayError):
    """A client took no frame for too long."""

    code = "slow_reader"


class TooManyControlFrames(GatewayError):
    """A socket sends too many pings and pongs."""

    code = "too_many_control_frames"


class TooManyFragments(GatewayError):
    """A message comes in too many frames."""

    code = "too_many_fragments"


class TooManyInvalid(GatewayError):
    """A socket sends too many frames that are no events."""

    code = "too_many_invalid_events"


class TooManyResponses(GatewayError):
    """A socket has as many responses running as it may."""

    code = "too_many_responses"


class TooManyMoves(GatewayError):
    """A session has as many leases, stages and settles on their way as it may."""

    code = "too_many_moves"


class NothingToCancel(GatewayError):
    """A cancel names no response that runs."""

    code = "response_cancel_not_active"


class ModelNotServed(GatewayError):
    """The client asked for a model that is not this server's."""

    code = "model_not_found"


class SessionMoved(GatewayError):
    """The session goes on on a newer socket; this one is closed."""

    code = "session_moved"


class SessionRequired(GatewayError):
    """The socket was opened to resume a session, and has not done so yet."""

    code = "session_required"


class Draining(GatewayError):
    """The server is going away and takes no new work."""

    code = "server_going_away"


@dataclass(frozen=True, slots=True)
class WireError:
    """How an error looks outside: in an event, over HTTP, and as a close code where it ends the socket."""

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

TABLE: dict[type[Exception], WireError] = {
    # frames that are no events
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
    sessions.StoreHeld: _server("store_unusable", 503, close=1011),
    sessions.StoreForeign: _server("store_unusable", 503, close=1011),
    sessions.StoreNewer: _server("store_unusable", 503, close=1011),
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
    AddressUnusable: _server("address_unusable", 503),
    PortTaken: _server("port_taken", 503),
    KeysUnusable: _server("keys_unusable", 503),
    NetworkInvalid: _server("network_invalid", 503),
    CertificateUnusable: _server("certificate_unusable", 503),
    KeyInvalid: _unknown("invalid_api_key", 401),
    HostRefused: _unknown("host_not_allowed", 403),
    OriginRefused: _unknown("origin_not_allowed", 403),
    KeyRemoved: _invalid("invalid_api_key", 401, close=1008),
    SlowReader: _invalid("slow_reader", 408, close=1008),
    TooManyControlFrames: _invalid("too_many_control_frames", 429, close=1008),
    TooManyFragments: _invalid("too_many_fragments", 429, close=1008),
    TooManyInvalid: _invalid("too_many_invalid_events", 429, close=1008),
    TooManyResponses: _busy("too_many_responses"),
    TooManyMoves: _busy("too_many_moves"),
    NothingToCancel: _invalid("response_cancel_not_active"),
    ModelNotServed: _invalid("model_not_found", 404, close=1008),
    SessionMoved: _invalid("session_moved", 409, close=4001),
    SessionRequired: _invalid("session_required", 409),
    Draining: _server("server_going_away", 503, close=1012),
}


def wire_error(error: BaseException) -> WireError:
    """The row of the error's class or its nearest parent's; ``internal_error`` where there is none."""
    return next((TABLE[kind] for kind in type(error).__mro__ if kind in TABLE), INTERNAL)


def error_details(error: BaseException, event_id: str | None = None) -> ErrorDetails:
    """The body of an ``error`` event. Our own mistakes do not show their text."""
    wire = wire_error(error)
    told = getattr(error, "message", None) if wire is not INTERNAL else None
    return ErrorDetails(
        type=wire.type,
        code=wire.code,
        message=told if isinstance(told, str) else "The server made a mistake; it is logged",
        param=getattr(error, "param", None),
        event_id=event_id or getattr(error, "event_id", None),
    )


def http_answer(error: BaseException) -> tuple[dict[str, object], int, dict[str, str] | None]:
    """The body, status and headers of an HTTP answer that refuses a request."""
    wire, told = wire_error(error), error_details(error)
    body = {"type": wire.type, "code": wire.code, "message": told.message, "param": told.param}
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}}
    return {"error": body}, wire.status, headers.get(wire.status)
