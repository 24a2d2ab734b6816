"""The sessions' numbers, in one frozen object that the gateway makes; knows nothing of argv."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
