"""Paged attention of chunks, rows of several query tokens, in one launch.

A program takes one KV head, a tile of one row's queries (some tokens, and the query heads of each that share
the KV head) and what they see, or a part of it (see `parts`) where tiles alone are too few for the device.
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

PROGRAMS = 2
"""With fewer tiles for each multiprocessor, contexts are cut into parts."""


@triton.jit
def fold_tiles(
    best: tl.tensor, total: tl.tensor, acc: tl.tensor, asked: tl.tensor, positions: tl.tensor,
    keys_at: tl.tensor, values_at: tl.tensor, table: tl.tensor, start: tl.tensor, end: tl.tensor,
    seen_from: tl.tensor, scale: tl.tensor, stride_block: tl.tensor, stride_slot: tl.tensor,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, MASKED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Add the keys at the positions ``[start, end)`` and their values to a running softmax; returns it:
    ``best`` (each query's greatest score so far), ``total`` (the sum of its weights) and ``acc`` (the weighted
    sum of values).

    ``asked``: the queries, at ``positions`` of the sequence. ``table``: pointer to the row's block table.
    ``keys_at``, ``values_at``: pointers to the keys and values of the KV head in block 0. All else are values.
    Without ``MASKED`` every query must see all of these keys, and they must be whole tiles.

    With a window no query sees a key before ``seen_from``. Its block may be freed and hold NaN, so it is not
    read: a weight of 0 does not help, since 0 x NaN is NaN.
    """
    dims = tl.arange(0, WIDE)
    inside = dims < DIM
    for at in tl.range(start, end, TILE):
        tokens = at + tl.arange(0, TILE)
        there = tokens < end
        if WINDOW > 0:
            there = there & (tokens >= seen_from)
        cells = cells_of(table, tokens, there, stride_block, stride_slot, BLOCK)
        keys_of, values_of = (
            keys_at + cells[None, :] + dims[:, None],
            values_at + cells[:, None] + dims[None, :],
        )
        if MASKED:
            keys = tl.load(keys_of, there[None, :] & inside[:, None], other=0.0)
            values = tl.load(values_of, there[:, None] & inside[None, :], other=0.0)
        elif DIM == WIDE:
            keys, values = tl.load(keys_of), tl.load(values_of)
        else:
            keys = tl.load(keys_of, inside[:, None], other=0.0)
            values = tl.load(values_of, inside[None, :], other=0.0)
        keys, values = wide(keys, asked), wide(values, asked)
        scores = scores_of(asked, keys, scale, SOFT_CAP)
        if MASKED:
            seen = tokens[None, :] <= positions[:, None]
            if WINDOW > 0:
                seen = seen & (tokens[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        best, total, acc = fold(scores, values, best, total, acc)
    return best, total, acc


@triton.jit(do_not_specialize=["layer", "rows", "stride_table"])
def extend_tile(
    query: tl.tensor, arena: tl.tensor, tables: tl.tensor, lines: tl.tensor, lengths: tl.tensor,
    row_starts: tl.tensor, split: tl.tensor, sinks: tl.tensor, out: tl.tensor, partial: tl.tensor,
    lse: tl.tensor,
    layer: tl.tensor, scale: tl.tensor, rows: tl.tensor,
    query_row: tl.tensor, query_head: tl.tensor, stride_table: tl.tensor,
    stride_block: tl.tensor, stride_layer: tl.tensor, stride_side: tl.tensor, stride_head: tl.tensor,
    stride_slot: tl.tensor,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr, SINKS: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: causal attention of one tile of a row's queries, with the query heads of one KV head, to one part
    of what they see. Writes the result to ``out`` if the tile has one part, else to ``partial`` and ``lse``.
    Programs are (program of the split, KV head). A row's last tiles, which see most, start first. Pointers are
    ``query`` to ``lse``; the other tensors are single values."""
    EACH: tl.constexpr = QUERIES // GROUP
    program, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    if program >= tl.load(split + rows * 3):
        return
    row = last_at(split, program, rows, 3)
    within, parts = program - tl.load(split + row * 3), tl.load(split + row * 3 + 2)
    tile, part = within // parts, within % parts
    start, stop = tl.load(row_starts + row).to(tl.int32), tl.load(row_starts + row + 1).to(tl.int32)
    length = tl.load(lengths + row).to(tl.int32)
    members, dims = tl.arange(0, QUERIES), tl.arange(0, WIDE)
    tokens = start + tile * EACH + members // GROUP
    heads = head * GROUP + members % GROUP
    there = (tokens < stop) & (members < EACH * GROUP)
    theirs = there[:, None] & (dims < DIM)[None, :]
    shift = length - stop  # add it to a token's index in the batch for its position
    positions = tokens + shift
    indexes = tokens.to(tl.int64)
    asked = tl.load(
        query + indexes[:, None] * query_row + heads[:, None] * query_head + dims[None, :], theirs, other=0.0
    )
    keys_at = arena + layer.to(tl.int64) * stride_layer + head.to(tl.int64) * stride_head
    values_at = keys_at + stride_side
    table = tables + tl.load(lines + row).to(tl.int64) * stride_table
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    total, acc = tl.zeros([QUERIES], tl.float32), tl.zeros([QUERIES, WIDE], tl.float32)
    lead = start + tile * EACH + shift  # the first query's position
    seen_from = lead * 0
    if WINDOW > 0:
        seen_from = tl.maximum(lead - WINDOW + 1, 0)
    stop_at = tl.minimum(lead + EACH, length)
    low = seen_from // TILE
    tiles = tl.cdiv(stop_at, TILE) - low
    first = (low + part * tiles // parts) * TILE
    end = tl.minimum((low + (part + 1) * tiles // parts) * TILE, stop_at)
    if WINDOW == 0:
        whole = tl.maximum(tl.minimum((lead + 1) // TILE * TILE, end), first)
        best, total, acc = fold_tiles(
            best, total, acc, asked, positions, keys_at, values_at, table, first, whole, seen_from, scale,
            stride_block, stride_slot, WINDOW, SOFT_CAP, DIM, WIDE, BLOCK, TILE, False,
        )  # fmt: skip
        first = whole
    best, total, acc = fold_tiles(
        best, total, acc, asked, positions, keys_at, values_at, table, first, end, seen_from, scale,
        stride_block, stride_slot, WINDOW, SOFT_CAP, DIM, WIDE, BLOCK, TILE, True,
    )  # fmt: skip
    every = tl.num_programs(1) * GROUP
    if parts == 1:
        if SINKS:
            total = with_sink(best, total, tl.load(sinks + heads).to(tl.float32))
        target = out + (indexes * every + heads)[:, None] * DIM + dims[None, :]
        tl.store(target, normal(acc, total).to(out.dtype.element_ty), theirs)
    else:
        entry = (tl.load(split + row * 3 + 1) + within).to(tl.int64)
        cells = (entry * EACH + members // GROUP) * every + heads
        tl.store(partial + cells[:, None] * DIM + dims[None, :], normal(acc, total), theirs)
        tl.store(lse + cells, log_sum(best, total), there)


def extend_attention(
    query: Tensor,
    arena: Tensor,
    layer: int,
    batch: PagedBatch,
    how: Attention,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of each row with several tokens over its own blocks, written to ``out`` ``[tokens,
    q_heads, head_dim]`` (None: a new tensor), which is returned; the tokens of other rows are left as they are.

    ``query``: the same shape; K and V of its tokens are stored already. ``sinks``: ``[q_heads]``, one more
    score per head, without a value (Xiao et al., 2023); None: none.
    """
    group, heads, block, dim = group_of(query, arena), *arena.shape[3:]
    expect_fitting(batch, query, sinks)
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    rows, launch = batch.context_lengths.shape[0], chosen("extend", query, dim, arena.dtype)
    tokens, each = query.shape[0], launch["QUERIES"] // group
    if not rows or tokens < 2:
        return out
    extra = share_of(query.device, PROGRAMS, heads)
    if tokens // each >= extra:  # they fill the device without
        extra = 0
    span = WHOLE if how.window is None else how.window + each + launch["TILE"]
    parts = Parts.of(batch, query, tokens // each + min(rows, tokens // 2), extra, span, each, singles=False)
    extend_tile[(parts.programs, heads)](
        query, readable(arena), batch.tables, batch.lines, batch.context_lengths, batch.row_starts, parts.split,
        sinks, out, parts.values, parts.lse,
        layer, how.scale, rows, query.stride(0), query.stride(1), batch.tables.stride(0), *arena.stride()[:5],
        WINDOW=how.window or 0, SOFT_CAP=how.soft_cap or 0.0, GROUP=group, DIM=dim,
        WIDE=triton.next_power_of_2(dim), BLOCK=block, SINKS=sinks is not None, **launch,
    )  # fmt: skip
    if extra:
        parts.reduce(batch, out, sinks)
    return out
