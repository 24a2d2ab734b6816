"""Counts of references against a plain dict."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given

from holdfast.kvstore.errors import BlockMisused
from holdfast.kvstore.pool import References, as_array

BLOCKS = 8
TAKEN = st.lists(st.tuples(st.lists(st.integers(0, BLOCKS - 1), unique=True), st.integers(1, 3)))


@given(TAKEN)
def test_they_count_as_a_dict_does(taken: list[tuple[list[int], int]]) -> None:
    references, plain = References(BLOCKS), Counter[int]()
    for blocks, times in taken:
        assert references.take(as_array(blocks), times) == [block for block in blocks if not plain[block]]
        plain.update(dict.fromkeys(blocks, times))
        assert references.counts() == plain
    while plain:
        blocks = list(plain)
        last = [block for block in reversed(blocks) if plain[block] == 1]
        assert references.give(as_array(blocks)) == last
        plain = +(plain - Counter(blocks))
        assert references.counts() == plain


def test_blocks_of_another_pool_are_not_held() -> None:
    references = References(BLOCKS)
    references.take(as_array([BLOCKS - 1]))
    assert BLOCKS - 1 in references and -1 not in references and BLOCKS not in references
    for strange in (-1, BLOCKS):
        with pytest.raises(BlockMisused, match=f"block {strange} is not of this pool"):
            references.each(as_array([BLOCKS - 1, strange]))


@given(st.lists(st.integers(0, BLOCKS - 1)))
def test_what_is_named_twice_is_found(blocks: list[int]) -> None:
    twice = References(BLOCKS).first_twice(as_array(blocks))
    assert (twice is None) == (len(set(blocks)) == len(blocks))
    assert twice is None or blocks.count(twice) > 1
