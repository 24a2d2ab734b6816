"""The batch-invariant GPU backend: a token's numbers depend on its own sequence only.

They do not depend on the rest of the batch, on how a prompt was cut into chunks, or on whether a token was
computed again. So greedy outputs are equal on every path, in any type. It is slower than `backend` and shares
its row-wise operations: norms, rotation, activation, sampling.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..batch import PagedBatch
from ..batch import lay_out_ungrouped as lay_out
from ..interface import Attention
from ..reference.backend import copy_pieces
from . import invariant_kernels, ops
from .backend import (
    add_norm,
    allow,
    by_slot,
    count,
    gated,
    log_probabilities,
    look_up,
    penalize,
    rms_norm,
    rotate_and_store,
    sample,
)
from .invariant_kernels import extend_attention
from .store import copy_blocks

__all__ = [
    "add_norm",
    "allow",
    "by_slot",
    "copy_blocks",
    "copy_pieces",
    "count",
    "gated",
    "lay_out",
    "linear",
    "log_probabilities",
    "look_up",
    "paged_attention",
    "penalize",
    "rms_norm",
    "rotate_and_store",
    "sample",
]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, with each row's sums in one order, whatever the number of rows."""
    return (ops.invariant_linear if torch.compiler.is_compiling() else invariant_kernels.linear)(
        x, weight, bias
    )


def paged_attention(query: Tensor, arena: Tensor, layer: int, batch: PagedBatch, how: Attention) -> Tensor:
    """Causal attention of each row's tokens over its own blocks, with the same bits in any batch: ``[tokens,
    q_heads, head_dim]``."""
    if not torch.compiler.is_compiling():
        return extend_attention(query, arena, layer, batch, how)
    result: Tensor = ops.invariant_attention(query, arena, layer, *ops.flat(batch, how))
    return result
