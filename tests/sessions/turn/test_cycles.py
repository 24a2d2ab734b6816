"""Replies that repeat one cycle end at one token, however their tokens come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.sessions.turn.cycles import LONGEST, CycleFinder


def end_by_rule(ids: list[int], most: int, longest: int) -> int | None:
    """The rule as it is written: the number of tokens at which the reply ends."""
    for count in range(1, len(ids) + 1):
        for period in range(1, longest + 1):
            first = count - most
            if first >= period and all(ids[at] == ids[at - period] for at in range(first, count)):
                return count
    return None


def found_end(ids: list[int], most: int) -> int | None:
    finder = CycleFinder(most)
    return next((count for count in range(1, len(ids) + 1) if finder.ends(ids[:count])), None)


@given(
    st.lists(st.integers(0, 2), max_size=30),
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
    st.lists(st.integers(0, 2), max_size=8),
    st.lists(st.integers(0, 2), min_size=1, max_size=5),
    st.integers(4, 24),
)
def test_the_end_is_that_of_the_rule(
    before: list[int], cycle: list[int], between: list[int], other: list[int], most: int
) -> None:
    ids = [*before, *(cycle * 7), *between, *(other * 40)]
    assert found_end(ids, most) == end_by_rule(ids, most, max(1, most // 4))


@pytest.mark.parametrize("period", [1, 2, 3, 64, 127, 128])
@pytest.mark.parametrize("before", [0, 1, 255, 256, 257])
def test_512_repeated_tokens_are_an_end(period: int, before: int) -> None:
    ids = [*range(1000, 1000 + before), *list(range(period)) * 700]
    assert found_end(ids[: before + 2000], 512) == before + period + 512


def test_a_longer_cycle_and_a_shorter_repetition_are_none() -> None:
    assert found_end(list(range(LONGEST + 1)) * 8, 512) is None
    assert found_end([*[7] * 512, 8] * 3, 512) is None, "511 repeat the first"
    assert found_end([7] * 5000, 0) is None, "the rule is off"
