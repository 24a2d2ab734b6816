"""The block table against a plain list."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from holdfast.kvstore.block_table import BlockTable

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=20)


class Tables(RuleBasedStateMachine):
    """A table and a list live the same life; old copies and views must not move with it."""

    @initialize(blocks=IDS)
    def begin(self, blocks: list[int]) -> None:
        self.table, self.plain = BlockTable(blocks), list(blocks)
        self.kept: list[tuple[BlockTable, list[int]]] = []

    @rule(block=st.integers(0, 2**31 - 1))
    def append(self, block: int) -> None:
        self.table.extend([block])
        self.plain.append(block)

    @rule(blocks=IDS)
    def extend(self, blocks: list[int]) -> None:
        self.table.extend(blocks)
        self.plain += blocks

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, len(self.plain)))
        assert self.table.truncate(length).tolist() == self.plain[length:]
        del self.plain[length:]

    @rule(data=st.data(), block=st.integers(0, 2**31 - 1))
    def replace(self, data: st.DataObject, block: int) -> None:
        if self.plain:
            at = data.draw(st.integers(0, len(self.plain) - 1))
            assert self.table.replace(at, block) == self.plain[at]
            self.plain[at] = block

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        length = data.draw(st.none() | st.integers(0, len(self.plain)))
        self.keep(self.table.copy(length), self.plain[:length])

    @rule()
    def live_on_as_a_copy(self) -> None:
        self.keep(self.table, list(self.plain))
        self.table = self.table.copy()

    def keep(self, table: BlockTable, plain: list[int]) -> None:
        self.kept = [*self.kept[-3:], (table, plain)]

    @invariant()
    def all_agree(self) -> None:
        for table, plain in [*self.kept, (self.table, self.plain)]:
            assert len(table) == len(plain)
            assert table.view.dtype == np.int32
            assert table.view.tolist() == plain
            assert [table[at] for at in range(len(table))] == plain


TestTables = Tables.TestCase
TestTables.settings = settings(stateful_step_count=30)


def test_a_view_is_read_only_and_not_a_copy() -> None:
    table = BlockTable([1, 2, 3])
    with pytest.raises(ValueError, match="read-only"):
        table.view[0] = 9
    assert np.shares_memory(table.view, table.view)
    table.extend([4])
    assert table.view[2:].tolist() == [3, 4]


def test_what_is_not_in_the_table_cannot_be_asked_for() -> None:
    table = BlockTable([1, 2, 3])
    table.truncate(1)
    with pytest.raises(IndexError):
        table[1]
    with pytest.raises(IndexError):
        table.replace(1, 7)
    with pytest.raises(AssertionError, match="cannot keep 2 of 1"):
        table.truncate(2)


def test_an_id_that_int32_cannot_hold_is_refused() -> None:
    with pytest.raises(OverflowError):
        BlockTable().extend([2**31])


def test_growing_copies_seldom() -> None:
    table = BlockTable()
    moved = 0
    for block in range(4096):
        before = table.view
        table.extend([block])
        moved += len(before) > 0 and not np.shares_memory(before, table.view)
    assert moved <= 12


@given(
    st.lists(st.tuples(st.sampled_from(["extend", "replace", "truncate", "take"]), IDS, st.integers(0, 30)))
)
def test_a_copy_that_takes_all_changes_is_the_table(acts: list[tuple[str, list[int], int]]) -> None:
    table, copy = BlockTable([1, 2, 3]), np.zeros(700, dtype=np.int32)
    for act, blocks, number in acts:
        if act == "extend":
            table.extend(blocks)
        elif act == "replace" and len(table):
            table.replace(number % len(table), len(blocks))
        elif act == "truncate":
            table.truncate(min(number, len(table)))
        if act == "take":
            first, ids = table.take_changes()
            copy[first : first + len(ids)] = ids
            assert copy[: len(table)].tolist() == table.view.tolist()
