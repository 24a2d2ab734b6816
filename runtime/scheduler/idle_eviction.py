"""Idle sequences that may hold blocks without a lease, in the order in which they lose them.

The sequence that is likely to stay away longest goes first. A sequence that has said when it returns is away
until then; one that is overdue by t seconds is assumed to need another t. A sequence that has said nothing is
assumed to stay away for `USUAL_ABSENCE`, and as long again as it has been away already. So among these the
longest unused goes first, and where no sequence says anything that is the whole order. Knows no leases.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from ..sequence import Sequence

USUAL_ABSENCE = 120.0
"""How many seconds a sequence that says nothing is assumed to stay away: pauses of people have medians of 85
to 123 in the traces we know."""


class IdleEviction:
    """The order in which idle sequences lose their KV: the one that is likely to stay away longest goes
    first. One that has said when it returns is away until then, or, t seconds late, for another t; any other
    for `USUAL_ABSENCE`, and as long again as it has been away. All times are seconds by the clock of
    ``Sequence.used`` and ``Sequence.returns``."""

    def __init__(self) -> None:
        # By id: the sequence, whether its return is known, and the time it is ordered by.
        self._places: dict[int, tuple[Sequence, bool, float]] = {}
        self._unknown: list[tuple[float, int]] = []  # by time of last use, the longest unused first
        self._expected: list[tuple[float, int]] = []  # by time of return, the soonest first

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, seq: int) -> bool:
        return seq in self._places

    def __iter__(self) -> Iterator[Sequence]:
        """All sequences here, in no particular order. None may be put in or taken out meanwhile."""
        return (sequence for sequence, _, _ in self._places.values())

    @property
    def expected(self) -> int:
        """How many of the sequences here have said when they return."""
        return len(self._expected)

    def put(self, sequence: Sequence) -> None:
        """Insert an idle sequence. Its place follows from the time at which it is expected back (``returns``),
        or if that is not known, from its last use (``used``). If it is here already, it moves to its new
        place."""
        self.discard(sequence.id)
        expected = sequence.returns is not None
        time = sequence.used if sequence.returns is None else sequence.returns
        self._places[sequence.id] = sequence, expected, time
        insort(self._expected if expected else self._unknown, (time, sequence.id))

    def discard(self, seq: int) -> None:
        """Remove the sequence with the id ``seq``, if it is here: it holds no blocks, is not idle, or has a
        lease."""
        place = self._places.pop(seq, None)
        if place is not None:
            _, expected, time = place
            order = self._expected if expected else self._unknown
            del order[bisect_left(order, (time, seq))]

    def longest(self, now: float) -> Sequence:
        """The sequence that is likely to stay away longest from ``now`` on; there must be one."""
        away = [(USUAL_ABSENCE + now - used, seq) for used, seq in self._unknown[:1]]
        away += [(abs(returns - now), seq) for returns, seq in (*self._expected[:1], *self._expected[-1:])]
        return self._places[max(away)[1]][0]
