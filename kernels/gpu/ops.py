"""The kernels as torch operators, with their output shapes and the tensors that they write.

``torch.compile`` and graph capture see each as one node. Eager code calls the functions directly, which costs
the host less.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from ..batch import PagedBatch
from ..interface import Attention, HeadNorm
from . import attention, invariant_kernels, rowwise, store

Flat: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float, int | None, float | None]
"""The last arguments of the attention operators: a batch's positions, row_starts, context_lengths, tables and
lines; the scale, window and soft cap of attention."""


def flat(batch: PagedBatch, how: Attention) -> Flat:
    """The last arguments of the attention operators: the batch's positions, row_starts, context_lengths,
    tables and lines; the scale, window and soft cap of ``how``. They are single values because operator
    schemas allow no classes."""
    tensors = (batch.positions, batch.row_starts, batch.context_lengths, batch.tables, batch.lines)
    return *tensors, how.scale, how.window, how.soft_cap


@torch.library.custom_op("holdfast::paged_attention", mutates_args=())
def paged_attention(
    query: Tensor,
    arena: Tensor,
    layer: int,
    positions: Tensor,
    row_starts: Tensor,
    context_lengths: Tensor,
    tables: Tensor,
    lines: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Tensor:
    """Attention of a ragged batch, by `attention.paged_attention`; ``query`` and the result are ``[tokens,
    q_heads, head_dim]``. ``positions`` to ``lines`` are those of a `PagedBatch`; the last three are those of
    `Attention`."""
    batch = PagedBatch(positions, positions, row_starts, context_lengths, tables, lines, ())
    return attention.paged_attention(query, arena, layer, batch, Attention(scale, window, soft_cap))


@torch.library.custom_op("holdfast::invariant_attention", mutates_args=())
def invariant_attention(
    query: Tensor,
    arena: Tensor,
    layer: int,
    positions: Tensor,
    row_starts: Tensor,
    context_lengths: Tensor,
    tables: Tensor,
    lines: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Tensor:
    """Batch-invariant attention of a ragged batch, by `invariant_kernels.extend_attention`; ``query`` and the
    result are ``[tokens, q_heads, head_dim]``. ``positions`` to ``lines`` are those of a `PagedBatch`; the
    last three are those of `Attention`."""
    batch = PagedBatch(positions, positions, row_starts, context_lengths, tables, lines, ())
    return invariant_kernels.extend_attention(query, arena, layer, batch, Attention(scale, window, soft_cap))


@torch.library.custom_op("holdfast::rotate_and_store", mutates_args=("arena",))
def rotate_and_store(
    qkv: Tensor,
    weight: Tensor | None,
    eps: float,
    whole: bool,
    cos: Tensor,
    sin: Tensor,
    arena: Tensor,
    layer: int,
    slots: Tensor,
) -> Tensor:
    """Norm and rotate queries and keys, store K and V in ``arena``; returns the queries. ``weight`` (None: no
    norm), ``eps`` and ``whole`` are those of a `HeadNorm`."""
    norm = None if weight is None else HeadNorm(weight, eps, whole)
    return store.rotate_and_store(qkv, norm, (cos, sin), arena, layer, slots)


invariant_linear = torch.library.custom_op(
    "holdfast::invariant_linear", invariant_kernels.linear, mutates_args=()
)
rms_norm = torch.library.custom_op("holdfast::rms_norm", rowwise.rms_norm, mutates_args=())
add_norm = torch.library.custom_op("holdfast::add_norm", rowwise.add_norm, mutates_args=())
gated = torch.library.custom_op("holdfast::gated", rowwise.gated, mutates_args=())


@paged_attention.register_fake
@invariant_attention.register_fake
def _(query: Tensor, *others: object) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@invariant_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@rotate_and_store.register_fake
def _(
    qkv: Tensor, weight: Tensor | None, eps: float, whole: bool, cos: Tensor, sin: Tensor, arena: Tensor,
    *others: object,
) -> Tensor:  # fmt: skip
    tokens, heads, dim = qkv.shape
    return qkv.new_empty((tokens, heads - 2 * arena.shape[3], dim))


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


@add_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@gated.register_fake
def _(gate_up: Tensor, activation: str = "silu") -> Tensor:
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
