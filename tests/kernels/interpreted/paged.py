"""Random ragged batches over a poisoned arena, for the kernels' tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from holdfast.kernels.batch import PagedBatch, lay_out

LAYERS = 2


def paged(
    rows: Sequence[tuple[int, int]],
    *,
    kv_heads: int = 2,
    dim: int = 64,
    block: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[torch.Tensor, PagedBatch]:
    """An arena with NaN in unused slots, and a batch of rows (first, count); K and V of all tokens stand.

    The rows' tables are lines of larger ones, in any order. All else in these names a block of NaN.
    """
    generator = np.random.default_rng(seed)
    widths = [-(-(first + count) // block) for first, count in rows]
    ids = generator.permutation(sum(widths) + 3).astype(np.int32)
    tables = np.split(ids[: sum(widths)], np.cumsum(widths)[:-1])
    arena = torch.full((len(ids), LAYERS, 2, kv_heads, block, dim), float("nan"), dtype=dtype)
    random = torch.Generator().manual_seed(seed)
    lines = generator.permutation(len(rows) + 2)[: len(rows)].astype(np.int32)
    every = np.full((len(rows) + 2, max(widths) + 9), ids[-1])
    for table, line, (first, count) in zip(tables, lines, rows, strict=True):
        every[line, : len(table)] = table
        for index, one in enumerate(table.tolist()):
            held = min(block, first + count - index * block)
            arena[one, :, :, :, :held] = torch.randn((LAYERS, 2, kv_heads, held, dim), generator=random).to(
                dtype
            )
    firsts, counts = [first for first, _ in rows], [count for _, count in rows]
    batch = lay_out(arena, firsts, counts, tables)
    return arena, replace(batch, tables=torch.from_numpy(every), lines=torch.from_numpy(lines))


def queries(batch: PagedBatch, arena: torch.Tensor, group: int, seed: int = 1) -> torch.Tensor:
    """Random queries for all tokens of ``batch``, ``group`` per KV head."""
    shape = (batch.positions.numel(), arena.shape[3] * group, arena.shape[5])
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(arena.dtype)
