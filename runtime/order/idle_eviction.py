"""Idle sequences that may hold blocks, in the order in which they lose them.

Of those without a lease the one that is likely to stay away longest goes first. A sequence that has said when
it returns is away until then; one that is overdue by t seconds is assumed to need another t. A sequence that
has said nothing is assumed to stay away for `USUAL_ABSENCE`, and as long again as it has been away already. So
among these the longest unused goes first, and where no sequence says anything that is the whole order. Of
those with a lease the latest expected return goes first. Changes take O(log sequences).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from ...kvstore.priorities import Priorities
from ..sequence import Sequence

USUAL_ABSENCE = 120.0
"""How many seconds a sequence that says nothing is assumed to stay away: pauses of people have medians of 85
to 123 in the traces we know."""


class IdleEviction:
    """The order in which sequences without a turn lose their KV. All times are seconds by the clock of
    ``Sequence.used`` and ``Sequence.returns``.

    ``unleased``: those without a lease, by id.
    """

    def __init__(self) -> None:
        self.unleased: dict[int, Sequence] = {}
        self._unknown = Priorities[int]()  # ids by time of last use, the longest unused first
        self._soonest = Priorities[int]()  # ids by time of return
        self._latest = Priorities[int]()  # the same ones, the other way round
        self._leased: dict[int, Sequence] = {}
        self._leased_latest = Priorities[int]()  # ids by time of return, the latest first
        self._beyond = Priorities[int]()  # those of them that may hold more than their leases cover

    def __len__(self) -> int:
        return len(self.unleased) + len(self._leased)

    def __contains__(self, seq: int) -> bool:
        return seq in self.unleased or seq in self._leased

    def __iter__(self) -> Iterator[Sequence]:
        """All sequences here, in no particular order. None may be put in or taken out meanwhile."""
        return chain(self.unleased.values(), self._leased.values())

    @property
    def expected(self) -> int:
        """How many of the sequences without a lease have said when they return."""
        return len(self._soonest)

    def put(self, sequence: Sequence) -> None:
        """Insert a sequence without a turn, which may hold blocks. Its position follows from its lease, if it
        has one; else from the time at which it is expected back (``returns``), or if that is not known, from
        its last use (``used``). If it is here already, it moves to its new position."""
        self.discard(sequence.id)
        if sequence.lease is not None:
            self._leased[sequence.id] = sequence
            for order in (self._leased_latest, self._beyond):
                order.put(sequence.id, -sequence.lease.returns)
            return
        self.unleased[sequence.id] = sequence
        if sequence.returns is None:
            self._unknown.put(sequence.id, sequence.used)
        else:
            self._soonest.put(sequence.id, sequence.returns)
            self._latest.put(sequence.id, -sequence.returns)

    def discard(self, seq: int) -> None:
        """Remove the sequence with the id ``seq``, if it is here: it holds no blocks, or has a turn."""
        self.unleased.pop(seq, None)
        self._leased.pop(seq, None)
        for order in (self._unknown, self._soonest, self._latest, self._leased_latest, self._beyond):
            order.discard(seq)

    def longest(self, now: float) -> Sequence:
        """The sequence without a lease that is likely to stay away longest from ``now`` on; there must be
        one."""
        unused, soon, late = self._unknown.first, self._soonest.first, self._latest.first
        away = [] if unused is None else [(USUAL_ABSENCE + now - self._unknown[unused], unused)]
        away += [(abs(self._soonest[seq] - now), seq) for seq in (soon, late) if seq is not None]
        return self.unleased[max(away)[1]]

    def take_beyond(self) -> Sequence | None:
        """The leased sequence with the latest return of those that may hold blocks beyond what their leases
        cover; None if there is none. It does not count as one of these before it is put here again."""
        seq = self._beyond.first
        if seq is None:
            return None
        self._beyond.discard(seq)
        return self._leased[seq]

    @property
    def latest_leased(self) -> Sequence | None:
        """The leased sequence with the latest expected return; None if there is none."""
        seq = self._leased_latest.first
        return None if seq is None else self._leased[seq]
