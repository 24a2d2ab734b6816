"""When the engine says that it is alive, and what it may honestly promise.

The device thread says what it is doing and within how long it will be doing something else; the link thread
asks for heartbeats. Past that limit there is one that says so, with a deadline of zero, and then silence: a
hung device thread must not look alive because another thread of its process is. Pure: the clock is given;
knows no socket and no engine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from .messages import Heartbeat, Phase

INTERVAL = 0.5  # seconds between heartbeats
IDLE_PROMISE = 2.0  # seconds within which an idle engine is heard again
SLACK = 0.1  # seconds a heartbeat may take to be written and read

STEP_FLOOR = 2.0  # seconds any step may take
STEP_FACTOR = 10.0  # and how many times the predicted ones
FORGET = 0.99  # what the slowest step of a size still counts after one more of that size
FIRST_STEP = 120.0  # seconds for the first, which builds kernels and touches all memory
LOAD_STALL = 300.0  # seconds between two signs of progress while loading; a kernel that compiles gives none


@dataclass(frozen=True, slots=True)
class _Entered:
    phase: Phase
    at: float
    limit: float
    detail: str = ""
    fraction: float = 0.0


class Liveness:
    """The phase of one engine. ``enter``, ``engage`` and ``release`` are for the device thread, the others for
    the link's.

    ``record`` keeps the ids of the sequences on the device where they outlive the process (``blackbox``).
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        record: Callable[[Collection[int]], None] = lambda sequences: None,
    ) -> None:
        self._clock = clock
        self._record = record
        self._engaged: frozenset[int] = frozenset()
        self._now = _Entered(Phase.LOADING, clock(), LOAD_STALL)
        self._told: _Entered | None = None
        self._next = clock()
        self._until = clock()  # what the last heartbeat promised

    def enter(self, phase: Phase, limit: float = math.inf, detail: str = "", fraction: float = 0.0) -> None:
        """From now on the device thread is in ``phase``, for at most ``limit`` seconds."""
        self._now = _Entered(phase, self._clock(), limit, detail, fraction)
        if phase is Phase.IDLE:
            self.engage(frozenset())

    def engage(self, sequences: frozenset[int]) -> None:
        """These are about to be in steps in flight; recorded only where they are others than before."""
        if sequences != self._engaged:
            self._engaged = sequences
            self._record(sequences)

    def release(self, ended: Collection[int]) -> None:
        """These sequences have ended: no death of the engine accuses them any more.

        Call it before the other end hears of their end.
        """
        if ended:
            self.engage(self._engaged.difference(ended))

    def due(self) -> float:
        """Seconds until ``beat`` should be asked again."""
        now, entered = self._clock(), self._now
        left = entered.at + entered.limit - now
        if left <= 0 and self._told is entered:
            return INTERVAL
        return max(0.0, min(self._next - now, left))

    def beat(self) -> Heartbeat | None:
        """The heartbeat to send now, if any."""
        now, entered = self._clock(), self._now
        left = entered.at + entered.limit - now
        if left <= 0:
            return self._tell(entered, now - entered.at)
        if now < self._next:
            return None
        self._next = now + min(INTERVAL, left)  # before the promise runs out, whatever the phase is by then
        promise = IDLE_PROMISE if entered.phase is Phase.IDLE else left
        self._until = now + promise
        return Heartbeat(entered.phase, promise + SLACK, entered.detail, entered.fraction)

    def shortened(self) -> Heartbeat | None:
        """One to send at once, where the last promised far more than is needed now: loading, a first step."""
        entered, now = self._now, self._clock()
        if self._until - now <= IDLE_PROMISE + STEP_FLOOR:
            return None
        self._until = now + IDLE_PROMISE
        return Heartbeat(entered.phase, IDLE_PROMISE + SLACK, entered.detail, entered.fraction)

    def _tell(self, entered: _Entered, elapsed: float) -> Heartbeat | None:
        if self._told is entered:
            return None
        self._told = entered
        overdue = f"{elapsed:.1f} s without progress, {entered.limit:.1f} s allowed"
        return Heartbeat(entered.phase, 0.0, f"{entered.detail}: {overdue}".lstrip(": "), entered.fraction)


class StepTimes:
    """How long a step of so many tokens may take, learnt from those before it.

    Steps are told apart by the power of two that their tokens reach. Of each size the slowest counts, and is
    forgotten slowly; a size not seen yet is taken in proportion to the next smaller one, which overrates it.
    """

    def __init__(self) -> None:
        self._slowest: dict[int, float] = {}

    def observe(self, tokens: int, seconds: float) -> None:
        """A step of ``tokens`` tokens took ``seconds``."""
        size = tokens.bit_length()
        self._slowest[size] = max(seconds, FORGET * self._slowest.get(size, 0.0))

    def predicted(self, tokens: int) -> float | None:
        """Seconds that a step of ``tokens`` tokens will take; None before the first step."""
        size = tokens.bit_length()
        smaller = [known for known in self._slowest if known <= size]
        if smaller:
            return self._slowest[max(smaller)] * 2.0 ** (size - max(smaller))
        return self._slowest[min(self._slowest)] if self._slowest else None

    def expect(self, tokens: int) -> tuple[Phase, float]:
        """The phase of the next step and its limit in seconds: ``max(2 s, 10 x predicted)``."""
        predicted = self.predicted(tokens)
        if predicted is None:
            return Phase.COMPILING, FIRST_STEP
        return Phase.STEPPING, max(STEP_FLOOR, STEP_FACTOR * predicted)
