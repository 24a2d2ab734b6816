"""The choice between restoring and computing, against brute force and at its ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.runtime.kv_placement.costs import Costs

FAST = Costs(copy=10e9, fetch=2e9, latency=1e-3, token=1e-4, history=1e-8)
BLOCK = 16


def chosen(costs: Costs, blocks: int, on_disk: int, first: int = 0) -> int:
    below = [0] * (blocks - on_disk) + [1] * on_disk
    return costs.blocks_to_compute(first, below, [1] * blocks, BLOCK, 200_000, beside=True)


def test_where_nothing_can_be_restored_nothing_is_computed_in_its_place() -> None:
    assert chosen(FAST, 0, 0) == 0


def test_what_copies_faster_than_it_computes_is_restored() -> None:
    assert chosen(FAST, 256, 0) == 0


def test_what_computes_faster_than_it_copies_is_computed() -> None:
    assert chosen(replace(FAST, token=1e-9, history=0.0), 256, 0) == 256


def test_a_slow_disk_is_met_by_computing_from_the_beginning() -> None:
    slow = replace(FAST, fetch=50e6)
    meet = chosen(slow, 256, 256)
    assert 0 < meet < 256
    computing = slow.computing(0, meet * BLOCK)
    fetching = slow.fetching((256 - meet) * 200_000)
    assert computing == pytest.approx(fetching, rel=0.05), "both end at once"


def test_a_long_history_is_restored_where_a_short_one_is_computed() -> None:
    costs = replace(
        FAST, copy=2e9, token=5e-5, history=5e-8
    )  # a block: 0.1 ms to copy, 0.8 ms or more to compute
    cheap = replace(costs, token=5e-6)
    assert chosen(cheap, 64, 0, first=0) > 0
    assert chosen(cheap, 64, 0, first=8192) == 0


positive = st.floats(1e-9, 1e-2)
rates = st.floats(1e6, 1e11)


@given(
    st.integers(0, 4096),
    st.lists(st.booleans(), max_size=40),
    st.builds(Costs, copy=rates, fetch=rates, latency=positive, token=positive, history=positive),
    st.booleans(),
    st.sampled_from((1, 2, 4)),
)
def test_no_other_meeting_point_ends_sooner(
    first: int, on_disk: list[bool], costs: Costs, beside: bool, groups: int
) -> None:
    def seconds(count: int) -> float:
        computing = costs.computing(first, first + count * BLOCK)
        fetching = costs.fetching(100_000 * sum(on_disk[count:]))
        copying = 100_000 * (len(on_disk) - count) / costs.copy
        return (max(computing, fetching) if beside else computing + fetching) + copying

    below, missing = [groups * there for there in on_disk], [groups] * len(on_disk)
    count = costs.blocks_to_compute(first, below, missing, BLOCK, 100_000 // groups, beside=beside)
    every = [seconds(each) for each in range(len(on_disk) + 1)]
    assert every[count] == min(every)
    assert count == every.index(min(every)), "of equals the one that computes least"
