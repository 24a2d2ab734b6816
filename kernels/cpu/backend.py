"""The CPU backend: `interface.Kernels` over numba's loops.

It gives the loops the addresses of tensors, and the number of parts (threads) to split the work into.
Operations without a loop of their own go to the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..batch import PagedBatch
from ..interface import Attention, HeadNorm
from ..layer import Layer, LayerSizes
from ..low_rank import LowRank
from ..packed import Packed
from ..reference import backend
from ..reference.backend import by_slot, copy_blocks, linear, look_up, quantised_linear
from ..reference.penalties import allow, count
from ..reference.seeded_sampling import log_probabilities, sample
from . import copying, packed, penalties
from . import linear as plain
from .batch import CpuBatch, lay_out
from .compiling import parts_for
from .elements import TAGS
from .layers import GATES, Layers, adapt_operands, batch_operands, fits, matrices_of, norm_kind, tables_of
from .program import (
    ADAPT,
    ATTEND,
    GATE,
    KINDS,
    MULTIPLY,
    NORM,
    ROTATE,
    at_once,
    attention_bytes,
    run_one,
    scratch_bytes,
)

__all__ = [
    "add_low_rank",
    "add_norm",
    "allow",
    "by_slot",
    "copy_blocks",
    "copy_pieces",
    "count",
    "fuse_layers",
    "gated",
    "lay_out",
    "linear",
    "log_probabilities",
    "look_up",
    "numerics",
    "packed_linear",
    "packed_rows",
    "paged_attention",
    "penalize",
    "quantised_linear",
    "rms_norm",
    "rotate_and_store",
    "sample",
]

numerics = "cpu/1"

PRODUCTS, NUMBERS, PAIRS, BYTES, CELLS = 1 << 17, 1 << 14, 1 << 15, 1 << 19, 1 << 16
"""The least work of a thread when an operation is split over threads; in this order: multiplications of a
matrix product, numbers of a row-wise loop, multiplications of queries with keys, bytes to copy, cells of a
tally."""


def copy_pieces(source: Tensor, target: Tensor, pieces: NDArray[np.int64], size: int) -> None:
    """Copy ``size`` bytes from each offset ``pieces[:, 0]`` of ``source`` to offset ``pieces[:, 1]`` of
    ``target``, on several threads if it is much. Both are one-dimensional uint8 tensors; ``pieces``:
    ``[count, 2]``."""
    parts = min(parts_for(len(pieces) * size, BYTES), len(pieces))
    copying.copy(parts, source.data_ptr(), target.data_ptr(), np.ascontiguousarray(pieces), size)


def packed_linear(x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
    """`linear` with a packed weight, for any number of rows."""
    rows, width = x.shape
    out, parts = x.new_empty((rows, weight.rows)), _parts(rows * weight.rows * width, PRODUCTS)
    scratch = torch.empty(scratch_bytes(rows, width, 1, parts), dtype=torch.uint8)
    operands = [rows, width, x.data_ptr(), scratch.data_ptr(), out.data_ptr(), weight.rows]
    operands += matrices_of([weight], bias, x.dtype)
    run_one(parts, MULTIPLY, operands, x.dtype, (0.0, 0.0))
    return out


def packed_rows(weight: Packed, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows ``ids``, int64 ``[n]``, of a packed matrix: ``[n, in]`` in ``dtype``."""
    out = torch.empty((len(ids), weight.width), dtype=dtype)
    rows = packed.rows if weight.kind.number else plain.rows
    kind, wanted = KINDS[weight.kind.name], ids.contiguous()
    rows(wanted.data_ptr(), len(ids), weight.data.data_ptr(), out.data_ptr(), weight.width, kind, TAGS[dtype])
    return out


def add_low_rank(out: Tensor, x: Tensor, pairs: LowRank, slots: Tensor) -> None:
    """Add to each row of ``out`` ``[tokens, out]``, in place, what the pairs in its slot make of its row of
    ``x`` ``[tokens, in]``. ``slots``: int64 ``[tokens]``, -1 for a row to which nothing is added."""
    rows, room = len(x), pairs.room
    work = rows * room * (x.shape[1] * len(pairs.widths) + out.shape[1])
    parts = _parts(min(work, rows * PRODUCTS), PRODUCTS)
    ends = (x.data_ptr(), out.data_ptr())
    run_one(parts, ADAPT, adapt_operands(rows, *ends, pairs, slots.data_ptr()), x.dtype, (0.0, 0.0))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm, ``x / sqrt(mean(x ** 2) + eps) * weight``, over the last axis."""
    width = x.shape[-1]
    if weight.shape != (width,):
        return backend.rms_norm(x, weight, eps)
    out, rows = torch.empty_like(x), x.numel() // width
    operands = (rows, width, x.data_ptr(), 0, weight.data_ptr(), 0, out.data_ptr())
    run_one(_parts(x.numel(), NUMBERS), NORM, operands, x.dtype, (eps, 0.0))
    return out


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum ``x + residual``, written over ``residual``, and its RMSNorm, written over ``x``; returned in
    this order."""
    width, sums = x.shape[-1], residual.data_ptr()
    operands = (x.numel() // width, width, x.data_ptr(), sums, weight.data_ptr(), sums, x.data_ptr())
    run_one(_parts(x.numel(), NUMBERS), NORM, operands, x.dtype, (eps, 0.0))
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
    _, layers, _, kv_heads, block_tokens, _ = arena.shape
    q_heads = heads - 2 * kv_heads
    query = qkv.new_empty((tokens, q_heads, dim))
    cos, sin = angles
    weight, eps = (0, 0.0) if norm is None else (norm.weight.data_ptr(), norm.eps)
    operands = [tokens, q_heads, kv_heads, dim, cos.shape[-1], block_tokens, layers, layer]
    operands += [slots.data_ptr(), qkv.data_ptr(), weight, norm_kind(norm), cos.data_ptr(), sin.data_ptr()]
    operands += [arena.data_ptr(), query.data_ptr()]
    run_one(_parts(qkv.numel(), NUMBERS), ROTATE, operands, qkv.dtype, (eps, 0.0))
    return query


def paged_attention(query: Tensor, arena: Tensor, layer: int, batch: PagedBatch, how: Attention) -> Tensor:
    """Causal attention of each row's tokens over its own blocks: ``[tokens, q_heads, head_dim]``. ``batch``:
    made by this backend's `lay_out`. Rows of one token and rows of several go to a loop each."""
    assert isinstance(batch, CpuBatch), "a batch is laid out by the backend that attends to it"
    _, layers, _, kv_heads, block_tokens, dim = arena.shape
    q_heads = query.shape[1]
    out, scratch = (
        torch.empty_like(query),
        torch.empty(attention_bytes(batch, q_heads, dim), dtype=torch.uint8),
    )
    seen = min(batch.longest, how.window or batch.longest)
    work = batch.singles.size * seen * q_heads * dim
    if batch.chunks.size:
        work += query.numel() * batch.tables.shape[1] * block_tokens
    operands = [*batch_operands(batch, scratch), q_heads, kv_heads, dim, block_tokens, layers, layer]
    operands += [how.window or 0, query.data_ptr(), out.data_ptr(), arena.data_ptr(), *tables_of(batch)]
    run_one(
        _parts(work, PAIRS), ATTEND, operands, query.dtype, (float(how.scale), float(how.soft_cap or 0.0))
    )
    return out


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up`` of ``[tokens, 2 * width]``, gate first: ``[tokens, width]``. ``activation``:
    ``silu`` or ``gelu_tanh``."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width))
    operands = (rows, width, gate_up.data_ptr(), out.data_ptr(), GATES[activation])
    run_one(_parts(gate_up.numel(), NUMBERS), GATE, operands, gate_up.dtype, (0.0, 0.0))
    return out


def fuse_layers(layers: Sequence[Layer], sizes: LayerSizes) -> Layers | None:
    """What computes all ``layers`` in one call; None: there is a matrix that is not packed."""
    return Layers(layers, sizes) if fits(layers) else None


def _parts(work: int, grain: int) -> int:
    """On how many threads to run an operation."""
    return at_once(parts_for(work, grain))


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
