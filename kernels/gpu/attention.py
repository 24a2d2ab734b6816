"""Attention of a whole batch: rows of one token by the decode kernel, rows of several by the extend kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from ..batch import PagedBatch
from ..interface import Attention
from .decode import decode_attention
from .extend import extend_attention


def paged_attention(
    query: Tensor, arena: Tensor, layer: int, batch: PagedBatch, how: Attention, sinks: Tensor | None = None
) -> Tensor:
    """Causal attention of each row's tokens over its own blocks; ``query`` and the result are ``[tokens,
    q_heads, head_dim]``. ``sinks``: ``[q_heads]``, one more score per head, without a value (Xiao et al.,
    2023); None: none.

    In a batch of as many tokens as rows each row must have one. What is launched depends only on the numbers of
    tokens and rows and on the device, so that a captured launch holds for any lengths, tables and lines. Tokens
    of no row (from ``row_starts[rows]`` on), as padding, get no result.
    """
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    decode_attention(query, arena, layer, batch, how, sinks, out)
    if query.shape[0] != batch.context_lengths.shape[0]:
        extend_attention(query, arena, layer, batch, how, sinks, out)
    return out
