"""Token buckets: how often something may happen, with an allowance for bursts. Pure, except for the clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rate:
    """How often something may happen: ``per_second`` times a second in the long run, and ``burst`` times in a
    row without a pause."""

    per_second: float
    burst: int


class TokenBucket:
    """Counts events against a ``rate``. It starts with ``burst`` tokens and gains ``per_second`` tokens a
    second, up to ``burst``. ``clock`` returns seconds and never goes back."""

    def __init__(self, rate: Rate, clock: Callable[[], float]) -> None:
        self.rate = rate
        self._clock = clock
        self._level = float(rate.burst)
        self._seen = clock()

    @property
    def level(self) -> float:
        """The tokens in the bucket now; negative if some were taken on credit."""
        self._refill()
        return self._level

    def spend(self, tokens: float = 1.0) -> bool:
        """Take ``tokens``, on credit if there are too few. Returns whether there were enough."""
        self._refill()
        self._level -= tokens
        return self._level >= 0.0

    def seconds_until(self, tokens: float) -> float:
        """Seconds until the bucket has ``tokens`` if none are taken; 0.0 if it has them now."""
        self._refill()
        return max(0.0, (tokens - self._level) / self.rate.per_second)

    def change(self, rate: Rate) -> None:
        """Use another rate from now on. The tokens that were taken stay taken: the level changes by the
        difference of the two bursts."""
        self._refill()
        self._level += rate.burst - self.rate.burst
        self.rate = rate

    def _refill(self) -> None:
        now = self._clock()
        self._level = min(self.rate.burst, self._level + (now - self._seen) * self.rate.per_second)
        self._seen = now
