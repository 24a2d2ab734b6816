"""The audit finds every way in which books can be wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.kvstore.audit import Books, balance
from holdfast.kvstore.errors import LeakFound

GOOD = Books(
    blocks=5,
    free=[0],
    references={1: 2, 2: 1},
    fenced=[3],
    cached=[4],
    sealed=frozenset({2, 4}),
    in_flight=True,
)


def test_good_books_pass() -> None:
    balance(GOOD)
    balance(GOOD, {1: 2, 2: 1, 0: 0})


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"free": [0, 1]}, "in two states: 1"),
        ({"free": [0, 0]}, "in two states: 0"),
        ({"free": []}, "in no state: 0"),
        ({"free": [0, 5]}, "not of this pool: 5"),
        ({"references": {1: 0, 2: 1}}, "held without a reference: 1"),
        ({"sealed": frozenset({2})}, "cached without a key: 4"),
        ({"sealed": frozenset({0, 2, 4})}, "free with a key: 0"),
        ({"in_flight": False}, "fenced with no step in flight: 3"),
        ({"blocks": 40}, "in no state: 5, 6, 7, 8, 9, 10, 11, 12 and 27 more"),
    ],
)
def test_wrong_books_do_not(wrong: dict[str, object], complaint: str) -> None:
    with pytest.raises(LeakFound) as found:
        balance(replace(GOOD, **wrong))  # type: ignore[arg-type]
    assert str(found.value) == complaint


def test_all_complaints_are_listed() -> None:
    with pytest.raises(LeakFound, match=r"block 1 is held 2 times, 1 .*; block 3 is held 0 times, 1 "):
        balance(GOOD, {1: 1, 2: 1, 3: 1})
