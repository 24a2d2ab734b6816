"""Keys by priority, against a search over all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.kvstore.priorities import Priorities

MOVES = st.lists(st.tuples(st.integers(0, 9), st.one_of(st.none(), st.integers(0, 5))), max_size=300)


@given(MOVES)
def test_the_first_is_the_smallest_and_all_come_in_order(moves: list[tuple[int, int | None]]) -> None:
    keys, shadow = Priorities[int](), dict[int, int]()
    for key, priority in moves:
        if priority is None:
            assert keys.discard(key) is (shadow.pop(key, None) is not None)
        else:
            keys.put(key, priority)
            shadow[key] = priority
        expected = sorted(shadow, key=lambda one: (shadow[one], one))
        assert list(keys) == expected and keys.first == next(iter(expected), None)
        assert len(keys) == len(shadow) and all((one in keys) == (one in shadow) for one in range(10))
        assert all(keys[one] == shadow[one] for one in shadow)
