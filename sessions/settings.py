"""The sessions' numbers, in one frozen object that the gateway makes; knows nothing of argv."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MIB = 1 << 20
DAY = 86_400.0
UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What one tenant may have at once: ``sessions`` open, ``turns`` running. None: as many as there may be.

    So many sessions are set aside for it, too.
    """

    sessions: int | None = None
    turns: int | None = None


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Caps.

    ``max_sessions``: open at once. ``max_unopened``: forks of one tree that are open, and that nobody has come
    for yet. ``max_items``: in one conversation. ``aside_characters``:
    conversations longer than this are rendered and tokenized on a thread, so that they do not hold up the
    event loop. ``debounce_seconds``: text on its way is prefilled no oftener, what comes meanwhile together.
    ``recovery_seconds``: a reply whose engine died waits so long for the next one; then it fails.
    ``tenants``: of what all have, how much one tenant may, by its salt; also tenants that are known and have no
    limits.
    """

    max_sessions: int = 10_000
    max_unopened: int = 256
    max_items: int = 20_000
    aside_characters: int = 4096
    debounce_seconds: float = 0.01
    recovery_seconds: float = 60.0
    tenants: Mapping[bytes, TenantLimits] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JournalShare:
    """What one tenant may have of the journal: ``sessions`` kept, and their ``bytes``."""

    sessions: int = UNLIMITED
    bytes: int = UNLIMITED


@dataclass(frozen=True, slots=True)
class JournalSettings:
    """Grouping, growth, retention and the reserve."""

    cursor_seconds: float = 0.05
    """Emitted ids wait so long for others to be committed with, unless something must be durable sooner."""
    segment_bytes: int = 64 * MIB
    """A log grows to this size, at most to a sixteenth of ``max_bytes``; then another one begins."""
    max_bytes: int = 4096 * MIB
    """All logs together grow no further; the sessions used longest ago make room."""
    reserve_bytes: int = 64 * MIB
    """With less than this free on the disk new turns are refused; those that run may use it."""
    retry_seconds: float = 0.25
    """Between two tries of a commit that failed."""
    lock_seconds: float = 3.0
    """A second server waits so long for the store."""
    max_sessions: int = 100_000
    max_age_seconds: float = 30 * DAY
    """Sessions not used for so long are forgotten, once a server has been up for ``sweep_seconds``."""
    sweep_seconds: float = 600.0
    """Between two looks for what retention lets go."""
    snapshot_operations: int = 256
    """A session's operations become one record when there are so many more, and as many bytes as that had."""
    max_events: int = 1024
    """Ids of client events kept per session, to know one that is sent twice."""
    tenants: Mapping[bytes, JournalShare] = field(default_factory=dict)
    """Shares of those tenants that have one, by their salt."""

    @property
    def log_bytes(self) -> int:
        """How large one log may be."""
        return max(1 << 14, min(self.segment_bytes, self.max_bytes // 16))
