"""The queues of open sequences. Decides nothing.

::

              generate                 admit
     idle ───────────────▶ waiting ───────────▶ running
      ▲                       ▲   preempt          │
      │                       └────────────────────┤
      └────────────────────────────────────────────┘ end, stop, truncate

The order of turns is `running` followed by `waiting`, each as the policy has it. A turn has a `TurnPlace` by
age: its number, less `HEAD_START` for each step of its priority. So a turn of higher priority goes before those
that began less than so many turns before it, and no turn is overtaken without end.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import islice

from ..errors import SequenceUnknown
from ..sequence import Sequence, TurnPlace
from ..stats import Counters
from .idle_eviction import IdleEviction
from .policy import FirstComeFirstServed, Policy

HEAD_START = 32
"""Turns that one step of priority is worth."""


class Queues:
    """All open sequences, each idle, waiting or running. ``policy``: the order of turns.

    ``idle_eviction``: idle ones without a lease that may hold blocks; ``leased``: those with one. ``prefill``:
    idle ones with tokens to compute, in the order of their verbs, leased and expected ones before others.
    ``restoring``: turns with KV that comes up from disk, in the order in which they began; they have no place
    among the others yet. ``staged``: idle ones for which the same is done. ``compiling``: turns with a grammar
    that is being compiled; they have no place yet either, and keep what they hold unless others need it.
    """

    def __init__(self, policy: Policy | None = None, counters: Counters | None = None) -> None:
        self._policy = policy or FirstComeFirstServed()
        self._counters = counters or Counters()
        self.sequences: dict[int, Sequence] = {}
        self.running: dict[int, Sequence] = {}
        self.waiting: deque[Sequence] = deque()
        self.idle_eviction = IdleEviction()
        self.leased: OrderedDict[int, Sequence] = OrderedDict()
        self.prefill: OrderedDict[int, Sequence] = OrderedDict()
        self.restoring: dict[int, Sequence] = {}
        self.staged: dict[int, Sequence] = {}
        self.compiling: dict[int, Sequence] = {}
        self._turns = 0

    def __getitem__(self, seq: int) -> Sequence:
        """Raises `SequenceUnknown`."""
        try:
            return self.sequences[seq]
        except KeyError:
            raise SequenceUnknown(f"no sequence {seq}") from None

    def touch(self, sequence: Sequence, now: float) -> None:
        """An idle sequence was used: insert it, rank it anew for idle eviction, and queue its prefill."""
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
        """Insert an idle sequence that may hold blocks among those that can lose them, or re-rank it."""
        self.leased.pop(sequence.id, None)
        if sequence.lease is None:
            self.idle_eviction.put(sequence)
        else:
            self.idle_eviction.discard(sequence.id)
            self.leased[sequence.id] = sequence

    def taken(self, sequence: Sequence) -> None:
        """An idle sequence lost its KV. It is computed again when the sequence is used again, not before."""
        self.idle_eviction.discard(sequence.id)
        self.leased.pop(sequence.id, None)
        self.prefill.pop(sequence.id, None)
        self.staged.pop(sequence.id, None)

    def enqueue(self, sequence: Sequence) -> None:
        """A turn began."""
        self.taken(sequence)
        self._turns += 1
        rank = self._turns - HEAD_START * sequence.priority
        sequence.place = TurnPlace(rank, self._turns, self._counters.steps)
        self._await(sequence)

    def arrange(self) -> None:
        """Put all turns in the policy's order, before a step is planned."""
        if not self._policy.steady:
            self._arrange_running()
            self._arrange_waiting()

    def admit(self) -> Sequence:
        """The first waiting turn runs, at its place among the running ones."""
        sequence = self.waiting.popleft()
        self.running[sequence.id] = sequence
        self._arrange_running()
        return sequence

    def preempt(self) -> Sequence:
        """The last running turn waits again."""
        _, sequence = self.running.popitem()
        self._await(sequence)
        return sequence

    def _await(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)
        self._arrange_waiting()

    def _arrange_waiting(self) -> None:
        if len(self.waiting) > 1:
            self.waiting = deque(self._policy.order(list(self.waiting), self._counters.steps))

    def _arrange_running(self) -> None:
        first = list(islice(self.running.values(), 1))
        others = list(islice(self.running.values(), len(first), None))
        if len(others) > 1:
            ordered = self._policy.order(others, self._counters.steps)
            self.running = {sequence.id: sequence for sequence in (*first, *ordered)}

    def rest(self, sequence: Sequence, now: float) -> None:
        """The turn is over."""
        for away in (self.restoring, self.compiling, self.running):
            if away.pop(sequence.id, None) is not None:
                break
        else:
            self.waiting.remove(sequence)
        self.touch(sequence, now)

    def defer(self, sequence: Sequence) -> None:
        """Compute nothing more of an idle sequence until it is used again.

        The last tokens of its turn are few. Computing them now costs a whole pass over its KV, and a turn that
        follows at once would wait for that.
        """
        self.prefill.pop(sequence.id, None)

    def close(self, sequence: Sequence, now: float) -> None:
        """Forget a sequence, whatever it does."""
        if sequence.turn is not None:
            self.rest(sequence, now)
        self.taken(sequence)
        del self.sequences[sequence.id]

    def turns(self) -> Iterator[Sequence]:
        """All turns, in order."""
        yield from self.running.values()
        yield from self.waiting
