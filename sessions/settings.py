"""Settings of the sessions and of their journal, which the gateway makes. Sizes in bytes, times in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MIB = 1 << 20
DAY = 86_400.0
UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """The most that one tenant may have at the same time: open ``sessions`` and running ``turns``. None: no
    limit of its own.

    The limit of sessions also reserves that many places for the tenant.
    """

    sessions: int | None = None
    turns: int | None = None


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Limits of the sessions."""

    max_sessions: int = 10_000
    """The most sessions that are open at once."""
    max_unopened: int = 256
    """Per fork tree (sessions forked from one another): the most forks in memory that no client has opened yet;
    a fork beyond that is refused."""
    max_items: int = 20_000
    """The most items of one conversation."""
    aside_characters: int = 4096
    """A prompt with at least this many characters to tokenize is rendered and tokenized on a thread, so that it
    does not block the event loop."""
    debounce_seconds: float = 0.01
    """Streamed input text is prefilled at most this often."""
    recovery_seconds: float = 60.0
    """If the engine dies, a reply waits this long for the next one; then it fails."""
    cycle_tokens: int = 0
    """A reply in which the model repeats the same tokens over and over ends after this many repeated tokens; 0:
    it goes on."""
    tenants: Mapping[bytes, TenantLimits] = field(default_factory=dict)
    """Limits of the known tenants, by salt. A known tenant may have no limits."""


@dataclass(frozen=True, slots=True)
class JournalShare:
    """The most that one tenant may have in the journal, on disk: kept ``sessions``, and their ``bytes``."""

    sessions: int = UNLIMITED
    bytes: int = UNLIMITED


@dataclass(frozen=True, slots=True)
class JournalSettings:
    """Settings of the journal, the logs on disk from which sessions are made again: how writes are grouped, how
    large it grows, what it forgets, and how much of the disk stays free."""

    cursor_seconds: float = 0.05
    """Token ids of a reply wait at most this long to be committed in a group."""
    segment_bytes: int = 64 * MIB
    """Size of one log, at most a sixteenth of ``max_bytes``; then another log begins."""
    max_bytes: int = 4096 * MIB
    """The most bytes of all logs together. Beyond that, sessions of the tenant with the most bytes are
    forgotten: unopened forks first, then those that were not used for longest."""
    reserve_bytes: int = 64 * MIB
    """So many bytes of the disk a file in the store holds. Where the disk is full otherwise it gives way:
    running turns end, what is deleted is deleted, and logs are rewritten without what is dead. New turns are
    refused until so many bytes are free again."""
    erase_seconds: float = 300.0
    """What clients delete leaves the logs so long after that, and after the time that it takes to rewrite
    them."""
    retry_seconds: float = 0.25
    """Pause before a failed commit is tried again."""
    lock_seconds: float = 3.0
    """How long a second server waits for the store's lock."""
    max_sessions: int = 100_000
    """The most sessions in the journal. Beyond that, sessions of the tenant with the most sessions are
    forgotten: unopened forks first, then those that were not used for longest."""
    max_age_seconds: float = 30 * DAY
    """Sessions that were not used for longer are forgotten, but not before a server has run for
    ``sweep_seconds``."""
    sweep_seconds: float = 600.0
    """Time between two runs of retention, which forgets sessions by age and number."""
    snapshot_operations: int = 256
    """A session gets a new snapshot, one record instead of its operations so far, when it has this many
    operations after its last snapshot and they take at least as many bytes as that one."""
    max_events: int = 1024
    """How many ids of client events are kept per session, to detect an event that is sent twice."""
    tenants: Mapping[bytes, JournalShare] = field(default_factory=dict)
    """Shares of the tenants that have one, by salt."""

    @property
    def log_bytes(self) -> int:
        """At how many bytes a log is sealed and a new one begun: ``segment_bytes``, but at most a 16th of
        ``max_bytes`` and at least 16 KiB."""
        return max(1 << 14, min(self.segment_bytes, self.max_bytes // 16))
