"""Where a run ends at the latest. Knows nothing of how it goes."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ..errors import LimitInvalid
from .events import StopReason


@dataclass(frozen=True, slots=True)
class RunLimits:
    """``steps``: responses; ``calls``: tools run; ``seconds`` from the beginning; ``tokens``: sampled ones.

    None: no limit. A limit that is reached ends the run in order: calls that were not run are answered so.
    Raises `LimitInvalid` for one that no run could keep.
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


class Budget:
    """What is left of the limits of one run."""

    def __init__(self, limits: RunLimits) -> None:
        self._limits = limits
        self._began = time.monotonic()
        self.steps = self.calls = self.tokens = 0

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._began

    @property
    def seconds_left(self) -> float | None:
        """None: as many as it takes."""
        return None if self._limits.seconds is None else max(0.0, self._limits.seconds - self.seconds)

    @property
    def tokens_left(self) -> int | None:
        """None: as many as the model says."""
        return None if self._limits.tokens is None else self._limits.tokens - self.tokens

    def takes_call(self) -> bool:
        """Whether one more call may be run; it is counted."""
        if self._limits.calls is not None and self.calls >= self._limits.calls:
            return False
        self.calls += 1
        return True

    def reached(self) -> StopReason | None:
        """The limit that forbids another response."""
        limits = self._limits
        if limits.seconds is not None and self.seconds >= limits.seconds:
            return "seconds"
        if limits.steps is not None and self.steps >= limits.steps:
            return "steps"
        if limits.tokens is not None and self.tokens >= limits.tokens:
            return "tokens"
        return None
