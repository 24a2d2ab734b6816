"""What the engine has done: counts since the start, and the seconds that steps took.

`Counters` only counts; lengths of queues are read where the queues are. `StepClock` keeps running totals for
``statistics()``: six readings of the clock a step, cheap enough to be always on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Counts of what the engine has done since the start.

    Tokens: ``computed`` by all rows; of these ``prefilled`` for the first time and ``recomputed``, the rest
    decoded; ``adopted`` from the prefix cache, ``restored`` from lower tiers, ``sampled``, ``forced`` by
    grammars without being sampled. Rows: ``rows`` planned, ``discarded`` (their sequence was stopped, cut or
    preempted meanwhile), ``faults``. Sequences: ``turns`` ended, ``preempted`` (running), ``displaced``
    (running ones that wait again and keep their KV), ``taken`` (idle or waiting ones that lost their KV).
    ``stalls``: rows left out for want of blocks. ``copies``: of blocks. ``steps``: plans made.
    ``isolations``: steps that failed, so that their sequences were run one at a time. ``grammars_refused``:
    turns with a grammar that could not be compiled or followed, which is no fault of the engine. ``drafted``:
    tokens that were guessed; ``accepted``: those that were right.
    """

    steps: int = 0
    rows: int = 0
    discarded: int = 0
    faults: int = 0
    computed: int = 0
    prefilled: int = 0
    recomputed: int = 0
    adopted: int = 0
    restored: int = 0
    sampled: int = 0
    forced: int = 0
    turns: int = 0
    preempted: int = 0
    displaced: int = 0
    taken: int = 0
    stalls: int = 0
    copies: int = 0
    isolations: int = 0
    grammars_refused: int = 0
    drafted: int = 0
    accepted: int = 0

    def landed(self, computed: int, prefilled: int, recomputed: int) -> None:
        """Add the tokens of a row that was committed: all that it ``computed``, of these ``prefilled`` for
        the first time, and ``recomputed``."""
        self.computed += computed
        self.prefilled += prefilled
        self.recomputed += recomputed


class Timing:
    """The moments of one step, by one clock: when its planning began (``begun``) and ended, when its
    launch returned, when it was waited for (``waited``), and when its outcomes came (``landed``).

    ``busy``: seconds that the device worked on it alone, from its launch or the end of the step before;
    ``gap``: seconds without work before it, 0 where it was launched before the one before ended, or where the
    engine was idle.
    """

    __slots__ = ("begun", "busy", "gap", "landed", "launched", "planned", "waited")

    def __init__(self, begun: float) -> None:
        self.begun = self.planned = self.launched = self.waited = self.landed = begun
        self.gap = self.busy = 0.0


class StepClock:
    """Seconds of all steps since the start, by part: ``t_plan``, making the plan; ``t_launch``, handing it to
    the device, which on a CPU is computing it; ``t_device``, waiting for its outcomes; ``t_commit``, taking
    them over; ``t_gap``, how long the device had no work before it (`Timing`). A step that failed is in none
    of them."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._landed: float | None = None
        self._totals = dict.fromkeys(("t_plan", "t_launch", "t_device", "t_commit", "t_gap"), 0.0)

    def begin(self) -> Timing:
        """Begin the timing of a step that is about to be planned. Returns it; the caller passes it to the
        calls that follow."""
        return Timing(self._clock())

    def planned(self, timing: Timing) -> None:
        """Note in ``timing`` the moment at which the step is planned, and is about to be launched."""
        timing.planned = self._clock()

    def launched(self, timing: Timing) -> None:
        """Note in ``timing`` the moment at which the launch of the step has returned."""
        timing.launched = self._clock()

    def waits(self, timing: Timing) -> None:
        """Note in ``timing`` the moment at which the step's outcomes are about to be waited for."""
        timing.waited = self._clock()

    def landed(self, timing: Timing) -> None:
        """Note in ``timing`` the moment at which the step's outcomes are here, and are about to be committed;
        and compute for how long the device was busy with the step and had no work before it."""
        timing.landed = self._clock()
        timing.busy = timing.landed - timing.planned
        if self._landed is not None:
            timing.gap = max(0.0, timing.planned - self._landed)
            timing.busy -= max(0.0, self._landed - timing.planned)
        self._landed = timing.landed

    def rest(self) -> None:
        """Note that the time until the next launch is no gap: there is nothing to compute, or a step failed."""
        self._landed = None

    def committed(self, timing: Timing) -> None:
        """Note that the step is committed: add its times to the totals."""
        parts = {
            "t_plan": timing.planned - timing.begun,
            "t_launch": timing.launched - timing.planned,
            "t_device": timing.landed - timing.waited,
            "t_commit": self._clock() - timing.landed,
            "t_gap": timing.gap,
        }
        for name, seconds in parts.items():
            self._totals[name] += seconds

    def statistics(self) -> dict[str, float]:
        """The seconds by part."""
        return dict(self._totals)
