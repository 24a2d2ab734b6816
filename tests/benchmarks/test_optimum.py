"""The offline optimum against every schedule there is, on traces small enough to try them all."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from holdfast.benchmarks.harness.agents import SHARED, Scale, TraceTurn
from holdfast.benchmarks.harness.optimum import knowing_odds, optimum

SCALE = Scale(tokens=SHARED)  # of the shared prompt one token is left


def small(seed: int) -> list[TraceTurn]:
    rng = Random(seed)
    lengths, trace = dict[int, int](), list[TraceTurn]()
    for at in range(8):
        session = rng.randrange(3)
        turn = TraceTurn(
            float(at), session, lengths.get(session, 0), rng.randint(1, 2), rng.randint(1, 2), False
        )
        lengths[session] = turn.after(SCALE)
        trace.append(turn)
    return trace


def by_trying(trace: list[TraceTurn], capacity: int, *, runs: bool) -> int:
    """The least prefilled again, blocks of one token: by what may be kept after each turn."""
    room = capacity - 1
    costs = {(0, 0, 0): 0}
    for turn in trace:
        length, after = max(0, turn.before - 2), turn.after(SCALE) - 2  # the token said last has no KV
        later: dict[tuple[int, ...], int] = {}
        for kept, cost in costs.items():
            again = cost + (max(0, length - kept[turn.session]) if turn.before else 0)
            most = [*kept]
            most[turn.session] = after
            for now in product(*(range(one + 1) for one in most)):
                others = sum(now) - now[turn.session]
                if sum(now) <= room and not (runs and others and others + after > room):
                    later[now] = min(again, later.get(now, again))
        costs = later
    return min(costs.values())


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_no_schedule_prefills_less(seed: int, runs: bool) -> None:
    trace = small(seed)
    for capacity in (9, 13):
        least = optimum(trace, SCALE, 1, capacity, runs=runs)
        assert least == by_trying(trace, capacity, runs=runs)
        assert least <= knowing_odds(trace, SCALE, 1, capacity, runs=runs)
