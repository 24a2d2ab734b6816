"""Admission of turns, and which sequence gives up blocks when they are short.

A running turn that needs blocks takes them in this order:

1. blocks that no sequence holds;
2. turns with KV that still comes up from disk, the last first;
3. idle sequences without a lease, as the policy says (`Policy.idle_victim`);
4. of leased idle sequences what their lease does not cover, then the rest, the latest expected return first;
5. turns with a grammar that is being compiled;
6. waiting turns, the last first;
7. running turns behind it, the last first: these are preempted.

A sequence without a row to compute gives blocks from its end, and keeps a beginning. A turn that comes up from
disk takes from those of its kind behind it, and from idle sequences. Prefill of an idle sequence takes from the
idle sequences before itself in this order. Neither takes from any other.

Blocks that are given back while a step runs lie behind the step fence. They count as free, so that no second
victim is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import TypeAlias

from ...kvstore.pool import BlockPool
from ..kv_placement.block_manager import BlockManager
from ..sequence import Sequence
from ..settings import SchedulerSettings
from ..stats import Counters
from .policy import Policy
from .queues import Queues

_Victim: TypeAlias = tuple[Sequence, int]
"""A sequence that is to give blocks, and how many of its first blocks it keeps."""


@dataclass(eq=False)
class Preemption:
    """Admits turns, and makes room in the pool."""

    _settings: SchedulerSettings
    _policy: Policy
    _queues: Queues
    _block_manager: BlockManager
    _pool: BlockPool
    _counters: Counters

    def admit(self) -> None:
        """Let waiting turns run, from the front, while their prompts find room beside the running ones."""
        queues = self._queues
        while queues.waiting and len(queues.running) < self._settings.max_sequences:
            if not self._fits(queues.waiting[0]):
                return
            sequence = queues.admit()
            self._block_manager.adopt(sequence)
            sequence.admit()

    def _fits(self, head: Sequence) -> bool:
        """Whether there are blocks for all tokens of the first waiting turn and of the running ones; an
        estimate.

        Shared blocks of idle sequences are counted once for each sequence. If a turn is admitted too early it
        is preempted later; the turn that runs first takes what it needs, so there is always progress.
        """
        needed = self._missing(head)
        if self._queues.running:
            needed += self._settings.watermark_blocks + sum(map(self._missing, self._queues.running.values()))
        found = self._pool.available
        others = (waiting for waiting in self._queues.waiting if waiting is not head)
        queues = self._queues
        holders = chain(
            queues.restoring.values(),
            queues.idle_eviction,
            queues.leased.values(),
            queues.compiling.values(),
            others,
        )
        while found < needed:
            holder = next(holders, None)
            if holder is None:
                return False
            found += len(holder.table)
        return True

    def _missing(self, sequence: Sequence) -> int:
        """Blocks to allocate before the turn can sample one more token."""
        return max(0, self._block_manager.blocks_for(sequence.total) - len(sequence.table))

    def relieve(self, blocks: int, sequence: Sequence, now: float) -> None:
        """Make ``blocks`` blocks available, now or behind the fence; no running turn gives any."""
        if sequence.turn is None:
            return self._take(blocks, self._before(blocks, sequence, now))
        coming_up = reversed(self._queues.restoring.values())
        if sequence.id in self._queues.restoring:
            behind = takewhile(lambda other: other is not sequence, coming_up)
            return self._take(blocks, chain(self._ends(blocks, behind), self._idle(blocks, now)))
        later = chain(self._queues.compiling.values(), reversed(self._queues.waiting))
        whole = ((holder, 0) for holder in later)
        return self._take(blocks, chain(self._ends(blocks, coming_up), self._idle(blocks, now), whole))

    def preempt(self, blocks: int, sequence: Sequence) -> None:
        """The same, taking from running turns behind ``sequence``, the last first."""
        running = self._queues.running
        while self._coming() < blocks:
            last = next(reversed(running.values()))
            if last is sequence:
                return
            self._queues.preempt()
            self._block_manager.surrender(last)
            self._counters.preempted += 1

    def _take(self, blocks: int, victims: Iterator[_Victim]) -> None:
        while self._coming() < blocks:
            victim = next(victims, None)
            if victim is None:
                return
            holder, kept = victim
            if self._block_manager.surrender(holder, kept):
                self._counters.taken += 1
            if kept:
                self._queues.prefill.pop(holder.id, None)
            elif holder.turn is None:
                self._queues.taken(holder)

    def _ends(self, blocks: int, sequences: Iterator[Sequence]) -> Iterator[_Victim]:
        """Of each sequence its last blocks, as many as are missing; then all, in case those are shared."""
        for sequence in sequences:
            yield sequence, max(0, len(sequence.table) - (blocks - self._coming()))
            yield sequence, 0

    def _idle(self, blocks: int, now: float) -> Iterator[_Victim]:
        """Idle sequences with blocks, in the order in which they give; one gives before the next is chosen."""
        idle = self._queues.idle_eviction
        while idle:
            yield from self._ends(blocks, iter([self._policy.idle_victim(idle, idle.longest(now), now)]))
        leased = [(held, held.lease) for held in self._queues.leased.values() if held.lease is not None]
        leased.sort(key=lambda pair: pair[1].returns, reverse=True)
        size = self._block_manager.block_tokens  # blocks beyond it that are being written go with the rest
        beyond = [(held, lease.blocks) for held, lease in leased if held.computed > lease.blocks * size]
        yield from beyond
        yield from self._ends(blocks, (held for held, _ in leased))

    def _before(self, blocks: int, sequence: Sequence, now: float) -> Iterator[_Victim]:
        """Idle sequences before ``sequence`` in that order, up to the first that has a row in this step."""
        step = self._counters.steps + 1
        before = takewhile(lambda victim: victim[0] is not sequence, self._idle(blocks, now))
        return takewhile(lambda victim: step not in victim[0].in_flight, before)

    def _coming(self) -> int:
        """Blocks that can be allocated now, or when the steps in flight have finished."""
        return self._pool.available + self._pool.fenced
