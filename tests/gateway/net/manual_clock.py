"""A clock for deadlines on which time passes when a test says so."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class Timer:
    """A call that is due at a time, unless it is cancelled."""

    def __init__(self, when: float, callback: Callable[[], object]) -> None:
        self._when = when
        self.callback: Callable[[], object] | None = callback

    def when(self) -> float:
        return self._when

    def cancel(self) -> None:
        self.callback = None


class ManualClock:
    """The clock of a test. ``now``: seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = count()

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        timer = Timer(when, callback)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    @property
    def pending(self) -> int:
        """The timers that run."""
        return sum(timer.callback is not None for _, _, timer in self._timers)

    def advance(self, seconds: float) -> None:
        """Let time pass; what is due in it is called in its time."""
        end = self.now + seconds
        while self._timers and self._timers[0][0] <= end:
            when, _, timer = heapq.heappop(self._timers)
            self.now = max(self.now, when)
            if timer.callback is not None:
                timer.callback()
        self.now = end
