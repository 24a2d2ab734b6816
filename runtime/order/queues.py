"""The open sequences by what they do (`Status`), and the orders over them. Decides nothing.

::

                 ┌▶ compiling ─┐
     idle ───────┴─────────────┴▶ restoring ──▶ waiting ──▶ running
      ▲ ▲         generate                        ▲           │
      │ └▶ staged                                 └───────────┤ preempt, displace
      └───────────────────────────────────────────────────────┘ end, stop, truncate: from each of them

The order of turns is `running` followed by `waiting`, each in the policy's order; waiting turns stand in one
or more lines (queues), as the policy says. A running turn that is *displaced* waits again and keeps its KV;
one that is *preempted* loses its KV. Each turn has a `TurnAge`: its number, less `HEAD_START` for each step
of its priority. So a turn with one step more priority goes before the last `HEAD_START` turns that began
before it, and no turn is overtaken forever.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

from ..errors import SequenceUnknown
from ..sequence import Sequence, Status, TurnAge
from ..stats import Counters
from .idle_eviction import IdleEviction
from .policy import FirstComeFirstServed, Policy

HEAD_START = 32
"""How many earlier turns a turn overtakes for each point of priority that it has more."""

ARRANGE_EVERY = 16
"""A steady policy is asked for the order of the running turns when one comes, and every so many steps."""

AT_REST = frozenset({Status.IDLE, Status.STAGED})
MOVES = {
    Status.NEW: {Status.IDLE},
    Status.IDLE: {Status.STAGED, Status.COMPILING, Status.RESTORING, Status.CLOSED},
    Status.STAGED: {Status.IDLE, Status.COMPILING, Status.RESTORING, Status.CLOSED},
    Status.COMPILING: {Status.RESTORING, Status.IDLE},
    Status.RESTORING: {Status.WAITING, Status.IDLE},
    Status.WAITING: {Status.RUNNING, Status.IDLE},
    Status.RUNNING: {Status.WAITING, Status.IDLE},
    Status.CLOSED: set[Status](),
}
"""The statuses that may follow each one."""


class WaitingTurns:
    """Waiting turns, in one or more lines. A line is a queue in the policy's order; `Policy.line` says in which
    a turn waits (under fair shares each tenant has its own). A line that becomes empty is removed."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lines: dict[int, list[Sequence]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

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
        """Add a turn to its line, at its position in the policy's order. ``step``: how many steps were planned
        so far."""
        there = self._lines.setdefault(self._policy.line(sequence), [])

        def goes_before(other: Sequence) -> bool:
            return self._policy.order([other, sequence], step)[0] is sequence

        if self._policy.steady:  # the line is in order, whatever came since
            there.insert(bisect_left(there, True, key=goes_before), sequence)
        else:
            there[:] = self._policy.order([*there, sequence], step)

    def discard(self, sequence: Sequence) -> None:
        """Remove a turn from its line, if it is there."""
        line = self._policy.line(sequence)
        there = self._lines.get(line, [])
        if sequence in there:
            there.remove(sequence)
            if not there:
                del self._lines[line]

    def arrange(self, step: int) -> None:
        """Sort each line by the policy's order. ``step``: how many steps were planned so far."""
        for line, there in self._lines.items():
            if len(there) > 1:
                self._lines[line] = self._policy.order(there, step)


class Queues:
    """All open sequences, and the orders over them. ``policy``: orders turns. ``counters``: tell how many
    steps were planned.

    ``sequences``: all, by id. ``running``, ``restoring``, ``compiling``, ``staged``: those of a status, by id;
    the running ones in the policy's order, the others in the order in which they began. ``waiting``: the
    waiting turns; ``waiting_holders``: those of them that may hold blocks. ``idle``: sequences without a turn
    that may hold blocks, in the order in which they lose them. ``prefill``: sequences without a turn that have
    tokens to compute, in the order of their verbs, but leased ones and those with a turn expected first.
    """

    def __init__(self, policy: Policy | None = None, counters: Counters | None = None) -> None:
        self._policy = policy or FirstComeFirstServed()
        self._counters = counters or Counters()
        self.sequences: dict[int, Sequence] = {}
        self.waiting = WaitingTurns(self._policy)
        self.waiting_holders = WaitingTurns(self._policy)
        queued = Status.RUNNING, Status.RESTORING, Status.COMPILING, Status.STAGED
        self._by_status = {status: dict[int, Sequence]() for status in queued}
        self.running, self.restoring, self.compiling, self.staged = self._by_status.values()
        self.idle = IdleEviction()
        self.prefill: OrderedDict[int, Sequence] = OrderedDict()
        self.version = 0
        """Another number whenever the running turns or their order change."""
        self._turns = 0
        self._arranged = 0  # the number of steps that were planned when the running turns were sorted last
        self.leader: Sequence | None = None
        """The running turn with the first place, in which a turn is never preempted; None: the turn that had it
        is over."""

    def __getitem__(self, seq: int) -> Sequence:
        """The open sequence with the id ``seq``. Raises `SequenceUnknown`."""
        try:
            return self.sequences[seq]
        except KeyError:
            raise SequenceUnknown(f"no sequence {seq}") from None

    def move(self, sequence: Sequence, to: Status) -> None:
        """Change what the sequence does, if that may follow what it did: it leaves the orders over its old
        status, and stands in the queue of the new one."""
        before = sequence.status
        if to not in MOVES[before]:
            raise AssertionError(f"sequence {sequence.id} is {before.value}; it cannot be {to.value} next")
        sequence.status = to
        if before is Status.WAITING:
            self.waiting.discard(sequence)
            self.waiting_holders.discard(sequence)
        elif before in AT_REST and to not in AT_REST:
            self.lost(sequence)
        if sequence is self.leader:
            self.leader = None
        if Status.RUNNING in (before, to):
            self.version += 1
        if before in self._by_status:
            del self._by_status[before][sequence.id]
        if to in self._by_status:
            self._by_status[to][sequence.id] = sequence
        elif to is Status.WAITING:
            self.waiting.add(sequence, self._counters.steps)
            if len(sequence.table):
                self.waiting_holders.add(sequence, self._counters.steps)

    # --- without a turn -------------------------------------------------------------------------------------

    def touch(self, sequence: Sequence, now: float) -> None:
        """Note that a sequence without a turn was used ``now`` (it may be new): give it its position in the
        order of eviction, and queue its prefill."""
        if sequence.status is Status.NEW:
            self.sequences[sequence.id] = sequence
            self.move(sequence, Status.IDLE)
        sequence.used = now
        self.idle.put(sequence)
        if sequence.to_do:
            self.prefill[sequence.id] = sequence
            if sequence.lease is not None or sequence.turn_expected:
                self.prefill.move_to_end(sequence.id, last=False)
        else:
            self.prefill.pop(sequence.id, None)

    def stage(self, sequence: Sequence) -> None:
        """Let a sequence without a turn wait for its KV from disk; nothing of it is computed meanwhile."""
        self.defer(sequence)
        if sequence.status is not Status.STAGED:
            self.move(sequence, Status.STAGED)

    def arrived(self, sequence: Sequence, now: float) -> None:
        """Note that the KV of a staged sequence has come."""
        if sequence.status is Status.STAGED:
            self.move(sequence, Status.IDLE)
        self.touch(sequence, now)

    def defer(self, sequence: Sequence) -> None:
        """Take a sequence out of the prefill queue: no more of it is computed until it is used again.

        At the end of a turn only a few tokens have no KV yet. Computing them now costs a pass over all its
        KV, and a turn that follows at once would wait for it.
        """
        self.prefill.pop(sequence.id, None)

    def lost(self, sequence: Sequence) -> None:
        """Note that a sequence without a turn has lost its KV: it is not in the order of eviction any more,
        and is neither prefilled nor restored before it is used again."""
        self.idle.discard(sequence.id)
        self.defer(sequence)
        if sequence.status is Status.STAGED:
            self.move(sequence, Status.IDLE)

    def close(self, sequence: Sequence, now: float) -> None:
        """Remove a sequence, idle or with a turn. Its id is unknown from now on."""
        if sequence.status not in AT_REST:
            self.move(sequence, Status.IDLE)
        self.move(sequence, Status.CLOSED)
        del self.sequences[sequence.id]

    # --- turns ----------------------------------------------------------------------------------------------

    def enqueue(self, sequence: Sequence) -> None:
        """Give a sequence with a new turn its `TurnAge`, and put it among the waiting turns."""
        self._turns += 1
        rank = self._turns - HEAD_START * sequence.priority
        sequence.age = TurnAge(rank, self._turns, self._counters.steps)
        self.move(sequence, Status.WAITING)

    def admit(self, sequence: Sequence) -> None:
        """Move a waiting turn to the running ones, to its position in their order."""
        self.move(sequence, Status.RUNNING)
        self._arrange_running()

    def rest(self, sequence: Sequence, now: float) -> None:
        """Move a sequence with a turn that is over to the idle ones."""
        self.move(sequence, Status.IDLE)
        self.touch(sequence, now)

    def arrange(self) -> None:
        """Sort all turns by the policy's order, before a step is planned. Under a steady policy the running
        ones are sorted every `ARRANGE_EVERY` steps: others are sorted when one comes."""
        if not self._policy.steady or self._counters.steps >= self._arranged + ARRANGE_EVERY:
            self._arrange_running()
        if not self._policy.steady:
            self.waiting.arrange(self._counters.steps)
            self.waiting_holders.arrange(self._counters.steps)

    def lead(self, sequence: Sequence) -> None:
        """Give the first place, which is never preempted, to a running turn until it ends."""
        self.leader = sequence
        self._arrange_running()

    def _arrange_running(self) -> None:
        self._arranged = self._counters.steps
        if len(self.running) < 2:
            return
        running = list(self.running.values())
        first = self.leader or running[0]
        ordered = self._policy.rows(running, self._counters.steps)
        ids = [first.id, *(sequence.id for sequence in ordered if sequence is not first)]
        if ids != list(self.running):
            for seq in ids:
                self.running[seq] = self.running.pop(seq)
            self.version += 1
