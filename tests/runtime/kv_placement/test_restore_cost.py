"""The choice between restoring and computing, against brute force and at its ends."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.runtime.kv_placement.costs import Costs, Restorable, blocks_to_compute

FAST = Costs(copy=10e9, fetch=2e9, latency=1e-3, token=1e-4, history=1e-8)
BLOCK = 16


def held(blocks: int, on_disk: int, first: int = 0, size: int = 200_000) -> Restorable:
    return Restorable(first, (False,) * (blocks - on_disk) + (True,) * on_disk, BLOCK, size)


def test_without_measured_costs_everything_is_restored() -> None:
    assert blocks_to_compute(held(64, 64), None) == 0
    assert blocks_to_compute(held(0, 0), FAST) == 0


def test_what_copies_faster_than_it_computes_is_restored() -> None:
    assert blocks_to_compute(held(256, 0), FAST) == 0


def test_what_computes_faster_than_it_copies_is_computed() -> None:
    assert blocks_to_compute(held(256, 0), replace(FAST, token=1e-9, history=0.0)) == 256


def test_a_slow_disk_is_met_by_computing_from_the_beginning() -> None:
    slow = replace(FAST, fetch=50e6)
    meet = blocks_to_compute(held(256, 256), slow)
    assert 0 < meet < 256
    computing = slow.computing(0, meet * BLOCK)
    fetching = slow.fetching((256 - meet) * 200_000)
    assert computing == pytest.approx(fetching, rel=0.05), "both end at once"


def test_a_long_history_is_restored_where_a_short_one_is_computed() -> None:
    costs = replace(
        FAST, copy=2e9, token=5e-5, history=5e-8
    )  # a block: 0.1 ms to copy, 0.8 ms or more to compute
    cheap = replace(costs, token=5e-6)
    assert blocks_to_compute(held(64, 0, first=0), cheap) > 0
    assert blocks_to_compute(held(64, 0, first=8192), cheap) == 0


positive = st.floats(1e-9, 1e-2)
rates = st.floats(1e6, 1e11)


@given(
    st.integers(0, 4096),
    st.lists(st.booleans(), max_size=40),
    st.builds(Costs, rates, rates, positive, positive, positive, st.booleans()),
)
def test_no_other_meeting_point_ends_sooner(first: int, on_disk: list[bool], costs: Costs) -> None:
    subject = Restorable(first, tuple(on_disk), BLOCK, 100_000)

    def seconds(count: int) -> float:
        computing = costs.computing(first, first + count * BLOCK)
        fetching = costs.fetching(100_000 * sum(on_disk[count:]))
        copying = costs.copying(100_000 * (len(on_disk) - count))
        return (max(computing, fetching) if costs.beside else computing + fetching) + copying

    chosen = blocks_to_compute(subject, costs)
    every = [seconds(count) for count in range(len(on_disk) + 1)]
    assert every[chosen] == min(every)
    assert chosen == every.index(min(every)), "of equals the one that computes least"
