"""Token buckets: how often something may happen, with an allowance for bursts. Pure, except for the clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rate:
    """``per_second`` in the long run, and ``burst`` at once."""

    per_second: float
    burst: int


class TokenBucket:
    """Starts full. ``clock`` tells seconds and never goes back."""

    def __init__(self, rate: Rate, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._clock = clock
        self._level = float(rate.burst)
        self._seen = clock()

    def spend(self) -> bool:
        """Take one token, on credit where there is none; returns whether there was one."""
        self._refill()
        self._level -= 1.0
        return self._level >= 0.0

    def debt_seconds(self) -> float:
        """How long until everything taken on credit is paid back; 0.0 without debt."""
        self._refill()
        return max(0.0, -self._level / self._rate.per_second)

    def _refill(self) -> None:
        now = self._clock()
        self._level = min(self._rate.burst, self._level + (now - self._seen) * self._rate.per_second)
        self._seen = now
