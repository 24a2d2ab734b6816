"""Admission of turns, and the choice of sequences that give up blocks when these are short.

A running turn that needs blocks takes them in this order:

1. blocks that no sequence holds;
2. turns with KV that is still being restored from disk, the last first;
3. idle sequences without a lease, as the policy says (`Policy.idle_victim`);
4. of leased idle sequences what their lease does not cover, then the rest, the latest expected return first;
5. turns with a grammar that is being compiled;
6. waiting turns, the last first;
7. running turns behind it, the last first: these are preempted.

A running turn that the policy displaces for a waiting one (`Policy.displaced`) keeps its blocks, and gives them
up as a waiting turn does.

A sequence that is not running gives up blocks from its end, and keeps its first ones. A turn that is being
restored from disk takes blocks only from later turns that are being restored, and from idle sequences. Prefill
of an idle sequence takes blocks only from the idle sequences before it in this order.

Blocks that are given up while a step runs lie behind the step fence: they can be used once the step is done.
They count as free, so that no second victim is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, takewhile
from typing import TypeAlias

from ..kv_placement.block_manager import BlockManager
from ..order.policy import Policy
from ..order.queues import Queues
from ..sequence import Sequence, Status
from ..settings import SchedulerSettings
from ..stats import Counters

_Victim: TypeAlias = tuple[Sequence, int]
"""A sequence that is to give up blocks, and how many of its first blocks it keeps."""


@dataclass(eq=False)
class Preemption:
    """Admits waiting turns, and takes blocks from some sequences for others."""

    _settings: SchedulerSettings
    _policy: Policy
    _queues: Queues
    _block_manager: BlockManager
    _counters: Counters

    def admit(self) -> None:
        """Let waiting turns run, in the policy's order, while there is a place for them and room for their
        prompts beside the running turns. Running turns that the policy displaces for them wait again.
        """
        queues = self._queues
        if queues.leader is None and (queues.running or queues.waiting):
            self._lead()
        over: set[int] = set()  # turns that were refused or displaced: not admitted before the next plan
        while self._admit_one(over):
            pass

    def _admit_one(self, over: set[int]) -> bool:
        """Admit the first turn that can run among the heads (the first waiting turn of each of the policy's
        queues), in the policy's order. Turns with ids in ``over`` are passed over. Adds to ``over`` the turns
        before it, and those displaced for it. Returns whether a turn was admitted.

        The policy is asked with all heads, also those in ``over``: it forgets tenants that it is not shown.
        """
        queues = self._queues
        heads = queues.waiting.heads
        for head in self._policy.admit(heads, list(queues.running.values())) if heads else ():
            if head.id in over:
                continue
            gone = self._way(head)
            if gone is not None:
                for turn in gone:
                    self._displace(turn)
                    over.add(turn.id)
                self._run(head)
                return True
            over.add(head.id)
        return False

    def _lead(self) -> None:
        """Give the first place, which is never preempted, to the turn that the policy names; it becomes a
        running turn now, even if another turn is displaced for it."""
        queues = self._queues
        running = list(queues.running.values())
        lead = self._policy.lead(queues.waiting.heads, running)
        if lead is None:
            return
        if lead.status is not Status.RUNNING:
            if len(running) >= self._settings.max_sequences:
                self._displace(running[-1])
            self._run(lead)
        queues.lead(lead)

    def _run(self, sequence: Sequence) -> None:
        self._queues.admit(sequence)
        self._block_manager.adopt(sequence)
        sequence.admit()

    def _displace(self, sequence: Sequence) -> None:
        self._queues.move(sequence, Status.WAITING)
        self._counters.displaced += 1

    def _way(self, head: Sequence) -> list[Sequence] | None:
        """The running turns to displace so that the waiting turn ``head`` can run now; empty if none has to
        be. None: ``head`` has to wait, as the policy names too few."""
        running = list(self._queues.running.values())
        gone: list[Sequence] = []
        if len(running) >= self._settings.max_sequences:
            gone += islice(self._policy.displaced(head, running, by_tokens=False), 1)
            if not gone:
                return None
        running = [turn for turn in running if turn not in gone]
        displaced = self._policy.displaced(head, running, by_tokens=True)
        while not self._fits(head, running):
            turn = next(displaced, None)
            if turn is None:
                return None
            running.remove(turn)
            gone.append(turn)
        return gone

    def _fits(self, head: Sequence, running: list[Sequence]) -> bool:
        """Estimate whether there are blocks for all tokens of the waiting turn ``head`` and of the turns in
        ``running``, if all other sequences give up theirs.

        A block that idle sequences share is counted once for each of them, so the answer may be wrong. A turn
        that is admitted too early is preempted later. The turn that runs first takes what it needs, so there
        is always progress.
        """
        needed = self._missing(head)
        if running:
            needed += self._settings.watermark_blocks + sum(map(self._missing, running))
        own = head.table.blocks + sum(turn.table.blocks for turn in running)
        pool = self._block_manager.pool
        return pool.available + pool.references.total - own >= needed

    def _missing(self, sequence: Sequence) -> int:
        """How many more blocks the sequence's table needs for all its tokens, besides those that a chunk of its
        prompt has for a while."""
        start = None if sequence.turn is None else sequence.turn.prompt
        return max(0, self._block_manager.windows.blocks(sequence.total, start) - sequence.table.blocks)

    def relieve(self, blocks: int, sequence: Sequence, now: float) -> None:
        """Make ``blocks`` blocks available for ``sequence``, now or when the steps in flight are done, as far
        as that is possible without preempting running turns."""
        coming_up = reversed(self._queues.restoring.values())
        victims: Iterator[_Victim]
        if sequence.turn is None:
            victims = self._before(blocks, sequence, now)
        elif sequence.status is Status.RESTORING:
            behind = takewhile(lambda other: other is not sequence, coming_up)
            victims = chain(self._ends(blocks, behind), self._idle(blocks, now))
        else:
            victims = chain(self._ends(blocks, coming_up), self._idle(blocks, now), self._whole())
        while self._coming() < blocks and (victim := next(victims, None)) is not None:
            holder, kept = victim
            if self._block_manager.surrender(holder, kept):
                self._counters.taken += 1
            if kept:
                self._queues.defer(holder)
            elif holder.turn is None:
                self._queues.lost(holder)

    def preempt(self, blocks: int, sequence: Sequence) -> None:
        """Make ``blocks`` blocks available, now or when the steps in flight are done, by preempting running
        turns behind ``sequence``, the last first; as far as there are such turns."""
        running = self._queues.running
        while self._coming() < blocks:
            last = next(reversed(running.values()))
            if last is sequence:
                return
            self._queues.move(last, Status.WAITING)
            self._block_manager.surrender(last)
            self._counters.preempted += 1

    def _ends(self, blocks: int, sequences: Iterator[Sequence]) -> Iterator[_Victim]:
        """Yield two victims for each of ``sequences``: its last blocks, as many as are missing of ``blocks``;
        then all its blocks, because the last ones free nothing if they are shared."""
        for sequence in sequences:
            short = -(-(blocks - self._coming()) // self._block_manager.groups)
            yield sequence, max(0, len(sequence.table) - short)
            yield sequence, 0

    def _idle(self, blocks: int, now: float) -> Iterator[_Victim]:
        """Yield idle sequences as victims, in the order in which they give up blocks, until ``blocks`` blocks
        can be had. The next is chosen only when it is needed."""
        idle, size = self._queues.idle, self._block_manager.block_tokens
        while idle.unleased:
            victim = self._policy.idle_victim(idle.unleased.values(), idle.longest(now), now)
            yield from self._ends(blocks, iter([victim]))
        while (held := idle.take_beyond()) is not None:
            if held.lease is not None:
                kept = self._block_manager.windows.within(held.lease.blocks, held.computed)
                if held.computed > kept * size:
                    yield held, kept  # a block behind `computed` goes with the rest
        while (held := idle.latest_leased) is not None:
            yield from self._ends(blocks, iter([held]))

    def _whole(self) -> Iterator[_Victim]:
        """Yield the turns with a grammar that is being compiled as victims, then the waiting ones."""
        yield from ((holder, 0) for holder in self._queues.compiling.values())
        waiting = self._queues.waiting_holders
        while waiting:
            last = waiting.last
            yield last, 0
            waiting.discard(last)

    def _before(self, blocks: int, sequence: Sequence, now: float) -> Iterator[_Victim]:
        """Yield, as victims, the idle sequences that give up blocks before ``sequence``, an idle one itself,
        does. It ends at the first victim that has a row in the step being planned."""
        step = self._counters.steps + 1
        idle = self._idle(blocks, now)
        return takewhile(lambda victim: victim[0] is not sequence and victim[0].last_step != step, idle)

    def _coming(self) -> int:
        """How many blocks can be allocated now, or when the steps in flight have finished."""
        return self._block_manager.pool.available + self._block_manager.pool.fenced
