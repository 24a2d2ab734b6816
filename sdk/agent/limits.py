"""The limits of a run, and how much of them is used."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ..errors import LimitInvalid
from .events import StopReason


@dataclass(frozen=True, slots=True)
class RunLimits:
    """``steps``: responses; ``calls``: tools run; ``seconds`` from the beginning; ``tokens``: sampled ones.

    None: no limit. A run that reaches a limit ends in order: calls that were not run get an output that says
    so. Raises `LimitInvalid` for a limit below the least possible.
    """

    steps: int | None = 25
    calls: int | None = 100
    seconds: float | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        least = {"steps": 1, "calls": 0, "seconds": 0.0, "tokens": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and not value >= low:
                raise LimitInvalid(f"`{name}` must be at least {low:g}, not {value!r}")


class RunBudget:
    """What one run has used of its limits."""

    def __init__(self, limits: RunLimits) -> None:
        self._limits = limits
        self._began = time.monotonic()
        self.steps = self.calls = self.tokens = 0

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the limit; None: there is none."""
        return None if self._limits.seconds is None else max(0.0, self._limits.seconds - self.seconds)

    @property
    def tokens_left(self) -> int | None:
        """Tokens until the limit; None: there is none."""
        return None if self._limits.tokens is None else self._limits.tokens - self.tokens

    def take_call(self) -> bool:
        """Count one more call; False where the limit does not allow it."""
        if self._limits.calls is not None and self.calls >= self._limits.calls:
            return False
        self.calls += 1
        return True

    def reached(self) -> StopReason | None:
        """The limit that allows no further response; None: there is one more."""
        limits = self._limits
        if limits.seconds is not None and self.seconds >= limits.seconds:
            return "seconds"
        if limits.steps is not None and self.steps >= limits.steps:
            return "steps"
        if limits.tokens is not None and self.tokens >= limits.tokens:
            return "tokens"
        return None
