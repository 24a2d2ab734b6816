"""What the engine has done: counts since the start, and what each step took and computed.

`Counters` only counts; lengths of queues are read where the queues are. `StepLog` keeps a bounded log of steps
and running totals for ``statistics()``: six readings of the clock and one tuple a step, cheap enough to be
always on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

STEPS_KEPT = 1024


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


class StepRecord(NamedTuple):
    """One step that was committed. Times are seconds of the host's clock, ``t_*``; tokens are counted by
    class.

    ``t_plan``: making the plan. ``t_launch``: handing it to the device, which on a CPU is computing it.
    ``t_device``: waiting for its outcomes. ``t_commit``: taking them over. ``t_gap``: how long the device had
    no work before it, since the outcomes of the step before; 0 where it was launched before they came, or
    where the engine was idle. ``prefilled``: prompt tokens computed for the first time; ``recomputed``:
    tokens computed again; ``decoded``: the other ones.
    """

    step: int
    rows: int
    t_plan: float
    t_launch: float
    t_device: float
    t_commit: float
    t_gap: float
    prefilled: int
    recomputed: int
    decoded: int


class Timing:
    """The moments of one step, by the log's clock: when its planning began (``begun``) and ended, when its
    launch returned, when it was waited for (``waited``), and when its outcomes came (``landed``).

    ``busy``: seconds that the device worked on it alone, from its launch or the end of the step before;
    ``gap``: seconds without work before it. ``before``: token counters before its commit.
    """

    __slots__ = ("before", "begun", "busy", "gap", "landed", "launched", "planned", "waited")

    def __init__(self, begun: float) -> None:
        self.begun = self.planned = self.launched = self.waited = self.landed = begun
        self.gap = self.busy = 0.0
        self.before = (0, 0, 0)


class StepLog:
    """The records of the last ``keep`` steps, oldest first, and totals since the start. ``counters``: the
    scheduler's, to tell which tokens a step computed."""

    def __init__(
        self, counters: Counters, keep: int = STEPS_KEPT, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.records: deque[StepRecord] = deque(maxlen=keep)
        self._counters = counters
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
        timing.before = self._tokens()
        timing.busy = timing.landed - timing.planned
        if self._landed is not None:
            timing.gap = max(0.0, timing.planned - self._landed)
            timing.busy -= max(0.0, self._landed - timing.planned)
        self._landed = timing.landed

    def rest(self) -> None:
        """Note that the time until the next launch is no gap: there is nothing to compute, or a step failed."""
        self._landed = None

    def committed(self, timing: Timing, step: int, rows: int) -> None:
        """Note that the step is committed: append its record, and add its times to the totals. ``step``: its
        number; ``rows``: how many rows it had."""
        prefilled, recomputed, computed = (
            now - before for now, before in zip(self._tokens(), timing.before, strict=True)
        )
        record = StepRecord(
            step,
            rows,
            timing.planned - timing.begun,
            timing.launched - timing.planned,
            timing.landed - timing.waited,
            self._clock() - timing.landed,
            timing.gap,
            prefilled,
            recomputed,
            computed - prefilled - recomputed,
        )
        self.records.append(record)
        for name in self._totals:
            self._totals[name] += getattr(record, name)

    def statistics(self) -> dict[str, float]:
        """Seconds that all steps since the start took in each part, by the names of `StepRecord`:
        ``t_plan``…"""
        return dict(self._totals)

    def _tokens(self) -> tuple[int, int, int]:
        return self._counters.prefilled, self._counters.recomputed, self._counters.computed
