"""Paged decode attention: one query token per row, and several programs for a long context.

A program takes one part of a row's context (see `parts`) and one KV head. The query heads that share the KV
head are one tile, so K and V are read once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import PagedBatch
from ..interface import Attention
from .configurations import chosen
from .parts import WHOLE, Parts, expect_fitting, last_at, share_of
from .softmax import cells_of, fold, log_sum, normal, scores_of, wide, with_sink
from .support import group_of, readable

PROGRAMS = 4
"""For how many programs on each multiprocessor long contexts are cut into parts."""


@triton.jit(do_not_specialize=["layer", "rows", "stride_table"])
def decode_stretch(
    query: tl.tensor, arena: tl.tensor, tables: tl.tensor, lines: tl.tensor, lengths: tl.tensor,
    row_starts: tl.tensor, split: tl.tensor, sinks: tl.tensor, out: tl.tensor, partial: tl.tensor,
    lse: tl.tensor,
    layer: tl.tensor, scale: tl.tensor, rows: tl.tensor,
    query_row: tl.tensor, query_head: tl.tensor, stride_table: tl.tensor,
    stride_block: tl.tensor, stride_layer: tl.tensor, stride_side: tl.tensor, stride_head: tl.tensor,
    stride_slot: tl.tensor,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    SINKS: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: attend for one row's token, with the query heads of one KV head, to one part of its context.
    Writes the result to ``out`` if the row has one part, else to ``partial`` and ``lse``. Programs are (KV
    head, program of the split): those of all heads run together, as their K and V lie together in a block.
    Pointers are ``query`` to ``lse``; the other tensors are single values."""
    head, program = tl.program_id(0), tl.program_id(1)
    if program >= tl.load(split + rows * 3):
        return
    row = last_at(split, program, rows, 3)
    part, parts = program - tl.load(split + row * 3), tl.load(split + row * 3 + 2)
    token, length = tl.load(row_starts + row), tl.load(lengths + row).to(tl.int32)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    tiles = tl.cdiv(length, TILE) - first // TILE
    start = (first // TILE + part * tiles // parts) * TILE
    end = tl.minimum((first // TILE + (part + 1) * tiles // parts) * TILE, length)
    members, dims = tl.arange(0, ROWS), tl.arange(0, WIDE)
    heads = head * GROUP + members
    theirs = (members < GROUP)[:, None] & (dims < DIM)[None, :]
    asked = tl.load(
        query + token * query_row + heads[:, None] * query_head + dims[None, :], theirs, other=0.0
    )
    keys_at = arena + layer.to(tl.int64) * stride_layer + head.to(tl.int64) * stride_head
    values_at = keys_at + stride_side
    table = tables + tl.load(lines + row).to(tl.int64) * stride_table
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total, acc = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDE], tl.float32)
    for at in tl.range(start, end, TILE):
        tokens = at + tl.arange(0, TILE)
        seen = (tokens >= first) & (tokens < end)
        cells = cells_of(table, tokens, seen, stride_block, stride_slot, BLOCK)
        keys = tl.load(
            keys_at + cells[None, :] + dims[:, None], seen[None, :] & (dims < DIM)[:, None], other=0.0
        )
        # A masked V is loaded as 0, not as what a reused slot holds: 0 x NaN would be NaN.
        values = tl.load(
            values_at + cells[:, None] + dims[None, :], seen[:, None] & (dims < DIM)[None, :], other=0.0
        )
        keys, values = wide(keys, asked), wide(values, asked)
        scores = tl.where(seen[None, :], scores_of(asked, keys, scale, SOFT_CAP), float("-inf"))
        best, total, acc = fold(scores, values, best, total, acc)
    every = tl.num_programs(0) * GROUP
    if parts == 1:
        if SINKS:
            total = with_sink(best, total, tl.load(sinks + heads, members < GROUP, other=0.0).to(tl.float32))
        target = out + (token * every + heads)[:, None] * DIM + dims[None, :]
        tl.store(target, normal(acc, total).to(out.dtype.element_ty), theirs)
    else:
        entry = (tl.load(split + row * 3 + 1) + part).to(tl.int64) * every + heads
        tl.store(partial + entry[:, None] * DIM + dims[None, :], normal(acc, total), theirs)
        tl.store(lse + entry, log_sum(best, total), members < GROUP)


def decode_attention(
    query: Tensor,
    arena: Tensor,
    layer: int,
    batch: PagedBatch,
    how: Attention,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of each row with one token over its own blocks, written to ``out`` ``[tokens, q_heads,
    head_dim]`` (None: a new tensor), which is returned; the tokens of other rows are left as they are.

    ``query``: the same shape. ``sinks``: ``[q_heads]``, one more score per head, without a value (Xiao et
    al., 2023); None: none.
    """
    group, heads, block, dim = group_of(query, arena), *arena.shape[3:]
    expect_fitting(batch, query, sinks)
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    rows, launch = batch.context_lengths.shape[0], chosen("decode", query, dim)
    if not rows:
        return out
    span = WHOLE if how.window is None else how.window + launch["TILE"]
    extra = share_of(query.device, PROGRAMS, heads)
    parts = Parts.of(batch, query, rows, extra, span, 1, singles=True)
    decode_stretch[(heads, parts.programs)](
        query, readable(arena), batch.tables, batch.lines, batch.context_lengths, batch.row_starts, parts.split,
        sinks, out, parts.values, parts.lse,
        layer, how.scale, rows, query.stride(0), query.stride(1), batch.tables.stride(0), *arena.stride()[:5],
        WINDOW=how.window or 0, SOFT_CAP=how.soft_cap or 0.0, GROUP=group,
        DIM=dim, WIDE=triton.next_power_of_2(dim), BLOCK=block, ROWS=max(16, triton.next_power_of_2(group)),
        SINKS=sinks is not None, **launch,
    )  # fmt: skip
    parts.reduce(batch, out, sinks)
    return out
