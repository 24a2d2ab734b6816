"""How far the loading of weights is: bytes done of all bytes, and an estimate of the seconds left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil

SURE_SECONDS = 0.5
"""The rate of the first bytes says little: until so many seconds have passed there is no estimate."""


@dataclass(eq=False)
class WeightsProgress:
    """Tells ``progress`` the fraction of ``total`` bytes that are loaded, 0 to 1, and in words: what is being
    loaded, bytes done and all bytes, and the seconds left at the rate so far. The bytes are those that the
    weights take in memory. ``clock``: in seconds. `done` may be called by several threads at once."""

    _total: int
    _progress: Callable[[float, str], None]
    _clock: Callable[[], float] = time.monotonic
    _done: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._began = self._clock()

    def done(self, name: str, count: int) -> None:
        """``count`` more bytes are loaded, of the tensor ``name``. Raises what ``progress`` raises."""
        with self._lock:
            self._done += count
            self._progress(self._done / self._total, self._words(name))

    def _words(self, name: str) -> str:
        words = f"loading {name}: {self._done / 1e6:,.0f} of {self._total / 1e6:,.0f} MB"
        taken = self._clock() - self._began
        if taken < SURE_SECONDS or self._done >= self._total:
            return words
        return f"{words}, {ceil(taken * (self._total / self._done - 1))} s left"
