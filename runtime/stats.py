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


class StepClock:
    """Seconds of all steps since the start, by part: ``t_plan``, making the plan; ``t_launch``, handing it to
    the device, which on a CPU is computing it; ``t_device``, waiting for its outcomes; ``t_commit``, taking
    them over; ``t_gap``, how long the device had no work before it: 0 where it was launched before the one
    before ended, or where the engine was idle. A step that failed is in none of them.

    The ``moments`` of one step: when its planning began and ended, when its launch returned, when it was
    waited for, and when its outcomes came."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._landed: float | None = None
        self._totals = dict.fromkeys(("t_plan", "t_launch", "t_device", "t_commit", "t_gap"), 0.0)

    def begin(self) -> list[float]:
        """Begin the moments of a step that is about to be planned. The caller passes them to the calls that
        follow."""
        return [self._clock()]

    def note(self, moments: list[float]) -> None:
        """Note the next of a step's ``moments``: it is planned; its launch has returned; its outcomes are
        about to be waited for."""
        moments.append(self._clock())

    def landed(self, moments: list[float]) -> float:
        """Note the last of a step's ``moments``, as its outcomes are here, and add its times but that of the
        commit to the totals. Returns for how many seconds the device worked on this step alone, from its
        launch or the end of the step before."""
        self.note(moments)
        begun, planned, launched, waited, landed = moments
        before = planned if self._landed is None else self._landed
        self._totals["t_plan"] += planned - begun
        self._totals["t_launch"] += launched - planned
        self._totals["t_device"] += landed - waited
        self._totals["t_gap"] += max(0.0, planned - before)
        self._landed = landed
        return landed - max(planned, before)

    def rest(self) -> None:
        """Note that the time until the next launch is no gap: there is nothing to compute, or a step failed."""
        self._landed = None

    def committed(self, moments: list[float]) -> None:
        """Note that the step is committed: add the time since its outcomes came to the totals."""
        self._totals["t_commit"] += self._clock() - moments[-1]

    def statistics(self) -> dict[str, float]:
        """The seconds by part."""
        return dict(self._totals)
