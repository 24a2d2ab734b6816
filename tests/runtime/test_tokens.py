"""Token lists: growth, slices that are copies, checks of ids that arrive from outside."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from holdfast.runtime.errors import LengthInvalid
from holdfast.runtime.tokens import TokenList, checked_tokens

IDS = st.lists(st.integers(0, 99), max_size=40)


@given(st.lists(st.tuples(IDS, st.integers(0, 60))))
def test_it_is_a_list(moves: list[tuple[list[int], int]]) -> None:
    tokens, plain = TokenList(), list[int]()
    for new, kept in moves:
        tokens.extend(checked_tokens(new, 100))
        tokens.extend([7])
        plain += [*new, 7]
        assert tokens.span(0, len(tokens)).tolist() == plain
        twin = tokens.copy(kept)
        assert twin.span(0, len(twin)).tolist() == plain[:kept]
        tokens.truncate(min(kept, len(plain)))
        del plain[kept:]


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(["append", "extend", "cut", "fork"]), st.integers(0, 9))
    )
)
def test_copies_share_and_do_not_disturb_each_other(moves: list[tuple[int, str, int]]) -> None:
    lists, plains, next_id = [TokenList()], [list[int]()], 0
    for which, what, number in moves:
        tokens, plain = lists[which % len(lists)], plains[which % len(lists)]
        new = list(range(next_id, next_id + (1 if what == "append" else number)))
        if what == "append":
            tokens.extend([next_id])
            plain += new
        elif what == "extend":
            tokens.extend(np.array(new, dtype=np.int32))
            plain += new
        elif what == "cut":
            tokens.truncate(min(number, len(plain)))
            del plain[number:]
        else:
            lists.append(tokens.copy(number))
            plains.append(plain[:number])
        next_id += number
        assert [one.view(len(one)).tolist() for one in lists] == plains


def test_a_fork_copies_no_id_and_the_parent_goes_on_in_place() -> None:
    parent = TokenList(np.arange(100, dtype=np.int32))
    parent.extend([7])
    child = parent.copy(101)
    parent.extend([8])
    assert np.shares_memory(parent.view(102), child.view(101))
    child.extend([9])
    assert not np.shares_memory(parent.view(102), child.view(102))


def test_a_span_is_a_copy() -> None:
    tokens = TokenList([1, 2, 3])
    span = tokens.span(0, 2)
    tokens.truncate(0)
    tokens.extend([9])
    assert span.tolist() == [1, 2] and span.dtype == np.int64


@pytest.mark.parametrize("ids", [[-1], [100], [0, 1 << 40], [1 << 70], [1.5, "x"]])
def test_ids_outside_the_vocabulary(ids: list[int]) -> None:
    with pytest.raises(LengthInvalid, match="token id"):
        checked_tokens(ids, 100)
