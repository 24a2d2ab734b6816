"""The sessions' numbers, in one frozen object that the gateway makes; knows nothing of argv."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Caps.

    ``max_sessions``: open at once. ``max_items``: in one conversation. ``aside_characters``:
    conversations longer than this are rendered and tokenized on a thread, so that they do not hold up the
    event loop. ``debounce_seconds``: how long text on its way is collected before it is prefilled.
    ``recovery_seconds``: a reply whose engine died waits so long for the next one; then it fails.
    """

    max_sessions: int = 10_000
    max_items: int = 20_000
    aside_characters: int = 32_768
    debounce_seconds: float = 0.02
    recovery_seconds: float = 60.0
