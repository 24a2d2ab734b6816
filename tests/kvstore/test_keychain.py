"""Key chains that share a list against plain lists."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from holdfast.kvstore.keys import KeyChain

MOVES = st.lists(st.tuples(st.integers(0, 7), st.sampled_from(["grow", "cut", "fork"]), st.integers(0, 9)))


@given(MOVES)
def test_each_is_a_list_of_its_own(moves: list[tuple[int, str, int]]) -> None:
    chains, plains, made = [KeyChain()], [list[bytes]()], 0
    for which, what, number in moves:
        chain, plain = chains[which % len(chains)], plains[which % len(chains)]
        if what == "grow":
            keys = [bytes([made % 251, at]) for at in range(number)]
            made += 1
            chain.extend(keys)
            plain += keys
        elif what == "cut":
            chain.truncate(number)
            del plain[number:]
        else:
            chains.append(chain.copy(number))
            plains.append(plain[:number])
        assert [list(one) for one in chains] == plains
        assert [one[1:5] for one in chains] == [one[1:5] for one in plains]


def test_what_is_not_in_the_chain_cannot_be_asked_for() -> None:
    parent = KeyChain([b"a", b"b"])
    child = parent.copy(1)
    for index in (1, -2):
        with pytest.raises(IndexError):
            child[index]
