"""All numbers of the gateway, in one frozen object made in one place.

Knows nothing of the engine's numbers (``runtime.settings``) nor of a session's (``sessions.settings``);
the journal's it only carries.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..sessions.forms import CallForm, ReasoningForm
from ..sessions.journal.settings import JournalSettings

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8040


@dataclass(frozen=True, slots=True)
class Limits:
    """What one socket may take. Sizes in bytes, times in seconds."""

    frame_bytes: int = 1 << 20
    """A longer frame is refused; one of more than ``socket_bytes`` closes the socket with 1009."""
    socket_bytes: int = 2 << 20
    outbox_events: int = 256
    outbox_bytes: int = 1 << 20
    """With this much unsent a session's reply waits: a slow reader slows its own session only."""
    stall_seconds: float = 20.0
    """A reader that takes no frame for so long is dropped, with the reason ``slow_reader``."""
    close_seconds: float = 5.0
    """A client has so long to take the server's close."""
    parallel_responses: int = 8
    """Responses that may run at once on one socket, out-of-band ones included."""
    moves: int = 8
    """Leases, stages and settles of one session that may be on their way at once."""
    send_buffer_bytes: int = 256 << 10
    """The kernel's buffer for one socket (by default some 4 MB for a stalled client)."""
    header_seconds: float = 10.0
    """A connection that has not sent a whole request head by then is closed."""
    ping_seconds: float = 20.0
    """Between keepalive pings, and for their answers."""
    resume_seconds: float = 120.0
    """The lease of a client that can come back: so long its session stays, and its replies go on."""
    unopened_forks: int = 1024
    """Forks in memory that nobody has come for yet, of one tenant. Beyond it the oldest wait in the journal."""
    young_seconds: float = 10.0
    """So long a fork waits in memory all the same; where more come no further ones are made."""
    log_bytes: int = 4 << 20
    """Events kept per session to be told again."""
    client_events: int = 1024
    """Ids of client events kept per session, to know one that is sent twice."""


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Where the gateway listens, who may come in, and how it leaves. ``port`` 0 takes a free one.

    ``store``: the folder of the journal, which sessions outlive the server in; None keeps them in memory.
    """

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    api_key: str | None = None
    keys: Path | None = None
    """A file of keys, their tenants and what these may take (`tenants`), in place of ``api_key``."""
    limits: Limits = Limits()
    store: Path | None = None
    journal: JournalSettings = JournalSettings()
    calls: CallForm | None = None
    """How the model writes tool calls; None: found out from its templates."""
    reasoning: ReasoningForm | None = None
    """How it writes its reasoning; None: found out."""
    recovery_seconds: float = 60.0
    """A reply whose engine died waits so long for the next one; then it fails."""
    drain_seconds: float = 10.0
    """At SIGTERM running replies may end within this time; then sockets close with 1012."""
