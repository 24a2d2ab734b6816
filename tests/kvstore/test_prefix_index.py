"""The prefix index: first wins, both ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.kvstore.prefix_index import PrefixIndex

KEYS = [bytes([at]) for at in range(6)]


def filled(*held: int) -> PrefixIndex:
    index = PrefixIndex(128)
    for at in held:
        assert index.add(KEYS[at], 100 + at)
    return index


def test_the_first_block_of_a_key_stays() -> None:
    index = filled(0)
    assert not index.add(KEYS[0], 7)
    assert index.here.get(KEYS[0]) == 100
    assert not index.holds(7)
    with pytest.raises(AssertionError, match="block 100 has a key already"):
        index.add(KEYS[1], 100)


def test_a_dropped_key_can_name_another_block() -> None:
    index = filled(0, 1)
    index.drop([100, 999])
    assert index.here.get(KEYS[0]) is None
    assert index.key_of(100) is None
    assert index.add(KEYS[0], 7)
    assert index.here == {KEYS[0]: 7, KEYS[1]: 101}
    assert len(index) == 2


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 5)), max_size=40))
def test_both_ways_agree_with_a_dict(moves: list[tuple[bool, int, int]]) -> None:
    index, shadow = PrefixIndex(6), dict[bytes, int]()
    for adding, key, block in moves:
        if adding and block not in shadow.values():
            assert index.add(KEYS[key], block) is (KEYS[key] not in shadow)
            shadow.setdefault(KEYS[key], block)
        elif not adding:
            index.drop([block])
            shadow = {name: held for name, held in shadow.items() if held != block}
        assert {name: index.here.get(name) for name in KEYS} == {name: shadow.get(name) for name in KEYS}
        assert {name: index.key_of(held) for name, held in shadow.items()} == {name: name for name in shadow}
        assert {*index.here.values()} == set(shadow.values())
