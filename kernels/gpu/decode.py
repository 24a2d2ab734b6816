"""Paged decode attention: one query token per row; many programs read its context, then their results are
merged.

The context is cut into stretches. A program takes one row, one KV head and one stretch. The query heads that
share the KV head are one tile, so K and V are read once. With a given ``stretch``, stretches have a fixed
length, and a row's result is the same in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import PagedBatch
from ..interface import Attention
from .configurations import chosen, multiprocessors
from .softmax import LOG2E, fold, lines_of, log_sum, normal, scores_of, wide, with_sink
from .support import expect, group_of, readable

STRETCHES = (4096, 2048, 1024, 512, 256)
"""Possible lengths of a stretch, the part of the context that one program reads, in tokens; each a multiple
of every tile size."""


@triton.jit
def first_token(
    length: tl.tensor, begins: tl.tensor, row: tl.tensor, WINDOW: tl.constexpr, BEGINS: tl.constexpr
) -> tl.tensor:
    """The first position that one program's row attends to: 0, or with ``BEGINS`` ``begins[row]`` (behind a
    prefix that is computed elsewhere); not before its window, if ``WINDOW`` is not 0. ``begins``: a pointer,
    read only with ``BEGINS``; ``length``, the row's context, and ``row`` are values. Returns a value."""
    first = 0
    if BEGINS:
        first = tl.load(begins + row).to(tl.int32)
    if WINDOW > 0:
        first = tl.maximum(first, length - WINDOW)
    return first


@triton.jit(do_not_specialize=["layer", "parts", "skipped", "stride_table"])
def decode_stretch(
    query: tl.tensor, arena: tl.tensor, tables: tl.tensor, lengths: tl.tensor, begins: tl.tensor,
    sinks: tl.tensor, out: tl.tensor, lse: tl.tensor,
    layer: tl.tensor, scale: tl.tensor, parts: tl.tensor, skipped: tl.tensor, each: tl.tensor,
    query_row: tl.tensor, query_head: tl.tensor, stride_table: tl.tensor,
    stride_block: tl.tensor, stride_layer: tl.tensor, stride_side: tl.tensor, stride_head: tl.tensor,
    stride_slot: tl.tensor,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    BEGINS: tl.constexpr, SINKS: tl.constexpr, WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: attend for one row's token, with the query heads of one KV head, to one stretch of its context
    (``each`` tokens). Writes the partial result, number ``skipped + stretch``, to ``out[row, head, parts,
    dim]``, and its log-sum-exp to ``lse``. Programs are (row, KV head, stretch). Pointers are ``query`` to
    ``lse``; the other tensors are single values.

    With ``WHOLE`` there is one stretch, and ``out`` is the result.
    """
    row, head, stretch = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32)
    first = first_token(length, begins, row, WINDOW, BEGINS)
    start = first // TILE * TILE + stretch * each
    if start >= length:
        return
    end = length if WHOLE else tl.minimum(start + each, length)
    members, dims = tl.arange(0, ROWS), tl.arange(0, WIDE)
    heads = head * GROUP + members
    theirs = (members < GROUP)[:, None] & (dims < DIM)[None, :]
    asked = tl.load(query + row * query_row + heads[:, None] * query_head + dims[None, :], theirs, other=0.0)
    keys_at = arena + layer.to(tl.int64) * stride_layer + head.to(tl.int64) * stride_head
    values_at = keys_at + stride_side
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total, acc = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDE], tl.float32)
    for at in tl.range(start, end, TILE):
        tokens = at + tl.arange(0, TILE)
        seen = (tokens >= first) & (tokens < end)
        lines = lines_of(tables + row * stride_table, tokens, seen, stride_block, stride_slot, BLOCK)
        keys = tl.load(
            keys_at + lines[None, :] + dims[:, None], seen[None, :] & (dims < DIM)[:, None], other=0.0
        )
        # A masked V is loaded as 0, not as what a reused slot holds: 0 x NaN would be NaN.
        values = tl.load(
            values_at + lines[:, None] + dims[None, :], seen[:, None] & (dims < DIM)[None, :], other=0.0
        )
        keys, values = wide(keys, asked), wide(values, asked)
        scores = tl.where(seen[None, :], scores_of(asked, keys, scale, SOFT_CAP), float("-inf"))
        best, total, acc = fold(scores, values, best, total, acc)
    if WHOLE and SINKS:
        total = with_sink(best, total, tl.load(sinks + heads, members < GROUP, other=0.0).to(tl.float32))
    part = (row * tl.num_programs(1) * GROUP + heads) * parts + skipped + stretch
    target = out + part[:, None] * DIM + dims[None, :]
    tl.store(target, normal(acc, total).to(out.dtype.element_ty), theirs)
    if not WHOLE:
        tl.store(lse + part, log_sum(best, total), members < GROUP)


@triton.jit(do_not_specialize=["parts", "shared"])
def reduce_parts(
    partial: tl.tensor, lse: tl.tensor, lengths: tl.tensor, begins: tl.tensor, sinks: tl.tensor, out: tl.tensor,
    parts: tl.tensor, shared: tl.tensor, each: tl.tensor,
    WINDOW: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr,
    MOST: tl.constexpr, BEGINS: tl.constexpr, SINKS: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: merge a row's partial results, weighted by their log-sum-exps ``lse``, into ``out``. The first
    ``shared`` of them are of a common prefix, the others of the row's own stretches (``each`` tokens). Programs
    are (row, query head). Pointers are ``partial`` to ``out``; the other tensors are single values."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths + row).to(tl.int32)
    first = first_token(length, begins, row, WINDOW, BEGINS)
    used = shared + tl.cdiv(length - first // TILE * TILE, each)
    numbers, dims = tl.arange(0, MOST), tl.arange(0, WIDE)
    base = (row * tl.num_programs(1) + head) * parts
    logs = tl.load(lse + base + numbers, numbers < used, other=float("-inf"))
    best = tl.max(logs, 0)
    total = tl.sum(tl.math.exp2(logs - best), 0)
    acc = tl.zeros([WIDE], tl.float32)
    for part in tl.range(0, used):
        weight = tl.math.exp2(tl.load(lse + base + part) - best)
        acc += weight * tl.load(partial + (base + part) * DIM + dims, dims < DIM, other=0.0)
    if SINKS:
        total += tl.math.exp2(tl.load(sinks + head).to(tl.float32) * LOG2E - best)
    target = out + (row * tl.num_programs(1) + head) * DIM + dims
    tl.store(target, (acc / total).to(out.dtype.element_ty), dims < DIM)


@dataclass(frozen=True, slots=True)
class Parts:
    """Partial results of attention: ``values`` fp32 ``[rows, q_heads, parts, dim]``; ``lse`` ``[rows,
    q_heads, parts]``, their log-sum-exps to base 2. If ``lse`` is ``values``, there is one part, which is the
    result.

    ``stretch``: tokens of each part. ``shared``: how many parts, of a common prefix, come before those of the
    rows' own tokens.
    """

    values: Tensor
    lse: Tensor
    stretch: int
    shared: int = 0

    @classmethod
    def empty(cls, query: Tensor, parts: int, stretch: int, shared: int = 0) -> Parts:
        """Uninitialised memory for ``parts`` partial results for each row and head of ``query`` ``[rows,
        heads, dim]``. ``stretch``, ``shared``: stored as they are."""
        rows, heads, dim = query.shape
        values = torch.empty((rows, heads, parts, dim), dtype=torch.float32, device=query.device)
        return cls(values, values.new_empty((rows, heads, parts)), stretch, shared)


def stretch_for(programs: int, tokens: int, device: torch.device) -> int:
    """How many tokens of the context one program reads: the longest of `STRETCHES` with which there are two
    programs for every multiprocessor; the shortest if none gives that many. ``programs``: programs for each
    stretch; ``tokens``: the longest context."""
    wanted = 2 * multiprocessors(device)
    return next((one for one in STRETCHES if programs * -(-tokens // one) >= wanted), STRETCHES[-1])


def decode_attention(
    query: Tensor,
    arena: Tensor,
    layer: int,
    batch: PagedBatch,
    how: Attention,
    sinks: Tensor | None = None,
    *,
    stretch: int | None = None,
) -> Tensor:
    """Attention of one token per row over its own blocks: ``[rows, q_heads, head_dim]``.

    ``query``: the same shape. ``sinks``: ``[q_heads]``, one more score per head, without a value (Xiao et
    al., 2023); None: none. ``stretch``: how many tokens one program reads; None: as many as keep the GPU
    busy. Set it if results must be the same in any batch.
    """
    expect("context lengths", batch.context_lengths, (query.shape[0],))
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if not query.shape[0]:
        return out
    tile = chosen("decode", query, arena.shape[5])["TILE"]
    span = batch.tables.shape[1] * arena.shape[4]
    if how.window is not None:  # a window's first tile begins before it
        span = min(span, how.window + tile)
    length = stretch or stretch_for(query.shape[0] * arena.shape[3], span, query.device)
    count = -(-span // length)
    if count == 1:
        read_stretches(query, arena, layer, batch, how, Parts(out, out, length), 1, sinks=sinks)
        return out
    parts = Parts.empty(query, count, length)
    read_stretches(query, arena, layer, batch, how, parts, count)
    merge(parts, batch, how, tile, out, sinks=sinks)
    return out


def read_stretches(
    query: Tensor,
    arena: Tensor,
    layer: int,
    batch: PagedBatch,
    how: Attention,
    parts: Parts,
    count: int,
    *,
    begins: Tensor | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Launch `decode_stretch` for ``count`` stretches of each row, from the position ``begins`` (int64
    ``[rows]``; None: 0) on. The partial results are written to ``parts``, behind its ``shared`` first ones.
    ``sinks``: ``[q_heads]``, used only where one part is the result."""
    group, heads, block, dim = group_of(query, arena), *arena.shape[3:]
    if sinks is not None:
        expect("sinks", sinks, (query.shape[1],))
    decode_stretch[(query.shape[0], heads, count)](
        query, readable(arena), batch.tables, batch.context_lengths, begins, sinks, parts.values, parts.lse,
        layer, how.scale, parts.lse.shape[2] if parts.lse is not parts.values else 1,
        parts.shared, parts.stretch,
        query.stride(0), query.stride(1), batch.tables.stride(0), *arena.stride()[:5],
        WINDOW=how.window or 0, SOFT_CAP=how.soft_cap or 0.0, GROUP=group,
        DIM=dim, WIDE=triton.next_power_of_2(dim), BLOCK=block, ROWS=max(16, triton.next_power_of_2(group)),
        BEGINS=begins is not None, SINKS=sinks is not None, WHOLE=parts.lse is parts.values,
        **chosen("decode", query, dim),
    )  # fmt: skip


def merge(
    parts: Parts,
    batch: PagedBatch,
    how: Attention,
    tile: int,
    out: Tensor,
    *,
    begins: Tensor | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Launch `reduce_parts`: merge the partial results ``parts`` into ``out`` ``[rows, q_heads, dim]``.
    ``tile``: the tile size with which they were computed. ``begins``: int64 ``[rows]``, where each row's own
    part begins; None: at 0. ``sinks``: ``[q_heads]``, one more score per head, without a value."""
    rows, heads, dim = out.shape
    most = parts.lse.shape[2]
    reduce_parts[(rows, heads)](
        parts.values, parts.lse, batch.context_lengths, begins, sinks, out, most, parts.shared,
        parts.stretch,
        WINDOW=how.window or 0, DIM=dim, WIDE=triton.next_power_of_2(dim), TILE=tile,
        MOST=max(64, triton.next_power_of_2(most)),
        BEGINS=begins is not None, SINKS=sinks is not None, num_warps=4,
    )  # fmt: skip
