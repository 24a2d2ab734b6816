"""How long sessions were said to be away, and how long they were: what a policy on pauses is judged by.

The last ones are kept one by one, as a replay needs them; sums are for the metrics. Knows nothing of leases.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

KEPT = 4096


@dataclass(frozen=True, slots=True)
class Wait:
    """One pause of a session, in seconds; ``tokens``: its KV that waited."""

    session: str
    tokens: int
    expected: float
    real: float


class Waits:
    """Those of all sessions of one server."""

    def __init__(self, keep: int = KEPT, clock: Callable[[], float] = time.monotonic) -> None:
        self.records: deque[Wait] = deque(maxlen=keep)
        self._clock = clock
        self._away: dict[str, tuple[float, int, float]] = {}
        self._count = self._early = 0
        self._expected = self._real = 0.0

    def leaves(self, session: str, tokens: int, expected: float) -> None:
        """It is said to come back in so many seconds; said again, the last word counts from then on."""
        self._away[session] = (self._clock(), tokens, expected)

    def returns(self, session: str) -> None:
        """Its next turn begins; harmless where nothing was said."""
        if session in self._away:
            since, tokens, expected = self._away.pop(session)
            wait = Wait(session, tokens, expected, self._clock() - since)
            self.records.append(wait)
            self._count, self._early = self._count + 1, self._early + (wait.real < expected)
            self._expected, self._real = self._expected + expected, self._real + wait.real

    def ends(self, session: str) -> None:
        """It is over, and does not come back."""
        self._away.pop(session, None)

    def statistics(self) -> dict[str, float]:
        """Pauses that are over, those that were shorter than said, their seconds; and those that last."""
        return {
            "waits_ended": self._count,
            "waits_early": self._early,
            "waits_expected_seconds": self._expected,
            "waits_real_seconds": self._real,
            "waiting": len(self._away),
        }
