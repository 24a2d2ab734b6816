"""The journal's numbers, in one frozen object. Sizes in bytes, times in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MIB = 1 << 20
DAY = 86_400.0
UNLIMITED = 1 << 62


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
