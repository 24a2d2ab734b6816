"""The layout of a step: positions, slots, tables, and how rows are grouped."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.kernels.batch import gathers_of, lay_out

BLOCK = 4


def arena(blocks: int = 64) -> torch.Tensor:
    return torch.zeros(blocks, 2, 2, 3, BLOCK, 8)


def table(*blocks: int) -> np.ndarray:
    return np.array(blocks, dtype=np.int32)


def test_a_mix_of_rows() -> None:
    batch = lay_out(arena(), [5, 0, 11], [1, 3, 2], [table(9, 7, 33), table(2), table(5, 1, 6, 8)])
    assert batch.positions.tolist() == [5, 0, 1, 2, 11, 12]
    assert batch.slots.tolist() == [
        7 * BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 2 * BLOCK + 2, 6 * BLOCK + 3, 8 * BLOCK,
    ]  # fmt: skip
    assert batch.row_starts.tolist() == [0, 1, 4, 6]
    assert batch.context_lengths.tolist() == [6, 3, 13]
    assert batch.lines.tolist() == [0, 1, 2] and batch.tables.dtype == batch.lines.dtype == torch.int32
    assert batch.tables.tolist() == [[9, 7, 0, 0], [2, 0, 0, 0], [5, 1, 6, 8]]


def test_groups_cover_every_token_once() -> None:
    generator = np.random.default_rng(0)
    counts = [1, 5, 1, 1, 2, 1, 1]
    firsts = generator.integers(0, 100, len(counts)).tolist()
    tables = [generator.permutation(64)[:27].astype(np.int32) for _ in counts]
    batch = lay_out(arena(), firsts, counts, tables)
    covered = torch.cat([torch.arange(sum(counts))[group.tokens] for group in batch.groups])
    assert sorted(covered.tolist()) == list(range(sum(counts)))


def test_single_tokens_of_very_different_context_are_not_padded_together() -> None:
    tables = [np.arange(60, dtype=np.int32)] * 3
    batch = lay_out(arena(), [239, 2, 230], [1, 1, 1], tables)
    assert sorted(group.rows for group in batch.groups) == [1, 2]
    for group, gather in zip(batch.groups, gathers_of(batch, arena(), None, torch.float32), strict=True):
        spans = gather.mask.shape[-1] * group.rows * 2 * 3
        assert gather.blank.numel() < spans / 2 + 2 * 3 * BLOCK * group.rows


@pytest.mark.parametrize(
    ("window", "widths"), [(None, [60, 59]), (1, [1, 2]), (9, [3, 4]), (10**6, [60, 59])]
)
def test_blocks_before_the_window_are_not_gathered(window: int | None, widths: list[int]) -> None:
    tables = [np.arange(60, dtype=np.int32)] * 2
    batch = lay_out(arena(), [239, 231], [1, 5], tables)
    gathers = gathers_of(batch, arena(), window, torch.float32)
    assert [gather.tiles.numel() for gather in gathers] == [2 * 3 * width for width in widths]


def test_gathers_are_made_once_for_each_window_and_arena() -> None:
    batch, deeper = lay_out(arena(), [9], [1], [table(4, 7, 2)]), torch.zeros(64, 5, 2, 3, BLOCK, 8)
    first = gathers_of(batch, arena(), None, torch.float32)
    assert gathers_of(batch, arena(), None, torch.float32) is first
    assert gathers_of(batch, arena(), 4, torch.float32) is not first
    blocks = gathers_of(batch, deeper, None, torch.float32)[0].tiles.view(2, 3, 3)[0, 0] // (5 * 2 * 3)
    assert blocks.tolist() == [4, 7, 2]


def test_the_table_may_change_afterwards() -> None:
    mine = table(4, 5)
    batch = lay_out(arena(), [4], [2], [mine])
    mine[:] = 0
    assert batch.slots.tolist() == [5 * BLOCK, 5 * BLOCK + 1]


@pytest.mark.parametrize("rows", range(1, 6))
def test_every_array_of_a_layout_is_aligned(rows: int) -> None:
    batch = lay_out(arena(), [5] * rows, [1] * rows, [table(9, 7)] * rows)
    parts = (batch.positions, batch.slots, batch.row_starts, batch.context_lengths, batch.tables, batch.lines)
    assert [part.data_ptr() % 16 for part in parts] == [0] * 6
