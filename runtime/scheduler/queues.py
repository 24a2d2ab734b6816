"""The queues of open sequences. Decides nothing.

::

              generate                 admit
     idle ───────────────▶ waiting ───────────▶ running
      ▲                       ▲   preempt          │
      │                       └────────────────────┤
      └────────────────────────────────────────────┘ end, stop, truncate

The order of turns is `running` followed by `waiting`, each in the policy's order; waiting turns stand in one
or more lines (queues), as the policy says. A running turn that is *displaced* waits again and keeps its KV;
one that is *preempted* loses its KV. Each turn has a `TurnPlace`: its number, less `HEAD_START` for each step
of its priority. So a turn with one step more priority goes before the last `HEAD_START` turns that began
before it, and no turn is overtaken forever.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

from ..errors import SequenceUnknown
from ..sequence import Sequence, Turn, TurnPlace
from ..stats import Counters
from .idle_eviction import IdleEviction, LeasedIdle
from .policy import FirstComeFirstServed, Policy

HEAD_START = 32
"""How many earlier turns a turn overtakes for each point of priority that it has more."""


class WaitingTurns:
    """Waiting turns, in one or more lines. A line is a queue in the policy's order; `Policy.line` says in which
    a turn waits (under fair shares each tenant has its own). A line that becomes empty is removed."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lines: dict[int, list[Sequence]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(self._lines.values())

    @property
    def heads(self) -> list[Sequence]:
        """The first turn of each line: those that may be admitted next."""
        return [line[0] for line in self._lines.values()]

    @property
    def last(self) -> Sequence:
        """The last turn of the last line; there must be one."""
        return next(reversed(self._lines.values()))[-1]

    def add(self, sequence: Sequence, step: int) -> None:
        """Add a turn to its line, at its place in the policy's order. ``step``: how many steps were planned
        so far."""
        there = self._lines.setdefault(self._policy.line(sequence), [])
        self._length += 1

        def goes_before(other: Sequence) -> bool:
            return self._policy.order([other, sequence], step)[0] is sequence

        if self._policy.steady:  # the line is in order, whatever came since
            there.insert(bisect_left(there, True, key=goes_before), sequence)
        else:
            there[:] = self._policy.order([*there, sequence], step)

    def remove(self, sequence: Sequence) -> None:
        """Remove a turn from its line. Raises ``ValueError`` if it does not wait."""
        line = self._policy.line(sequence)
        there = self._lines.get(line, [])
        there.remove(sequence)
        self._length -= 1
        if not there:
            del self._lines[line]

    def arrange(self, step: int) -> None:
        """Sort each line by the policy's order. ``step``: how many steps were planned so far."""
        for line, there in self._lines.items():
            if len(there) > 1:
                self._lines[line] = self._policy.order(there, step)


class Queues:
    """All open sequences, each idle, waiting or running. ``policy``: orders turns. ``counters``: tell how
    many steps were planned.

    ``sequences``: all, by id; ``running``: those with a running turn, by id, in the policy's order;
    ``waiting``: the waiting turns; ``waiting_holders``: those of them that may hold blocks.
    ``idle_eviction``: idle sequences without a lease that may hold blocks; ``leased``: idle sequences with a
    lease. ``prefill``: idle sequences with tokens to compute, in the order of their verbs, but leased ones
    and those with a turn expected first. ``restoring``: turns with KV that is being restored from disk, in
    the order in which they began; they are not waiting or running yet. ``staged``: idle sequences with KV
    that is being restored from disk. ``compiling``: turns with a grammar that is being compiled; they are not
    waiting or running yet, and keep their blocks unless other turns need them.
    """

    def __init__(self, policy: Policy | None = None, counters: Counters | None = None) -> None:
        self._policy = policy or FirstComeFirstServed()
        self._counters = counters or Counters()
        self.sequences: dict[int, Sequence] = {}
        self.running: dict[int, Sequence] = {}
        self.waiting = WaitingTurns(self._policy)
        self.waiting_holders = WaitingTurns(self._policy)
        self._holders: set[int] = set()  # their ids
        self.idle_eviction = IdleEviction()
        self.leased = LeasedIdle()
        self.prefill: OrderedDict[int, Sequence] = OrderedDict()
        self.restoring: dict[int, Sequence] = {}
        self.staged: dict[int, Sequence] = {}
        self.compiling: dict[int, Sequence] = {}
        self._turns = 0
        self._leader: Sequence | None = None  # the sequence with the first place, and its turn
        self._leads: Turn | None = None

    def __getitem__(self, seq: int) -> Sequence:
        """The open sequence with the id ``seq``. Raises `SequenceUnknown`."""
        try:
            return self.sequences[seq]
        except KeyError:
            raise SequenceUnknown(f"no sequence {seq}") from None

    def touch(self, sequence: Sequence, now: float) -> None:
        """Note that an idle sequence was used ``now`` (it may be new): give it its place in idle eviction,
        and queue its prefill."""
        self.sequences[sequence.id] = sequence
        sequence.used = now
        self.rank(sequence)
        if sequence.to_do:
            self.prefill[sequence.id] = sequence
            if sequence.lease is not None or sequence.turn_expected:
                self.prefill.move_to_end(sequence.id, last=False)
        else:
            self.prefill.pop(sequence.id, None)

    def rank(self, sequence: Sequence) -> None:
        """Put an idle sequence, which may hold blocks, at its place in the order of eviction: into `leased`
        if it has a lease, else into `idle_eviction`."""
        leased = sequence.lease is not None
        (self.idle_eviction if leased else self.leased).discard(sequence.id)
        (self.leased if leased else self.idle_eviction).put(sequence)

    def taken(self, sequence: Sequence) -> None:
        """Note that an idle sequence has lost its KV: it is not in the order of eviction any more, and is
        neither prefilled nor restored before it is used again."""
        self.idle_eviction.discard(sequence.id)
        self.leased.discard(sequence.id)
        self.prefill.pop(sequence.id, None)
        self.staged.pop(sequence.id, None)

    def enqueue(self, sequence: Sequence) -> None:
        """Give a sequence with a new turn its `TurnPlace`, and put it among the waiting turns; it is not idle
        any more."""
        self.taken(sequence)
        self._turns += 1
        rank = self._turns - HEAD_START * sequence.priority
        sequence.place = TurnPlace(rank, self._turns, self._counters.steps)
        self._await(sequence)

    @property
    def leaderless(self) -> bool:
        """Whether the first place, in which a turn is never preempted, is free: the turn that had it is
        over."""
        leader = self._leader
        return leader is None or self.running.get(leader.id) is not leader or leader.turn is not self._leads

    def arrange(self) -> None:
        """Sort all turns by the policy's order, before a step is planned."""
        self._arrange_running()
        if not self._policy.steady:
            self.waiting.arrange(self._counters.steps)
            self.waiting_holders.arrange(self._counters.steps)

    def lead(self, sequence: Sequence) -> None:
        """Give the first place, which is never preempted, to a running turn until it ends."""
        self._leader, self._leads = sequence, sequence.turn
        self._arrange_running()

    def admit(self, sequence: Sequence) -> None:
        """Move a waiting turn to the running ones, to its place in their order."""
        self._wait_no_longer(sequence)
        self.running[sequence.id] = sequence
        self._arrange_running()

    def displace(self, sequence: Sequence) -> None:
        """Move a running turn to the waiting ones; it keeps its KV."""
        del self.running[sequence.id]
        self._await(sequence)

    def preempt(self) -> Sequence:
        """Move the last running turn to the waiting ones, and return it."""
        _, sequence = self.running.popitem()
        self._await(sequence)
        return sequence

    def _await(self, sequence: Sequence) -> None:
        self.waiting.add(sequence, self._counters.steps)
        if len(sequence.table):
            self.waiting_holders.add(sequence, self._counters.steps)
            self._holders.add(sequence.id)

    def _wait_no_longer(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self.holds_nothing(sequence)

    def holds_nothing(self, sequence: Sequence) -> None:
        """Note that a sequence, if it is a waiting turn, holds no blocks any more."""
        if sequence.id in self._holders:
            self._holders.remove(sequence.id)
            self.waiting_holders.remove(sequence)

    def _arrange_running(self) -> None:
        if len(self.running) < 2:
            return
        running = list(self.running.values())
        first = running[0] if self.leaderless or self._leader is None else self._leader
        ordered = self._policy.rows(running, self._counters.steps)
        self.running = {first.id: first, **{sequence.id: sequence for sequence in ordered}}

    def rest(self, sequence: Sequence, now: float) -> None:
        """Move a sequence with a turn that is over to the idle ones."""
        for away in (self.restoring, self.compiling, self.running):
            if away.pop(sequence.id, None) is not None:
                break
        else:
            self._wait_no_longer(sequence)
        self.touch(sequence, now)

    def defer(self, sequence: Sequence) -> None:
        """Take an idle sequence out of the prefill queue: no more of it is computed until it is used again.

        At the end of a turn only a few tokens have no KV yet. Computing them now costs a pass over all its
        KV, and a turn that follows at once would wait for it.
        """
        self.prefill.pop(sequence.id, None)

    def close(self, sequence: Sequence, now: float) -> None:
        """Remove a sequence, idle or with a turn, from all queues. Its id is unknown from now on."""
        if sequence.turn is not None:
            self.rest(sequence, now)
        self.taken(sequence)
        del self.sequences[sequence.id]

    def turns(self) -> Iterator[Sequence]:
        """All sequences with a turn that runs or waits: the running ones first, each part in the policy's
        order."""
        yield from self.running.values()
        yield from self.waiting
