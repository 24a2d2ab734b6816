"""How long a new turn would wait for the engine, and whether that is too long. Pure, except for the clock.

A turn waits from its begin to its first output; one that came as a whole HTTP request, from when that came
(`Place`), so that the gateway's own work counts. The queue learns how often turns start while at least two
wait, so that a long prompt alone does not count, and multiplies: so many wait, one starts in so many seconds.
Where the engine's policy shares it between tenants, only a tenant's own turns are before it, and each tenant
that waits takes an equal part of the starts. Where turns have begun to start more slowly, the latest starts
count alone, with the time since the last one.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from itertools import islice

from ..errors import QueueTooLong
from .rate_limits import duration

SAMPLES = 256
"""The most recent starts, at most, over which the time per start is averaged."""
RECENT = 64
"""The latest of them, which tell of an engine that has become slower."""
LEAST_SAMPLES = 8
"""With fewer measured starts nothing is predicted: starts come in batches, as many in one step as the engine
runs sequences."""
BACKLOG = 2
"""Starts are measured only while at least so many turns wait: with fewer, their time says nothing of the
queue."""
PLACE = "holdfast.place"
"""Where a request's scope has the `Place` that it got when it came."""


class TurnQueue:
    """Counts the turns that wait for the engine, by tenant, and predicts a new turn's wait. ``most_seconds``:
    `check` refuses a turn that would wait longer; None: it refuses none. ``shared``: the engine's policy shares
    it between tenants. ``clock``: seconds, monotonic."""

    def __init__(
        self,
        most_seconds: float | None = None,
        *,
        shared: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most_seconds = most_seconds
        self._shared = shared
        self._clock = clock
        self._waiting: Counter[bytes] = Counter()
        self._length = 0
        self._since = 0.0  # the last start, or when the backlog began
        self._seconds: deque[float] = deque(maxlen=SAMPLES)

    def __len__(self) -> int:
        return self._length

    @property
    def seconds_per_start(self) -> float:
        """The mean seconds between two starts of waiting turns; 0.0 until enough were measured."""
        known = len(self._seconds)
        if known < LEAST_SAMPLES:
            return 0.0
        since = self._clock() - self._since if self._length >= BACKLOG else 0.0
        latest = sum(islice(reversed(self._seconds), RECENT)) + since
        return max(sum(self._seconds) / known, latest / (min(known, RECENT) + 1))

    def predicted(self, salt: bytes) -> float:
        """Seconds that a new turn of the tenant with this ``salt`` would wait; 0.0 if nothing is before it or
        nothing is known."""
        if not self._shared:
            return self._length * self.seconds_per_start
        before = self._waiting[salt]
        return before * len(self._waiting) * self.seconds_per_start if before else 0.0

    def check(self, salt: bytes) -> None:
        """Raise ``QueueTooLong`` if a new turn of the tenant with this ``salt`` would wait too long. Changes
        nothing."""
        wait = self.predicted(salt)
        if self._most_seconds is not None and wait > self._most_seconds:
            raise QueueTooLong(f"The engine has too much to do. Try again in {duration(wait)}", wait)

    def enter(self, salt: bytes) -> None:
        """Called when a turn of the tenant with this ``salt`` begins to wait: counts it. `start` or `leave`
        ends its wait."""
        self._waiting[salt] += 1
        self._length += 1
        if self._length == BACKLOG:
            self._since = self._clock()

    def start(self, salt: bytes) -> None:
        """Called when a waiting turn of this tenant has its first output: measures the time since the last
        start of any tenant, and counts the turn as waiting no longer."""
        if self._length >= BACKLOG:
            now = self._clock()
            self._seconds.append(now - self._since)
            self._since = now
        self.leave(salt)

    def leave(self, salt: bytes) -> None:
        """Called when a waiting turn of this tenant has ended without output: counts it as waiting no longer.
        Nothing is measured, because its end says nothing of the engine."""
        self._length -= 1
        self._waiting[salt] -= 1
        if not self._waiting[salt]:
            del self._waiting[salt]


class Place:
    """The place of one turn among those that wait, from now until it starts or leaves. A request may have it
    before its turn begins; the turn then takes it."""

    __slots__ = ("_queue", "_salt", "_taken", "_waits")

    def __init__(self, queue: TurnQueue, salt: bytes) -> None:
        self._queue = queue
        self._salt = salt
        self._taken = False
        self._waits = True
        queue.enter(salt)

    @property
    def free(self) -> bool:
        """Whether no turn has taken it, and it is still in the queue."""
        return self._waits and not self._taken

    def take(self) -> None:
        """A turn has it from now on."""
        self._taken = True

    def start(self) -> None:
        """The turn has its first output. Later ones change nothing."""
        if self._waits:
            self._waits = False
            self._queue.start(self._salt)

    def leave(self) -> None:
        """The turn is over. After `start` this changes nothing."""
        if self._waits:
            self._waits = False
            self._queue.leave(self._salt)

    def abandon(self) -> None:
        """The request is over: leave, unless a turn has taken the place."""
        if not self._taken:
            self.leave()
