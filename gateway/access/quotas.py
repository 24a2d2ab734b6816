"""All quotas of the server in one table: for each its name, its default, where it is enforced, what a client
gets beyond it.

`TENANT_QUOTAS` are set in the keys file and have no default: a tenant without one takes what there is. Their
names, units and least values are read from here. `CLIENT_QUOTAS` are fields of `ClientLimits`. `tenants`
compares the tenants' quotas with what the server has.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...sdk.errors import FrameTooLarge
from ...sessions import errors as sessions
from .. import errors
from ..net.rates import Rate
from ..settings import ClientLimits


@dataclass(frozen=True, slots=True)
class Quota:
    """One row of the table. ``name``: the limit's name, a field of `ClientLimits` or of the keys file.
    ``enforced``: the module that enforces it. ``error``: the error that a client beyond it gets; None if
    nothing is refused. ``refill``: what makes room again, or what happens instead of a refusal.

    For a tenant's quota also: ``shown``: a template with ``{}`` that writes a value. ``in_bytes``: its values
    are sizes. ``least``: the smallest value that it may have.
    """

    name: str
    enforced: str
    error: type[Exception] | None
    refill: str
    shown: str = ""
    in_bytes: bool = False
    least: int = 1

    @property
    def default(self) -> object:
        """The default of a client's quota, from `ClientLimits`; None for a tenant's, which has none."""
        return getattr(ClientLimits(), self.name, None)

    @property
    def code(self) -> str | None:
        """The wire code of its error; None if it has no error."""
        return None if self.error is None else errors.TABLE[self.error].code


def _per_minute(what: str) -> Quota:
    name, shown = f"{what}_per_minute", f"{{}} {what} per minute and key"
    refill = "each key gets one back every 60 s / limit"
    return Quota(name, "access.rate_limits", errors.RateLimited, refill, shown)


TENANT_QUOTAS = (
    Quota(
        "sessions",
        "sessions.tenants",
        sessions.SessionLimit,
        "a session is closed; idle sessions are put away early",
        "{} sessions open",
    ),
    Quota("kept", "sessions.journal", None, "the longest unused sessions are forgotten", "{} kept"),
    Quota("turns", "sessions.tenants", sessions.TurnLimit, "a reply ends", "{} replies at once"),
    Quota(
        "journal",
        "sessions.journal",
        sessions.ShareFull,
        "closed sessions are forgotten; open ones can be pruned",
        "{} of the journal",
        in_bytes=True,
    ),
    Quota(
        "leased",
        "runtime.kv_placement.leases",
        None,
        "a lease ends; its receipt says `clipped` or `denied`",
        "{} leased",
        in_bytes=True,
        least=0,
    ),
    Quota(
        "disk", "kvstore.disk", None, "the tenant's oldest KV is dropped", "{} of KV on disk", in_bytes=True
    ),
    _per_minute("requests"),
    _per_minute("tokens"),
)

CLIENT_QUOTAS = (
    Quota("frame_bytes", "realtime.socket", FrameTooLarge, "each frame counts by itself"),
    Quota(
        "socket_bytes", "net.listener", None, "each frame counts by itself; the socket is closed with 1009"
    ),
    Quota("frames", "net.listener", None, "by the second; frames that come faster are read later"),
    Quota("control_frames", "net.listener", errors.TooManyControlFrames, "by the second"),
    Quota("fragments", "net.listener", errors.TooManyFragments, "each message counts by itself"),
    Quota("invalid_events", "realtime.socket", errors.TooManyInvalid, "by the second"),
    Quota("parallel_responses", "realtime.conversation", errors.TooManyResponses, "a response ends"),
    Quota("moves", "realtime.verbs", errors.TooManyMoves, "a lease, stage, settle or map is answered"),
    Quota("outbox_events", "net.outbox", None, "the client reads; the session's reply waits"),
    Quota("outbox_bytes", "net.outbox", None, "the client reads; the session's reply waits"),
    Quota("stall_seconds", "realtime.socket", errors.SlowReader, "the client reads"),
    Quota(
        "unopened_forks", "live.sessions", sessions.SessionLimit, "a fork is opened or pruned; old ones wait"
    ),
    Quota("log_bytes", "realtime.event_log", sessions.EventsExpired, "the oldest events are dropped"),
    Quota("resume_seconds", "live.sessions", None, "the client resumes; then the session is put away"),
)


def written(value: object) -> str:
    """A quota's default as text, for the generated documents: ``256``, ``5 per second, 100 at once``,
    ``none``."""
    if isinstance(value, Rate):
        return f"{value.per_second:g} per second, {value.burst:,} at once"
    return "none" if value is None else f"{value:,}" if isinstance(value, int) else f"{value}"
