"""When the engine sends a heartbeat, and by which deadline each promises the next.

The device thread says what it is doing and for how long at most; a thread of the link asks for heartbeats. Past
that limit there is one more, with a deadline of zero, and then none: a hung device thread must not look alive
because the link is. No I/O; the clock is an argument.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from .messages import Heartbeat, Phase

INTERVAL = 0.5  # seconds between heartbeats
IDLE_PROMISE = 2.0  # seconds until the next heartbeat of an idle engine
SLACK = 0.1  # seconds a heartbeat may take to be written and read

STEP_FLOOR = 2.0  # seconds any step may take
STEP_FACTOR = 10.0  # times the predicted seconds of a step
FORGET = 0.99  # the slowest time of a size decays by this factor with each step of that size
FIRST_STEP = 120.0  # seconds for the first step, which builds kernels and touches all memory
LOAD_STALL = 300.0  # seconds between two reports of progress while loading; compiling a kernel makes none


@dataclass(frozen=True, slots=True)
class _Entered:
    phase: Phase
    at: float
    limit: float
    detail: str = ""
    fraction: float = 0.0


class Liveness:
    """What one engine is doing, and the heartbeats that follow from it.

    ``enter``, ``engage`` and ``release`` are for the device thread, the others for the link's.
    ``record``: stores the ids of the sequences on the device where they outlive the process
    (``crash_report``).
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
        self._overdue_sent: _Entered | None = None
        self._next = clock()
        self._until = clock()  # what the last heartbeat promised

    def enter(self, phase: Phase, limit: float = math.inf, detail: str = "", fraction: float = 0.0) -> None:
        """Note that the device thread is in ``phase`` from now on, for at most ``limit`` seconds. In the
        phase IDLE no sequence is on the device. ``detail``, ``fraction``: for the heartbeat's progress
        report."""
        self._now = _Entered(phase, self._clock(), limit, detail, fraction)
        if phase is Phase.IDLE:
            self.engage(frozenset())

    def prepare(self, fraction: float, detail: str) -> None:
        """Note that the device thread prepares to serve. ``detail``: what it does; ``fraction``: how much of
        that is done."""
        self.enter(Phase.COMPILING, LOAD_STALL, detail, fraction)

    def engage(self, sequences: frozenset[int]) -> None:
        """Note that these sequences are in the steps in flight from now on; they are recorded if they
        changed."""
        if sequences != self._engaged:
            self._engaged = sequences
            self._record(sequences)

    def release(self, ended: Collection[int]) -> None:
        """Note that the generations of these sequences have ended, so that they are not blamed if the engine
        dies now.

        Call it before the gateway learns that they ended.
        """
        if ended:
            self.engage(self._engaged.difference(ended))

    def due(self) -> float:
        """Seconds until ``beat`` should be called next."""
        now, entered = self._clock(), self._now
        left = entered.at + entered.limit - now
        if left <= 0 and self._overdue_sent is entered:
            return INTERVAL
        return max(0.0, min(self._next - now, left))

    def beat(self) -> Heartbeat | None:
        """The heartbeat to send now; None if none is due. Past the phase's limit there is one more, with a
        deadline of zero, and then none."""
        now, entered = self._clock(), self._now
        left = entered.at + entered.limit - now
        if left <= 0:
            if self._overdue_sent is entered:
                return None
            self._overdue_sent = entered
            overdue = f"{now - entered.at:.1f} s without progress, {entered.limit:.1f} s allowed"
            detail = f"{entered.detail}: {overdue}".lstrip(": ")
            return Heartbeat(entered.phase, 0.0, detail, entered.fraction)
        if now < self._next:
            return None
        self._next = now + min(INTERVAL, left)  # before the promise runs out, whatever the phase is by then
        promise = IDLE_PROMISE if entered.phase is Phase.IDLE else left
        self._until = now + promise
        return Heartbeat(entered.phase, promise + SLACK, entered.detail, entered.fraction)

    def shortened(self) -> Heartbeat | None:
        """A heartbeat to send at once, with a short deadline, if the last one promised far more time than is
        needed now, as after loading; None if it did not."""
        entered, now = self._now, self._clock()
        if self._until - now <= IDLE_PROMISE + STEP_FLOOR:
            return None
        self._until = now + IDLE_PROMISE
        return Heartbeat(entered.phase, IDLE_PROMISE + SLACK, entered.detail, entered.fraction)


class StepTimes:
    """Predicts the seconds of a step from its number of tokens and the steps before it.

    Steps are grouped by the power of two of their tokens. The slowest step of each group counts, and decays
    slowly. A group without steps is scaled up from the next smaller one, which is an overestimate.
    """

    def __init__(self) -> None:
        self._slowest: dict[int, float] = {}

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn that a step of ``tokens`` tokens took ``seconds``."""
        size = tokens.bit_length()
        self._slowest[size] = max(seconds, FORGET * self._slowest.get(size, 0.0))

    def expect(self, tokens: int) -> tuple[Phase, float]:
        """The phase of a step of ``tokens`` tokens, and how many seconds it may take: ``max(2 s, 10 x
        predicted)``; for the first step `FIRST_STEP`."""
        if not self._slowest:
            return Phase.COMPILING, FIRST_STEP
        size = tokens.bit_length()
        known = max((one for one in self._slowest if one <= size), default=min(self._slowest))
        predicted = self._slowest[known] * 2.0 ** max(0, size - known)
        return Phase.STEPPING, max(STEP_FLOOR, STEP_FACTOR * predicted)
