"""Who is here, and in what order: the queues of open sequences. Decides nothing.

::

              generate                 admit
     idle ───────────────▶ waiting ───────────▶ running
      ▲                       ▲   preempt          │
      │                       └────────────────────┤
      └────────────────────────────────────────────┘ end, stop, truncate

Turns in order of age are `running` followed by `waiting`: a turn joins at the end of waiting, runs from its
front, and is preempted from the end of running to that front. So no younger turn ever stands before an older
one.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator

from .errors import SequenceUnknown
from .sequence import Sequence


class Roster:
    """All open sequences, each idle, waiting or running.

    ``holders``: idle ones that may hold blocks, the longest unused first. ``prefill``: idle ones with tokens
    to compute, in the order of their verbs. ``fetching``: turns whose KV comes up from disk; they hold nothing
    and have no place among the others yet.
    """

    def __init__(self) -> None:
        self.sequences: dict[int, Sequence] = {}
        self.running: dict[int, Sequence] = {}
        self.waiting: deque[Sequence] = deque()
        self.holders: OrderedDict[int, Sequence] = OrderedDict()
        self.prefill: dict[int, Sequence] = {}
        self.fetching: dict[int, Sequence] = {}

    def __getitem__(self, seq: int) -> Sequence:
        """Raises `SequenceUnknown`."""
        try:
            return self.sequences[seq]
        except KeyError:
            raise SequenceUnknown(f"no sequence {seq}") from None

    def touch(self, sequence: Sequence) -> None:
        """An idle sequence was used: it loses its KV after all that were used before, and may have work."""
        self.sequences[sequence.id] = sequence
        self.holders[sequence.id] = sequence
        self.holders.move_to_end(sequence.id)
        if sequence.to_do:
            self.prefill[sequence.id] = sequence
        else:
            self.prefill.pop(sequence.id, None)

    def taken(self, sequence: Sequence) -> None:
        """An idle sequence lost its KV; it is computed again when it is used again, not before."""
        self.holders.pop(sequence.id, None)
        self.prefill.pop(sequence.id, None)

    def enqueue(self, sequence: Sequence) -> None:
        """A turn began."""
        self.taken(sequence)
        self.waiting.append(sequence)

    def admit(self) -> Sequence:
        """The oldest waiting turn runs."""
        sequence = self.waiting.popleft()
        self.running[sequence.id] = sequence
        return sequence

    def preempt(self) -> Sequence:
        """The youngest running turn waits, before all that wait already."""
        _, sequence = self.running.popitem()
        self.waiting.appendleft(sequence)
        return sequence

    def rest(self, sequence: Sequence) -> None:
        """The turn is over."""
        if self.fetching.pop(sequence.id, None) is None and self.running.pop(sequence.id, None) is None:
            self.waiting.remove(sequence)
        self.touch(sequence)

    def close(self, sequence: Sequence) -> None:
        """Forget a sequence, whatever it does."""
        if sequence.turn is not None:
            self.rest(sequence)
        self.taken(sequence)
        del self.sequences[sequence.id]

    def turns(self) -> Iterator[Sequence]:
        """All turns, the oldest first."""
        yield from self.running.values()
        yield from self.waiting
