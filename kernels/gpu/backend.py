"""The GPU backend: `interface.Kernels` over the Triton kernels. Matrix products are torch's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..batch import PagedBatch
from ..batch import lay_out_ungrouped as lay_out
from ..interface import Attention, HeadNorm
from ..reference import backend
from ..reference import seeded_sampling as reference_sampling
from ..reference.backend import copy_pieces
from ..reference.seeded_sampling import Typical
from . import attention, ops, rowwise, seeded_sampling, store
from .penalties import allow, count, penalize
from .rows import look_up
from .seeded_sampling import log_probabilities
from .store import copy_blocks
from .support import check_supported

__all__ = [
    "add_norm",
    "allow",
    "by_slot",
    "check_supported",
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

by_slot = True


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, ``[tokens, in]`` to ``[tokens, out]``, by torch (the vendor's library)."""
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm, ``x / sqrt(mean(x ** 2) + eps) * weight``, over the last axis."""
    if weight.shape != x.shape[-1:]:
        return backend.rms_norm(x, weight, eps)
    return (ops.rms_norm if torch.compiler.is_compiling() else rowwise.rms_norm)(x, weight, eps)


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum ``x + residual`` and its RMSNorm, in this order, in new memory."""
    add = ops.add_norm if torch.compiler.is_compiling() else rowwise.add_norm
    return add(x, residual, weight, eps)


def gated(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """``activation(gate) * up`` of ``[tokens, 2 * width]``, gate first: ``[tokens, width]``. ``activation``:
    ``silu`` or ``gelu_tanh``."""
    return (ops.gated if torch.compiler.is_compiling() else rowwise.gated)(gate_up, activation)


def rotate_and_store(
    qkv: Tensor,
    norm: HeadNorm | None,
    angles: tuple[Tensor, Tensor],
    arena: Tensor,
    layer: int,
    slots: Tensor,
) -> Tensor:
    """Norm (if ``norm``) and rotate queries and keys, and store K and V in ``arena``; returns the queries,
    ``[tokens, q_heads, head_dim]``.

    ``qkv``: ``[tokens, q_heads + 2 * kv_heads, head_dim]``. ``angles``: cos and sin, each ``[tokens,
    rotary_dim]``. ``layer``: its index in ``arena``. ``slots``: int64 ``[tokens]``, ``block * block_tokens +
    offset``.
    """
    if not torch.compiler.is_compiling():
        return store.rotate_and_store(qkv, norm, angles, arena, layer, slots)
    weight, eps, whole = (None, 0.0, False) if norm is None else (norm.weight, norm.eps, norm.whole)
    queries: Tensor = ops.rotate_and_store(qkv, weight, eps, whole, *angles, arena, layer, slots)
    return queries


def paged_attention(query: Tensor, arena: Tensor, layer: int, batch: PagedBatch, how: Attention) -> Tensor:
    """Causal attention of each row's tokens over its own blocks: ``[tokens, q_heads, head_dim]``.

    Rows of one token go to the decode kernel, rows of several to the extend kernel; see
    `attention.paged_attention`.
    """
    if not torch.compiler.is_compiling():
        return attention.paged_attention(query, arena, layer, batch, how)
    result: Tensor = ops.paged_attention(query, arena, layer, *ops.flat(batch, how))
    return result


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    min_p: Tensor,
    typical: Typical | None = None,
) -> Tensor:
    """Sample one token id per row of ``logits`` ``[rows, vocab]``, int64 ``[rows]``: the same tokens as the
    reference, by launches that depend on the shape alone unless a row has ``typical`` sampling, which is the
    reference's.

    ``temperature`` (0: greedy), ``top_k`` (0: all), ``top_p`` (1: all), ``min_p`` (0: all), ``seeds``,
    ``positions`` (of the sampled token): ``[rows]``. ``typical``: the rows with typical sampling; None: no row.
    """
    limits = (logits, temperature, top_k, top_p, seeds, positions)
    if typical is not None:
        return reference_sampling.sample(*limits, min_p=min_p, typical=typical)
    return seeded_sampling.sample(*limits, min_p=min_p)
