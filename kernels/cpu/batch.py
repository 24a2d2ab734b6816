"""A step's layout for the CPU backend, with the rows sorted for attention: rows of one token, and rows of
several (chunks)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..batch import Numbers, PagedBatch, Tables, padded_tables
from ..device import Device

CHUNK_VECTORS = 256
"""A chunk (a row of several tokens) is attended to in pieces. One piece has at most this many query vectors:
tokens times the query heads that share a KV head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuBatch(PagedBatch):
    """A step's layout, with the rows sorted for attention. ``singles``: int64 ``[n]``, the indices of the
    rows with one token. ``chunks``: int64 ``[m]``, those of the other rows. ``longest``: the most tokens in
    the context of a row with one token, 0 without such a row. ``most``: the most tokens that any row
    computes."""

    singles: NDArray[np.int64]
    chunks: NDArray[np.int64]
    longest: int
    most: int


def lay_out(
    arena: Tensor,
    firsts: Numbers,
    counts: Numbers,
    tables: Tables,
    device: Device | None = None,
) -> CpuBatch:
    """Lay out a step's rows for attention. Row r computes ``counts[r]`` tokens from position ``firsts[r]``
    on; ``tables[r]`` has its block ids; ``arena`` gives the block size. Nothing is uploaded.

    Unlike `kernels.batch.lay_out` it makes no ``groups``, which only the reference reads, but sorts the rows
    into those of one token and those of several.
    """
    block_tokens = arena.shape[4]
    if len(counts) == 1:
        return _one(block_tokens, int(firsts[0]), int(counts[0]), tables[0])
    first, count = np.array(firsts, np.int64), np.array(counts, np.int64)
    context = first + count
    starts = np.zeros(len(count) + 1, np.int64)
    count.cumsum(out=starts[1:])
    padded = padded_tables(tables, -(-context // block_tokens))
    if len(count) == starts[-1]:
        rows, positions = np.arange(len(count)), first
    else:
        rows = np.repeat(np.arange(len(count)), count)
        positions = np.arange(starts[-1]) - (starts[:-1] - first)[rows]
    slots = padded[rows, positions // block_tokens] * block_tokens + positions % block_tokens
    single = count == 1
    at, to, row_starts, lengths, blocks = map(torch.from_numpy, (positions, slots, starts, context, padded))
    return CpuBatch(
        at,
        to,
        row_starts,
        lengths,
        blocks,
        torch.arange(len(count), dtype=torch.int32),
        groups=(),
        singles=np.flatnonzero(single),
        chunks=np.flatnonzero(~single),
        longest=int(context[single].max(initial=0)),
        most=int(count.max(initial=0)),
    )


_ZERO, _NONE = np.zeros(1, np.int64), np.zeros(0, np.int64)
_LINE = torch.zeros(1, dtype=torch.int32)


def _one(block_tokens: int, first: int, count: int, table: NDArray[np.int32]) -> CpuBatch:
    """What `lay_out` returns for a step of one row, the most common case, made with fewer operations. The row
    computes ``count`` tokens from position ``first`` on; ``table`` has its block ids."""
    context = first + count
    own = table[: -(-context // block_tokens)].astype(np.int64)
    positions = np.arange(first, context)
    slots = own[positions // block_tokens] * block_tokens + positions % block_tokens
    starts, lengths = torch.tensor((0, count)), torch.tensor((context,))
    return CpuBatch(
        torch.from_numpy(positions),
        torch.from_numpy(slots),
        starts,
        lengths,
        torch.from_numpy(own[None]),
        _LINE,
        groups=(),
        singles=_ZERO if count == 1 else _NONE,
        chunks=_NONE if count == 1 else _ZERO,
        longest=context if count == 1 else 0,
        most=count,
    )
