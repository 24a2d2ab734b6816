"""The one table from typed errors to wire errors: type, code, HTTP status and close code.

`TABLE` has the error classes of ``sdk``, ``sessions`` and ``runtime`` that can reach a client; those of the
gateway name their row as ``wire``. A class without a row takes its nearest parent's; an error of no tree is a
mistake of the server. Errors of ``kvstore`` and ``kernels`` end inside the engine.

GatewayError
├── AddressUnusable ── PortTaken
├── KeysUnusable ── LimitsTooLarge
├── NetworkInvalid, CertificateUnusable
├── KeyInvalid, HostRefused, OriginRefused, KeyRemoved
├── SlowReader, TooManyControlFrames, TooManyFragments, TooManyInvalid
├── TooManyResponses, TooManyMoves, NothingToCancel
├── RouteUnknown, MethodRefused, UpgradeNeeded
└── ModelNotServed, SessionMoved, SessionRequired, Draining
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..runtime import errors as runtime
from ..sdk import errors as sdk
from ..sdk.frames.server import ErrorDetails
from ..sessions import errors as sessions


@dataclass(frozen=True, slots=True)
class WireError:
    """An error as clients see it: in an event, over HTTP, and as the close code of a socket that it ends."""

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


class GatewayError(Exception):
    """An error that the gateway itself raises."""

    wire: ClassVar[WireError] = INTERNAL

    @property
    def message(self) -> str:
        """What went wrong, in one line."""
        return str(self.args[0]) if self.args else self.wire.code


class AddressUnusable(GatewayError):
    """The server cannot listen on this address."""

    wire = _server("address_unusable", 503)


class PortTaken(AddressUnusable):
    """Another program listens on this address."""

    wire = _server("port_taken", 503)


class KeysUnusable(GatewayError):
    """The keys file cannot be read, or a key, tenant or limit in it is invalid."""

    wire = _server("keys_unusable", 503)


class LimitsTooLarge(KeysUnusable):
    """The keys file lets tenants take more than the server or its machine has."""


class NetworkInvalid(GatewayError):
    """An option about host names, proxies, the root path or TLS is invalid."""

    wire = _server("network_invalid", 503)


class CertificateUnusable(GatewayError):
    """The TLS certificate or its key cannot be read, or they are no pair."""

    wire = _server("certificate_unusable", 503)


class KeyInvalid(GatewayError):
    """A request has no key, or one that is not in the keys file."""

    wire = _unknown("invalid_api_key", 401)


class HostRefused(GatewayError):
    """The Host header is no name of this server."""

    wire = _unknown("host_not_allowed", 403)


class OriginRefused(GatewayError):
    """A web page of another origin asks."""

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
    """A message comes in too many frames."""

    wire = _invalid("too_many_fragments", 429, close=1008)


class TooManyInvalid(GatewayError):
    """A socket sends too many frames that are no events."""

    wire = _invalid("too_many_invalid_events", 429, close=1008)


class TooManyResponses(GatewayError):
    """A socket has as many responses running as it may."""

    wire = _busy("too_many_responses")


class TooManyMoves(GatewayError):
    """A session has as many leases, stages and settles running as it may."""

    wire = _busy("too_many_moves")


class NothingToCancel(GatewayError):
    """A cancel names no response that runs."""

    wire = _invalid("response_cancel_not_active")


class ModelNotServed(GatewayError):
    """The client asked for a model that is not this server's."""

    wire = _invalid("model_not_found", 404, close=1008)


class RouteUnknown(GatewayError):
    """The server does not serve this path."""

    wire = _invalid("not_found", 404)


class MethodRefused(GatewayError):
    """The server serves this path, but not by this method."""

    wire = _invalid("method_not_allowed", 405)


class UpgradeNeeded(GatewayError):
    """The path is a WebSocket's, and the request is a plain one."""

    wire = _invalid("upgrade_required", 426)


class SessionMoved(GatewayError):
    """The session is on a newer socket now; this one is closed."""

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
    """The row of the error's class or of its nearest parent; ``internal_error`` where there is none."""
    return next((TABLE[kind] for kind in type(error).__mro__ if kind in TABLE), INTERNAL)


def error_details(error: BaseException, event_id: str | None = None) -> ErrorDetails:
    """The body of an ``error`` event. A mistake of the server does not show its text."""
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
    headers = {401: {"WWW-Authenticate": "Bearer"}, 426: {"Upgrade": "websocket", "Connection": "Upgrade"}}
    headers |= {429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}}
    return {"error": body}, wire.status, headers.get(wire.status)
