"""A policy: the turn with the least work left comes first, and the one with the most gives way first.

Use it with ``EngineSettings(policy="holdfast.tests.runtime.scheduler.shortest_remaining:ShortestRemaining")``.
A stream of short turns can go before a long one without end, so this order promises no bound, and the scheduler
wraps it in `Aged`: a turn that has been open for ``patience`` steps comes before all younger ones. Written from
the scheduler's `README.md` and `policy.py` alone.
"""

from __future__ import annotations

from holdfast.runtime.order.policy import Policy
from holdfast.runtime.sequence import Sequence


def by_remaining(sequence: Sequence) -> tuple[int, tuple[int, int, int]]:
    """Sort key: turns by the tokens that they have still to compute or may still sample, the fewest first.

    Of turns with as many tokens the oldest comes first, so equal turns keep their age. ``age`` is unique,
    so the order is total.
    """
    return sequence.remaining, sequence.age


class ShortestRemaining(Policy):
    """Turns with the least work left come first. There is no state.

    Not ``steady``: a waiting turn that loses its blocks has its KV to compute again, so the order of two
    waiting turns can change. No ``bound``: a younger turn with less work left always goes before an older one.
    """

    steady = False

    def order(self, turns: list[Sequence], step: int) -> list[Sequence]:
        """The turns by work left, the least first, as a new list.

        The order of `rows` too, by default: the running turn with the most work left is preempted first. Losing
        its KV makes it longer still, so it does not come back at once before the turn that it gave way to.
        """
        return sorted(turns, key=by_remaining)
