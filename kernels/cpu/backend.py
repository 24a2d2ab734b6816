"""The CPU backend: `interface.Kernels` over numba's loops.

It gives the loops the addresses of tensors, and the number of parts (threads) to split the work into.
Operations without a loop of their own go to the reference.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..batch import PagedBatch
from ..interface import Attention, HeadNorm
from ..packed import Packed
from ..reference import backend
from ..reference.backend import by_slot, copy_blocks, linear, look_up
from ..reference.penalties import allow, count
from ..reference.seeded_sampling import log_probabilities, sample
from . import copying, decode, elementwise, packed, penalties, prefill
from . import linear as products
from .batch import CpuBatch, lay_out
from .compiling import parts_for
from .elements import TAGS

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
    "packed_linear",
    "packed_rows",
    "paged_attention",
    "penalize",
    "rms_norm",
    "rotate_and_store",
    "sample",
]

KINDS = {**packed.TAGS, **{str(dtype).removeprefix("torch."): tag for dtype, tag in TAGS.items()}}
"""For each type of weights in panels an argument that selects the compiled version."""

PRODUCTS, NUMBERS, PAIRS, BYTES, CELLS = 1 << 17, 1 << 14, 1 << 15, 1 << 19, 1 << 16
"""The least work of a thread when an operation is split over threads; in this order: multiplications of a
matrix product, numbers of a row-wise loop, multiplications of queries with keys, bytes to copy, cells of a
tally."""

_KINDS = {"silu": elementwise.SILU, "gelu_tanh": elementwise.GELU_TANH}


def copy_pieces(source: Tensor, target: Tensor, pieces: NDArray[np.int64], size: int) -> None:
    """Copy ``size`` bytes from each offset ``pieces[:, 0]`` of ``source`` to offset ``pieces[:, 1]`` of
    ``target``, on several threads if it is much. Both are one-dimensional uint8 tensors; ``pieces``:
    ``[count, 2]``."""
    parts = min(parts_for(len(pieces) * size, BYTES), len(pieces))
    copying.copy(parts, source.data_ptr(), target.data_ptr(), np.ascontiguousarray(pieces), size)


def packed_linear(x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
    """`linear` with a packed weight, for any number of rows."""
    rows, width = x.shape
    out = x.new_empty((rows, weight.rows))
    product = packed.product if weight.kind.number else products.product
    product(
        parts_for(rows * weight.rows * width, PRODUCTS),
        x.data_ptr(),
        weight.data.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        weight.rows,
        width,
        KINDS[weight.kind.name],
        TAGS[x.dtype],
    )
    return out


def packed_rows(weight: Packed, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows ``ids``, int64 ``[n]``, of a packed matrix: ``[n, in]`` in ``dtype``."""
    out = torch.empty((len(ids), weight.width), dtype=dtype)
    kind, places = KINDS[weight.kind.name], ids.contiguous()
    rows = packed.rows if weight.kind.number else products.rows
    rows(places.data_ptr(), len(ids), weight.data.data_ptr(), out.data_ptr(), weight.width, kind, TAGS[dtype])
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm, ``x / sqrt(mean(x ** 2) + eps) * weight``, over the last axis."""
    width = x.shape[-1]
    if weight.shape != (width,):
        return backend.rms_norm(x, weight, eps)
    out, rows = torch.empty_like(x), x.numel() // width
    parts = parts_for(x.numel(), NUMBERS)
    elementwise.norm(
        parts, x.data_ptr(), 0, weight.data_ptr(), 0, out.data_ptr(), rows, width, eps, TAGS[x.dtype]
    )
    return out


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum ``x + residual``, written over ``residual``, and its RMSNorm, written over ``x``; returned in
    this order."""
    width = x.shape[-1]
    elementwise.norm(
        parts_for(x.numel(), NUMBERS),
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        residual.data_ptr(),
        x.data_ptr(),
        x.numel() // width,
        width,
        eps,
        TAGS[x.dtype],
    )
    return residual, x


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
    tokens, heads, dim = qkv.shape
    _, layers, sides, kv_heads, block_tokens, _ = arena.shape
    q_heads = heads - 2 * kv_heads
    query = qkv.new_empty((tokens, q_heads, dim))
    cos, sin = angles
    layer_size = sides * kv_heads * block_tokens * dim
    kind, weight, eps = elementwise.NO_NORM, 0, 0.0
    if norm is not None:
        kind = elementwise.WHOLE if norm.whole else elementwise.PER_HEAD
        weight, eps = norm.weight.data_ptr(), norm.eps
    elementwise.rotate_and_store(
        parts_for(qkv.numel(), NUMBERS),
        tokens,
        slots.data_ptr(),
        qkv.data_ptr(),
        weight,
        kind,
        eps,
        cos.data_ptr(),
        sin.data_ptr(),
        arena.data_ptr(),
        query.data_ptr(),
        (q_heads, kv_heads, dim, cos.shape[-1], block_tokens, layers * layer_size, layer * layer_size),
        TAGS[qkv.dtype],
    )
    return query


def paged_attention(query: Tensor, arena: Tensor, layer: int, batch: PagedBatch, how: Attention) -> Tensor:
    """Causal attention of each row's tokens over its own blocks: ``[tokens, q_heads, head_dim]``. ``batch``:
    made by this backend's `lay_out`. Rows of one token and rows of several go to a loop each."""
    assert isinstance(batch, CpuBatch), "a batch is laid out by the backend that attends to it"
    _, layers, sides, kv_heads, block_tokens, dim = arena.shape
    layer_size = sides * kv_heads * block_tokens * dim
    out = torch.empty_like(query)
    places = (
        query.data_ptr(),
        out.data_ptr(),
        arena.data_ptr(),
        batch.row_starts.data_ptr(),
        batch.context_lengths.data_ptr(),
        batch.tables.data_ptr(),
        batch.tables.shape[1],
        layer * layer_size,
        (query.shape[1] // kv_heads, kv_heads, dim, block_tokens, layers * layer_size),
        float(how.scale),
        how.window or 0,
        float(how.soft_cap or 0.0),
        TAGS[query.dtype],
    )
    if batch.singles.size:
        seen = min(batch.longest, how.window or batch.longest)
        parts = parts_for(batch.singles.size * seen * query.shape[1] * dim, PAIRS)
        decode.attend_singles(parts, batch.singles, batch.longest, *places)
    if batch.chunks.size:
        parts = parts_for(query.numel() * batch.tables.shape[1] * block_tokens, PAIRS)
        prefill.attend_chunks(parts, batch.chunks, batch.most, *places)
    return out


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up`` of ``[tokens, 2 * width]``, gate first: ``[tokens, width]``. ``activation``:
    ``silu`` or ``gelu_tanh``."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width))
    parts = parts_for(gate_up.numel(), NUMBERS)
    elementwise.gated(
        parts, gate_up.data_ptr(), out.data_ptr(), rows, width, _KINDS[activation], TAGS[gate_up.dtype]
    )
    return out


def penalize(
    logits: Tensor,
    rows: Tensor,
    tally: Tensor,
    lines: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """Apply penalties for the tokens counted in ``lines`` of ``tally``, int32 ``[lines, vocab]``, to ``rows``
    of ``logits`` fp32 ``[all rows, vocab]``, in place. Rows and lines: int64 ``[n]``; the penalties: fp64
    ``[n]``."""
    strengths = torch.stack((repetition, frequency, presence), dim=1).float()
    penalties.penalize(
        parts_for(rows.numel() * logits.shape[1], CELLS),
        rows.numpy(),
        lines.numpy(),
        strengths.numpy(),
        logits.numpy(),
        tally.numpy(),
    )
