"""Attention as the GPU kernels must compute it beyond what `backend` does: with attention sinks, in any
precision.

Row by row and dense; for tests and measurements only.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ..batch import PagedBatch
from ..interface import Attention


def extend_attention(
    query: Tensor,
    arena: Tensor,
    layer: int,
    batch: PagedBatch,
    how: Attention,
    sinks: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Causal attention of a ragged batch: ``[tokens, q_heads, head_dim]``, computed and returned in
    ``dtype``.

    ``query``: the same shape. ``sinks``: ``[q_heads]``, one more score per head, without a value (Xiao et
    al., "Efficient streaming language models with attention sinks", 2023, as trained in gpt-oss).
    """
    result = torch.empty(query.shape, dtype=dtype, device=query.device)
    starts = batch.row_starts.tolist()
    for row, (start, end) in enumerate(pairwise(starts)):
        length = int(batch.context_lengths[row])
        table = batch.tables[batch.lines[row]]
        keys, values = (_row(arena, layer, side, table, length).to(dtype) for side in (0, 1))
        result[start:end] = attend(
            query[start:end].to(dtype), keys, values, batch.positions[start:end], how, sinks
        )
    return result


def _row(arena: Tensor, layer: int, side: int, table: Tensor, length: int) -> Tensor:
    """K (``side`` 0) or V (1) of one row's first ``length`` tokens in one layer, ``[length, kv_heads, dim]``.
    ``table``: the row's block ids."""
    blocks = table[: -(-length // arena.shape[4])]
    return arena[blocks, layer, side].transpose(1, 2).flatten(0, 1)[:length]


def attend(
    query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, how: Attention, sinks: Tensor | None
) -> Tensor:
    """Causal attention of queries ``[n, q_heads, dim]`` at ``positions`` ``[n]`` over ``keys`` and ``values``
    ``[tokens, kv_heads, dim]``, of positions 0, 1, …; returns ``[n, q_heads, dim]``. ``sinks``:
    ``[q_heads]``, one more score per head, without a value; None: none."""
    group = query.shape[1] // keys.shape[1]
    scores = torch.einsum("nhd,thd->hnt", query, keys.repeat_interleave(group, 1)) * how.scale
    if how.soft_cap is not None:
        scores = how.soft_cap * torch.tanh(scores / how.soft_cap)
    at, to = positions[:, None], torch.arange(keys.shape[0], device=keys.device)
    seen = to <= at
    if how.window is not None:
        seen &= to > at - how.window
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        extra = sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, extra), dim=-1)
    shares = scores.softmax(-1)[..., : keys.shape[0]]
    return torch.einsum("hnt,thd->nhd", shares, values.repeat_interleave(group, 1))
