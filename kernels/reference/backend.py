"""The reference backend in torch: what every kernel must compute, and the fallback on any device.

The arena is contiguous, ``[block, layer, k|v, head, slot, dim]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ..batch import Gather, PagedBatch, gathers_of, lay_out
from ..device import Device
from ..float8 import as_bytes, narrowed
from ..interface import Attention, HeadNorm
from ..low_rank import LowRank
from ..packed import Packed, rounded
from ..packed_types import RUN
from ..quantised import Quantised, activated
from .penalties import allow, count, penalize
from .seeded_sampling import log_probabilities, sample

if TYPE_CHECKING:
    from ..layer import FusedLayers, Layer, LayerSizes

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
    "rotary",
    "rotate_and_store",
    "sample",
    "store_kv",
]


numerics = "reference/1"
by_slot = False


def look_up(
    tables: Tensor, last: Tensor, lines: Tensor, positions: Tensor, given: Tensor, block_tokens: int
) -> tuple[Tensor, Tensor]:
    """The id of each token of a step, and the slot in the arena where its K and V go (-1: nowhere), int64
    ``[tokens]`` each.

    ``tables``: block ids, int32 ``[lines, blocks]``; ``last``: the id that each line drew last, int64
    ``[lines]``. By token, int64: ``lines``, the line of its row, -1 for padding; ``positions``; ``given``,
    its id, -1 for the one that its line drew last."""
    held = lines.clamp(min=0)
    blocks = tables[held, positions // block_tokens].long()
    slots = torch.where(lines < 0, -1, blocks * block_tokens + positions % block_tokens)
    return torch.where(given < 0, last[held], given), slots


def store_kv(arena: Tensor, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Write ``keys`` and ``values`` ``[tokens, kv_heads, head_dim]`` of one layer into the arena, in place.

    ``layer``: its index in ``arena``. ``slots``: int64 ``[tokens]``, ``block * block_tokens + offset``. The
    arena may be of 8-bit floats: numbers are then rounded to them.
    """
    keys, values = (as_bytes(narrowed(side, arena.dtype)) for side in (keys, values))
    arena = as_bytes(arena)
    _, layers, sides, heads, block_tokens, dim = arena.shape
    block = torch.div(slots, block_tokens, rounding_mode="floor")
    # A (block, layer, side, head) tile is block_tokens lines of dim numbers; lines count over the arena.
    first_line = block * ((layers * sides * heads - 1) * block_tokens) + slots
    head_lines = torch.arange(heads, device=arena.device) * block_tokens
    lines = (first_line[:, None] + head_lines).view(-1)
    flat = arena.view(-1, dim)
    at = layer * sides * heads * block_tokens
    flat.index_copy_(0, lines + at, keys.reshape(-1, dim))
    flat.index_copy_(0, lines + (at + heads * block_tokens), values.reshape(-1, dim))


def paged_attention(query: Tensor, arena: Tensor, layer: int, batch: PagedBatch, how: Attention) -> Tensor:
    """Causal attention of each row's tokens over its own blocks, in which this step's K and V are stored
    already.

    ``query`` and the result: ``[tokens, q_heads, head_dim]``; q_heads is a multiple of the arena's heads.
    ``layer``: its index in ``arena``. Slots without a token of the row do not affect the result, whatever
    they hold (also NaN).
    """
    result = torch.empty_like(query)
    for group, gather in zip(batch.groups, gathers_of(batch, arena, how.window, query.dtype), strict=True):
        keys, values = _gather(arena, layer, gather, group.rows, query.dtype)
        attend = _attend_singles if group.count == 1 else _attend_chunk
        result[group.tokens] = attend(query[group.tokens], keys, values, gather.mask, how)
    return result


def _gather(
    arena: Tensor, layer: int, gather: Gather, rows: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """K and V of one layer for the contexts of a row group, each ``[rows, kv_heads, span, head_dim]`` in
    ``dtype``; zero in slots without a token of the row. ``gather``: what to read."""
    _, _, sides, heads, block_tokens, dim = arena.shape
    held = as_bytes(arena).view(-1, block_tokens * dim)
    tiles = held.index_select(0, gather.tiles + layer * sides * heads)
    lines = tiles.view(-1, dim).index_fill_(0, gather.blank, 0).view(arena.dtype).to(dtype)
    keys, values = lines.view(sides, rows, heads, -1, dim).unbind(0)
    return keys, values


def _attend_singles(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, how: Attention) -> Tensor:
    """Attention of rows with one token each: ``query`` ``[rows, q_heads, dim]``, ``keys`` and ``values``
    ``[rows, kv_heads, span, dim]``. For torch, the query heads that share a KV head are the queries of one
    head."""
    rows, heads = keys.shape[:2]
    grouped = query.reshape(rows, heads, -1, query.shape[-1])
    return _attend(grouped, keys, values, mask, how).reshape(query.shape)


def _attend_chunk(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, how: Attention) -> Tensor:
    """Attention of one row with many tokens: ``query`` ``[tokens, q_heads, dim]``, ``keys`` and ``values``
    ``[1, kv_heads, span, dim]``. For torch, a KV head is an element of the batch, and the query heads that
    share it are its heads."""
    count, q_heads, dim = query.shape
    heads, span = keys.shape[1:3]
    grouped = query.view(count, heads, -1, dim).permute(1, 2, 0, 3)
    shape = (heads, q_heads // heads, span, dim)
    shared_keys, shared_values = (side[0].unsqueeze(1).expand(shape) for side in (keys, values))
    attended = _attend(grouped, shared_keys, shared_values, mask, how)
    return attended.permute(2, 0, 1, 3).reshape(query.shape)


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, how: Attention) -> Tensor:
    """Softmax attention over the last two axes, ``[…, tokens, dim]``, with ``mask`` added to the scores; by
    torch's fused function, or, if scores are capped, by single operations with an fp32 softmax.

    Source of the cap: Gemma Team, "Gemma 2" (2024).
    """
    if how.soft_cap is None:
        return F.scaled_dot_product_attention(query, keys, values, mask, scale=how.scale)
    scores = (query @ keys.transpose(-1, -2)).float() * how.scale
    capped = how.soft_cap * torch.tanh(scores / how.soft_cap) + mask
    return capped.softmax(-1).to(query.dtype) @ values


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: ``[tokens, in]``, ``[out, in]``, ``[out]`` to ``[tokens, out]``."""
    return F.linear(x, weight, bias)


def packed_linear(x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
    """`linear` with a packed weight; if that is quantised, ``x`` is rounded to 8 bits. The sums are in fp32."""
    if not weight.kind.number:
        return F.linear(x, weight.numbers().to(x.dtype), bias)
    taken = rounded(x, weight.width if weight.kind.token else RUN)
    return F.linear(taken, weight.numbers(), None if bias is None else bias.float()).to(x.dtype)


def quantised_linear(x: Tensor, weight: Quantised, bias: Tensor | None = None) -> Tensor:
    """`linear` with a quantised weight, and with ``x`` rounded as its scheme says. The sums are in fp32."""
    numbers = weight.numbers()
    return F.linear(activated(x, weight), numbers, None if bias is None else bias.float()).to(x.dtype)


def packed_rows(weight: Packed, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows ``ids``, int64 ``[n]``, of a packed matrix: ``[n, in]`` in ``dtype``."""
    return weight.take(ids).to(dtype)


def fuse_layers(layers: Sequence[Layer], sizes: LayerSizes) -> FusedLayers | None:
    """Nothing: layers are computed operation by operation."""
    return None


def add_low_rank(out: Tensor, x: Tensor, pairs: LowRank, slots: Tensor) -> None:
    """Add to each row of ``out`` ``[tokens, out]``, in place, what the pairs in its slot make of its row of
    ``x`` ``[tokens, in]``: to the columns of each part ``x @ a @ b``. ``slots``: int64 ``[tokens]``, -1 for a
    row to which nothing is added. The sums are in fp32, and rounded once.

    Source: Hu et al., "LoRA: low-rank adaptation of large language models" (2021).
    """
    for slot in sorted(set(slots.tolist())):
        if slot < 0:
            continue
        rows = torch.nonzero(slots == slot).view(-1)
        wide = x[rows].float()
        added = [
            wide @ pairs.a[slot, part, : x.shape[1], :rank].float() @ pairs.b_of(slot, part, rank).float()
            for part, rank in enumerate(pairs.ranks[slot].tolist())
        ]
        out[rows] = (out[rows].float() + torch.cat(added, dim=1)).to(out.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm, ``x / sqrt(mean(x ** 2) + eps) * weight``, over the last axis; the mean is in fp32, the
    product with ``weight`` in x's type.

    ``weight`` broadcasts. Source: Zhang, Sennrich, "Root mean square layer normalization" (2019).
    """
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


def rotary(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``heads`` ``[tokens, heads, dim]`` by their positions: pairs are (i, i + turning / 2).

    ``cos``, ``sin``: ``[tokens, turning]``, both halves equal; numbers behind the first ``turning`` are not
    rotated. Source: Su et al., "RoFormer" (2021), in the half-split order of GPT-NeoX.
    """
    turning = cos.shape[-1]
    if turning < heads.shape[-1]:
        return torch.cat((rotary(heads[..., :turning], cos, sin), heads[..., turning:]), dim=-1)
    first, second = heads.chunk(2, dim=-1)
    return heads * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum ``x + residual`` and its RMSNorm with ``weight`` and ``eps``, in this order."""
    total = x + residual
    return total, rms_norm(total, weight, eps)


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
    pairs = arena.shape[3]
    turning, values = torch.split(qkv, [qkv.shape[1] - pairs, pairs], dim=1)
    if norm is not None:
        turning = _head_norm(turning, norm, pairs)
    query, keys = torch.split(rotary(turning, *angles), [turning.shape[1] - pairs, pairs], dim=1)
    store_kv(arena, layer, keys, values, slots)
    return query


def _head_norm(heads: Tensor, norm: HeadNorm, kv_heads: int) -> Tensor:
    """RMSNorm of queries and keys, ``[tokens, q_heads + kv_heads, head_dim]``: over each head, or over all
    query heads and all key heads of a token if ``norm.whole``."""
    if not norm.whole:
        return rms_norm(heads, norm.weight, norm.eps)
    sizes = [heads.shape[1] - kv_heads, kv_heads]
    parts = zip(torch.split(heads, sizes, dim=1), torch.split(norm.weight, sizes), strict=True)
    normed = [
        rms_norm(part.flatten(1), weight.flatten(), norm.eps).view(part.shape) for part, weight in parts
    ]
    return torch.cat(normed, dim=1)


def gated(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """``activation(gate) * up`` of ``[tokens, 2 * width]``, gate first: ``[tokens, width]``. ``activation``:
    ``silu``, else GELU (tanh).

    Source: Shazeer, "GLU variants improve transformer" (2020).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def copy_blocks(
    arena: Tensor, sources: Iterable[int], targets: Iterable[int], device: Device | None = None
) -> None:
    """Copy whole blocks of ``arena``, ``sources[i]`` to ``targets[i]``, one after the other in the order
    given, so that a target may be a later source."""
    for source, target in zip(sources, targets, strict=True):
        arena[target].copy_(arena[source])


def copy_pieces(source: Tensor, target: Tensor, pieces: NDArray[np.int64], size: int) -> None:
    """Copy ``size`` bytes from each offset ``pieces[:, 0]`` of ``source`` to offset ``pieces[:, 1]`` of
    ``target``, one-dimensional uint8 tensors in host memory."""
    here, there = source.numpy(), target.numpy()
    for begin, to in pieces.tolist():  # memcpy: torch would split each piece over its threads
        there[to : to + size] = here[begin : begin + size]
