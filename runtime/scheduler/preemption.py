"""Who gets blocks when they are short: admission of turns, and whose KV goes first.

KV is held by promise, never locked. For a running turn the order of taking is: blocks nobody holds; turns
whose KV still comes up from disk, the last first; idle sequences without a lease, who is likely to stay away
longest first (`idle_eviction`); of leased ones what their lease does not cover, then the rest, the latest
expected return first; turns whose grammar is being compiled; turns that wait, the last first; running turns
behind it, the last first. Who has no row to compute gives from its end, and keeps a beginning. A turn that
comes up from disk takes from those behind it that do, and from idle sequences; prefill of an idle sequence
takes from those that go before itself in this order; neither takes from anybody else.
What is given back while a step runs lies behind the step fence: it counts as on its way, and nobody is robbed
twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, takewhile

from ..counters import Counters
from ..kv_placement.block_manager import BlockManager
from ..sequence import Sequence
from ..settings import SchedulerSettings
from .policy import Policy
from .queues import Queues


@dataclass(frozen=True, slots=True)
class _Victim:
    """Who is to give blocks, and how many of its first it keeps."""

    sequence: Sequence
    kept: int = 0


class Preemption:
    """Admits turns, and makes room in the pool at the cost of the right sequence."""

    def __init__(
        self,
        settings: SchedulerSettings,
        policy: Policy,
        queues: Queues,
        block_manager: BlockManager,
        counters: Counters,
    ) -> None:
        self._policy = policy
        self._settings = settings
        self._queues = queues
        self._block_manager = block_manager
        self._pool = block_manager.pool
        self._counters = counters

    # --- admission --------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Let turns run, first come first served, while their prompts find room beside the running ones."""
        queues = self._queues
        while queues.waiting and len(queues.running) < self._settings.max_sequences:
            if not self._fits(queues.waiting[0]):
                return
            sequence = queues.admit()
            self._counters.adopted += self._block_manager.adopt(sequence)
            sequence.admit()

    def _fits(self, head: Sequence) -> bool:
        """Whether the tokens of the first waiting turn and of the running ones can all be held; an estimate.

        Shared blocks of idle sequences are counted as often as they are shared. Too early an admission costs
        a preemption, never progress: the oldest turn takes what it needs.
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
        """Blocks to lease before the turn has sampled one more token."""
        return max(0, self._block_manager.blocks_for(sequence.total) - len(sequence.table))

    # --- room -------------------------------------------------------------------------------------------

    def relieve(self, blocks: int, sequence: Sequence, now: float) -> None:
        """Have ``blocks`` available, now or behind the fence, at the cost of KV whose turn does not run."""
        if sequence.turn is None:
            return self._take(blocks, self._before(blocks, sequence, now))
        coming_up = reversed(self._queues.restoring.values())
        if sequence.id in self._queues.restoring:
            behind = takewhile(lambda other: other is not sequence, coming_up)
            return self._take(blocks, chain(self._ends(blocks, behind), self._idle(blocks, now)))
        later = chain(self._queues.compiling.values(), reversed(self._queues.waiting))
        return self._take(
            blocks, chain(self._ends(blocks, coming_up), self._idle(blocks, now), map(_Victim, later))
        )

    def preempt(self, blocks: int, sequence: Sequence) -> None:
        """The same at the cost of running turns behind ``sequence``, the last first."""
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
            holder = victim.sequence
            if self._block_manager.surrender(holder, victim.kept):
                self._counters.taken += 1
            if victim.kept:
                self._queues.prefill.pop(holder.id, None)
            elif holder.turn is None:
                self._queues.taken(holder)

    def _ends(self, blocks: int, sequences: Iterator[Sequence]) -> Iterator[_Victim]:
        """Of each the end first, as much as is missing; then all, where others share that end."""
        for sequence in sequences:
            yield _Victim(sequence, max(0, len(sequence.table) - (blocks - self._coming())))
            yield _Victim(sequence)

    def _idle(self, blocks: int, now: float) -> Iterator[_Victim]:
        """Idle holders in the order of taking; each is taken, or keeps what it may, before the next comes."""
        while self._queues.idle_eviction:
            yield from self._ends(blocks, iter([self._policy.idle_victim(self._queues.idle_eviction, now)]))
        leased = sorted(self._queues.leased.values(), key=_return, reverse=True)
        size = self._block_manager.block_tokens  # what is only being written beyond it goes with the rest
        beyond = [holder for holder in leased if holder.computed > _covered(holder) * size]
        yield from (_Victim(holder, _covered(holder)) for holder in beyond)
        yield from self._ends(blocks, iter(leased))

    def _before(self, blocks: int, sequence: Sequence, now: float) -> Iterator[_Victim]:
        """Idle holders before ``sequence``, as far as the step being planned has no row for them yet."""
        step = self._counters.steps + 1
        before = takewhile(lambda victim: victim.sequence is not sequence, self._idle(blocks, now))
        return takewhile(lambda victim: step not in victim.sequence.in_flight, before)

    def _coming(self) -> int:
        """Blocks that can be leased now or when the steps in flight have finished."""
        return self._pool.available + self._pool.statistics().fenced


def _return(sequence: Sequence) -> float:
    return sequence.lease.returns if sequence.lease is not None else 0.0


def _covered(sequence: Sequence) -> int:
    return sequence.lease.blocks if sequence.lease is not None else 0
