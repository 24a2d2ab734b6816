"""Who gets blocks when they are short: admission of turns, and whose KV goes first.

KV is a lease, never a lock. For a running turn the order of taking is: blocks nobody holds; idle sequences,
the longest unused first; turns that wait, the youngest first; running turns *younger* than it, the youngest
first. Prefill of idle sequences takes from idle ones unused for longer than itself, and from nobody else.
What is given back while a step runs lies behind the step fence: it counts as on its way, and nobody is robbed
twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, takewhile

from .counters import Counters
from .paging import Paging
from .roster import Roster
from .sequence import Sequence
from .settings import SchedulerSettings


class Pressure:
    """Admits turns, and makes room in the pool at the cost of the right sequence."""

    def __init__(
        self, settings: SchedulerSettings, roster: Roster, paging: Paging, counters: Counters
    ) -> None:
        self._settings = settings
        self._roster = roster
        self._paging = paging
        self._pool = paging.pool
        self._counters = counters

    # --- admission --------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Let turns run, first come first served, while their prompts find room beside the running ones."""
        roster = self._roster
        while roster.waiting and len(roster.running) < self._settings.max_sequences:
            if not self._fits(roster.waiting[0]):
                return
            sequence = roster.admit()
            self._counters.adopted += self._paging.adopt(sequence)
            sequence.admit()

    def _fits(self, head: Sequence) -> bool:
        """Whether the tokens of the first waiting turn and of the running ones can all be held; an estimate.

        Shared blocks of idle sequences are counted as often as they are shared. Too early an admission costs
        a preemption, never progress: the oldest turn takes what it needs.
        """
        needed = self._missing(head)
        if self._roster.running:
            needed += self._settings.watermark_blocks + sum(map(self._missing, self._roster.running.values()))
        found = self._pool.available
        others = (waiting for waiting in self._roster.waiting if waiting is not head)
        holders = chain(self._roster.holders.values(), others)
        while found < needed:
            holder = next(holders, None)
            if holder is None:
                return False
            found += len(holder.table)
        return True

    def _missing(self, sequence: Sequence) -> int:
        """Blocks to lease before the turn has sampled one more token."""
        return max(0, self._paging.blocks_for(sequence.total) - len(sequence.table))

    # --- room -------------------------------------------------------------------------------------------

    def relieve(self, blocks: int, sequence: Sequence) -> None:
        """Have ``blocks`` available, now or behind the fence, at the cost of KV whose turn does not run."""
        if sequence.turn is None:
            self._take(blocks, self._unused_for_longer(sequence))
        else:
            self._take(blocks, chain(self._idle(), reversed(self._roster.waiting)))

    def preempt(self, blocks: int, sequence: Sequence) -> None:
        """The same at the cost of running turns younger than ``sequence``, the youngest first."""
        running = self._roster.running
        while self._coming() < blocks:
            youngest = next(reversed(running.values()))
            if youngest is sequence:
                return
            self._roster.preempt()
            self._paging.surrender(youngest)
            self._counters.preempted += 1

    def _take(self, blocks: int, holders: Iterator[Sequence]) -> None:
        while self._coming() < blocks:
            holder = next(holders, None)
            if holder is None:
                return
            if self._paging.surrender(holder):
                self._counters.taken += 1
            if holder.turn is None:
                self._roster.taken(holder)

    def _idle(self) -> Iterator[Sequence]:
        """Idle holders, the longest unused first; each is taken off the roster before the next comes."""
        while self._roster.holders:
            yield next(iter(self._roster.holders.values()))

    def _unused_for_longer(self, sequence: Sequence) -> Iterator[Sequence]:
        """Idle holders before ``sequence``, as far as the step being planned has no row for them yet."""
        step = self._counters.steps + 1
        older = takewhile(lambda holder: holder is not sequence, self._idle())
        return takewhile(lambda holder: step not in holder.in_flight, older)

    def _coming(self) -> int:
        """Blocks that can be leased now or when the steps in flight have finished."""
        return self._pool.available + self._pool.statistics().fenced
