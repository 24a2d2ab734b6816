"""Random KV arenas and batches for the kernels' parts, with blocks in random order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...kernels.batch import PagedBatch, lay_out

LAYERS = 2


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of a model's attention: query heads, KV heads, the dimension of a head, tokens of a block,
    element type."""

    query: int
    kv: int
    dim: int
    block: int = 16
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Paged:
    """A batch for an attention kernel. ``arena``: K and V of `LAYERS` layers, unless more are asked for,
    ``[blocks, layers, 2, kv_heads, block, dim]``. ``batch``: its rows and block tables. ``query``: ``[tokens,
    heads, dim]``."""

    arena: Tensor
    batch: PagedBatch
    query: Tensor


def paged(
    heads: Heads,
    firsts: Sequence[int],
    counts: Sequence[int],
    device: torch.device,
    layers: int = LAYERS,
) -> Paged:
    """Make a random batch, in which row r has ``counts[r]`` query tokens, the first at ``firsts[r]``."""
    widths = [-(-(first + count) // heads.block) for first, count in zip(firsts, counts, strict=True)]
    ids = np.random.default_rng(0).permutation(sum(widths)).astype(np.int32)
    tables = np.split(ids, np.cumsum(widths)[:-1])
    shape = (sum(widths), layers, 2, heads.kv, heads.block, heads.dim)
    torch.manual_seed(0)
    arena = torch.randn(shape, device=device, dtype=heads.dtype)
    query = torch.randn((sum(counts), heads.query, heads.dim), device=device, dtype=heads.dtype)
    return Paged(arena, lay_out(arena, firsts, counts, tables), query)


def contiguous(made: Paged, row: int, layer: int) -> tuple[Tensor, Tensor]:
    """The K and V of one row and layer as a dense cache holds them: each ``[1, kv_heads, tokens, dim]``."""
    length = int(made.batch.context_lengths[row])
    blocks = made.batch.tables[row, : -(-length // made.arena.shape[4])]
    whole = made.arena[blocks, layer].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
    return whole[0][None].contiguous(), whole[1][None].contiguous()
