"""Who is here, and in what order: the queues of open sequences. Decides nothing.

::

              generate                 admit
     idle ───────────────▶ waiting ───────────▶ running
      ▲                       ▲   preempt          │
      │                       └────────────────────┤
      └────────────────────────────────────────────┘ end, stop, truncate

The order of turns is `running` followed by `waiting`, each by *place*: a turn's number, less `HEAD_START` for
each step of its priority, and its number where that is the same. So with equal priorities the older one stands
first; with a higher one a turn overtakes those that began less than so many turns before it, and nobody is
overtaken for ever. A turn is
preempted from the end of running; the first of running keeps its place until it ends.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import islice

from ..errors import SequenceUnknown
from ..sequence import Sequence
from .idle_eviction import IdleEviction

HEAD_START = 32
"""Turns that one step of priority is worth."""


class Queues:
    """All open sequences, each idle, waiting or running.

    ``holders``: idle ones without a lease that may hold blocks; ``leased``: those with one. ``prefill``: idle
    ones with tokens to compute, in the order of their verbs, leased and due ones before others. ``fetching``:
    turns whose KV comes up from disk, in the order in which they began; they have no place among the others
    yet. ``staged``: idle ones for which the same is done. ``compiling``: turns whose grammar is being compiled;
    they have no place yet either, and keep what they hold unless others need it.
    """

    def __init__(self) -> None:
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
        """An idle sequence may hold blocks: it stands among those it is to lose them with."""
        self.leased.pop(sequence.id, None)
        if sequence.lease is None:
            self.idle_eviction.put(sequence)
        else:
            self.idle_eviction.discard(sequence.id)
            self.leased[sequence.id] = sequence

    def taken(self, sequence: Sequence) -> None:
        """An idle sequence lost its KV; it is computed again when it is used again, not before."""
        self.idle_eviction.discard(sequence.id)
        self.leased.pop(sequence.id, None)
        self.prefill.pop(sequence.id, None)
        self.staged.pop(sequence.id, None)

    def enqueue(self, sequence: Sequence) -> None:
        """A turn began."""
        self.taken(sequence)
        self._turns += 1
        sequence.place = (self._turns - HEAD_START * sequence.priority, self._turns)
        self._await(sequence)

    def admit(self) -> Sequence:
        """The first waiting turn runs: behind the first that runs already, and all of lower place."""
        sequence = self.waiting.popleft()
        behind = [other for other in islice(self.running.values(), 1, None) if other.place > sequence.place]
        self.running[sequence.id] = sequence
        for other in behind:
            del self.running[other.id]
            self.running[other.id] = other
        return sequence

    def preempt(self) -> Sequence:
        """The last running turn waits again."""
        _, sequence = self.running.popitem()
        self._await(sequence)
        return sequence

    def _await(self, sequence: Sequence) -> None:
        at = len(self.waiting)
        while at and self.waiting[at - 1].place > sequence.place:
            at -= 1
        self.waiting.insert(at, sequence)

    def rest(self, sequence: Sequence, now: float) -> None:
        """The turn is over."""
        for away in (self.restoring, self.compiling, self.running):
            if away.pop(sequence.id, None) is not None:
                break
        else:
            self.waiting.remove(sequence)
        self.touch(sequence, now)

    def defer(self, sequence: Sequence) -> None:
        """What an idle sequence has to do is computed when it is used again: a few tokens that its turn said
        last would cost a whole pass over its KV, and keep the turn waiting that follows at once."""
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
