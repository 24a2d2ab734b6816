"""The clock of a store: how long servers were seen to run with it.

Retention counts by it, and never by the time of day. That can be wrong by years, on a machine that has just
booted, or for seconds, until it is corrected; and a store that no server runs on must not forget.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST_SECONDS = 5.0
"""A running server looks at its clock every second. If it was looked at longer ago, the server was stopped
meanwhile, or its machine slept: of that time only so much counts."""
MICROSECONDS = 1_000_000


class ServedClock:
    """Microseconds since the store was made in which a server ran. ``seconds``: a clock that only goes forward,
    as ``time.monotonic``. One thread uses it."""

    def __init__(self, seconds: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._looked = seconds()
        self._time = 0

    def begin(self, time: int) -> None:
        """Go on from ``time``, in microseconds, at which an earlier server has left it, unless it is later
        already."""
        self._time = max(self._time, time)

    def now(self) -> int:
        """The time in microseconds. It never goes back."""
        looked = self._seconds()
        passed, self._looked = looked - self._looked, looked
        self._time += int(min(max(0.0, passed), LONGEST_SECONDS) * MICROSECONDS)
        return self._time
