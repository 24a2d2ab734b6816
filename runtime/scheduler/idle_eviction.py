"""Idle sequences that may hold blocks without a lease, in the order in which they lose them.

First goes who is likely to stay away longest, as far as is known. Who has said when it comes back is away until
then; by as much as it is late it will be late once more. Of whom nothing is known that is `USUAL_ABSENCE`, and
as long again as it has been away already: so among these the longest unused goes first, and where nobody says
anything that is the whole order. Decides nothing about leases; the clock is the caller's.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from ..sequence import Sequence

USUAL_ABSENCE = 120.0
"""Seconds: the pauses of people, who say nothing of them, have medians of 85 to 123 in the traces we know."""


class IdleEviction:
    """See above. ``now``: how late it is, by the clock of ``Sequence.used`` and ``Sequence.returns``."""

    def __init__(self) -> None:
        self.now = 0.0
        self._places: dict[int, tuple[Sequence, bool, float]] = {}  # whether it told, and what it stands by
        self._silent: list[tuple[float, int]] = []  # when they were used last, the longest unused first
        self._told: list[tuple[float, int]] = []  # when they come back, the first first

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, seq: int) -> bool:
        return seq in self._places

    def __iter__(self) -> Iterator[Sequence]:
        """In no order that counts; not while any is put or taken out."""
        return (sequence for sequence, _, _ in self._places.values())

    @property
    def told(self) -> int:
        """Those that have said when they come back."""
        return len(self._told)

    def put(self, sequence: Sequence) -> None:
        """It may hold blocks, or was used, or has said when it comes back."""
        self.discard(sequence.id)
        told = sequence.returns is not None
        by = sequence.used if sequence.returns is None else sequence.returns
        self._places[sequence.id] = sequence, told, by
        insort(self._told if told else self._silent, (by, sequence.id))

    def discard(self, seq: int) -> None:
        """It holds nothing, or is not idle, or has a lease."""
        place = self._places.pop(seq, None)
        if place is not None:
            _, told, by = place
            order = self._told if told else self._silent
            del order[bisect_left(order, (by, seq))]

    def longest(self) -> Sequence:
        """Who is likely to stay away longest: the others of its kind do not stay longer."""
        away = [(USUAL_ABSENCE + self.now - used, seq) for used, seq in self._silent[:1]]
        away += [(abs(returns - self.now), seq) for returns, seq in (*self._told[:1], *self._told[-1:])]
        return self._places[max(away)[1]][0]
