"""The block table against a plain list."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from holdfast.kvstore.block_table import NO_BLOCK, BlockTable

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=20)


class Tables(RuleBasedStateMachine):
    """A table and a list of the groups' ids by block live the same life; old copies and views must not move
    with it."""

    @initialize(groups=st.integers(1, 3), blocks=IDS)
    def begin(self, groups: int, blocks: list[int]) -> None:
        self.groups = groups
        self.table = BlockTable(groups=groups)
        self.plain: list[list[int]] = []
        self.kept: list[tuple[BlockTable, list[list[int]]]] = []
        self.extend(blocks)

    def rows(self, blocks: list[int]) -> list[list[int]]:
        return [blocks[at : at + self.groups] for at in range(0, len(blocks) - self.groups + 1, self.groups)]

    @rule(blocks=IDS)
    def extend(self, blocks: list[int]) -> None:
        rows = self.rows(blocks)
        self.table.extend([block for row in rows for block in row])
        self.plain += rows

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, len(self.plain)))
        gone = [block for row in self.plain[length:] for block in row if block != NO_BLOCK]
        assert self.table.truncate(length).tolist() == gone
        del self.plain[length:]

    @rule(data=st.data(), block=st.integers(0, 2**31 - 1))
    def replace(self, data: st.DataObject, block: int) -> None:
        if self.plain:
            at = data.draw(st.integers(0, len(self.plain) - 1))
            group = data.draw(st.integers(0, self.groups - 1))
            assert self.table.replace(at, block, group) == self.plain[at][group]
            self.plain[at][group] = block

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        group, end = (
            data.draw(st.integers(0, self.groups - 1)),
            data.draw(st.integers(0, len(self.plain) + 3)),
        )
        there = [(at, row[group]) for at, row in enumerate(self.plain[:end]) if row[group] != NO_BLOCK]
        indexes, blocks = self.table.give_back(group, end)
        assert list(zip(indexes.tolist(), blocks.tolist(), strict=True)) == there
        for at, _ in there:
            self.plain[at][group] = NO_BLOCK

    @rule(data=st.data(), block=st.integers(0, 2**31 - 1))
    def put(self, data: st.DataObject, block: int) -> None:
        at, group = data.draw(st.integers(0, len(self.plain) + 2)), data.draw(st.integers(0, self.groups - 1))
        if at >= len(self.plain) or self.plain[at][group] == NO_BLOCK:
            self.table.put([at], [group], [block])
            self.plain += ([NO_BLOCK] * self.groups for _ in range(at + 1 - len(self.plain)))
            self.plain[at][group] = block

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        length = data.draw(st.none() | st.integers(0, len(self.plain)))
        self.keep(self.table.copy(length), self.plain[:length])

    @rule()
    def live_on_as_a_copy(self) -> None:
        self.keep(self.table, self.plain)
        self.table = self.table.copy()

    def keep(self, table: BlockTable, plain: list[list[int]]) -> None:
        self.kept = [*self.kept[-3:], (table, [[*row] for row in plain])]

    @invariant()
    def all_agree(self) -> None:
        for table, plain in [*self.kept, (self.table, self.plain)]:
            held = [block for row in plain for block in row if block != NO_BLOCK]
            assert len(table) == len(plain) and table.blocks == len(held)
            assert table.view.dtype == np.int32
            assert table.view.tolist() == plain and table.held.tolist() == held


TestTables = Tables.TestCase
TestTables.settings = settings(stateful_step_count=30)


def test_a_view_is_read_only_and_not_a_copy() -> None:
    table = BlockTable([1, 2, 3])
    with pytest.raises(ValueError, match="read-only"):
        table.view[0] = 9
    assert np.shares_memory(table.view, table.view)
    table.extend([4])
    assert table.view[2:].tolist() == [[3], [4]]


def test_a_block_that_is_there_is_not_overwritten() -> None:
    with pytest.raises(AssertionError, match="a block is there"):
        BlockTable([1, 2], groups=2).put([0], [1], [7])


def test_what_is_not_in_the_table_cannot_be_asked_for() -> None:
    table = BlockTable([1, 2, 3])
    table.truncate(1)
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


ACTS = ("extend", "replace", "truncate", "give back", "put", "take")


@given(st.lists(st.tuples(st.sampled_from(ACTS), IDS, st.integers(0, 30))))
def test_a_copy_that_takes_all_changes_has_what_the_table_has(acts: list[tuple[str, list[int], int]]) -> None:
    table, copy = BlockTable([1, 2, 3, 4], groups=2), np.zeros((900, 2), dtype=np.int32)
    for act, blocks, number in acts:
        if act == "extend":
            table.extend(blocks[: len(blocks) // 2 * 2])
        elif act == "replace" and len(table):
            table.replace(number % len(table), len(blocks), number % 2)
        elif act == "truncate":
            table.truncate(min(number, len(table)))
        elif act == "give back":
            table.give_back(1, number)
        elif act == "put" and (number >= len(table) or table.view[number, 1] == NO_BLOCK):
            table.put([number], [1], [len(blocks)])
        if act == "take":
            for group, index, block in table.take_changes():
                copy[index, group] = block
            there = table.view != NO_BLOCK
            assert (copy[: len(table)][there] == table.view[there]).all()
