"""Paged attention of a ragged batch in one launch: chunks behind cached blocks, and single tokens.

A program takes one KV head and a tile of one row's queries: some tokens, and the query heads of each that
share the KV head. The row of a tile is found on the device, so the host needs no lengths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import PagedBatch
from ..interface import Attention
from .configurations import chosen
from .softmax import fold, lines_of, normal, scores_of, wide, with_sink
from .support import expect, group_of, readable


@triton.jit
def row_of(starts: tl.tensor, tile: tl.tensor, rows: tl.tensor, EACH: tl.constexpr) -> tl.tensor:
    """The row that query tile ``tile`` belongs to: the last row that has its first tile at or before it.
    Returns a value. ``starts``: pointer to ``[rows + 1]``, the first token of each row.

    A tile has ``EACH`` tokens. Row r's tiles are numbered from ``starts[r] // EACH + r`` on, so every row has
    enough of them; some stay empty. (As in vLLM's unified attention kernel.)
    """
    low, high = rows * 0, rows
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(starts + middle).to(tl.int32) // EACH + middle
        low = tl.where(first <= tile, middle, low)
        high = tl.where(first <= tile, high, middle)
    return low


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
        lines = lines_of(table, tokens, there, stride_block, stride_slot, BLOCK)
        keys_of, values_of = (
            keys_at + lines[None, :] + dims[:, None],
            values_at + lines[:, None] + dims[None, :],
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
    query: tl.tensor, arena: tl.tensor, tables: tl.tensor, lengths: tl.tensor, starts: tl.tensor,
    sinks: tl.tensor, out: tl.tensor,
    layer: tl.tensor, scale: tl.tensor, rows: tl.tensor,
    query_row: tl.tensor, query_head: tl.tensor, stride_table: tl.tensor,
    stride_block: tl.tensor, stride_layer: tl.tensor, stride_side: tl.tensor, stride_head: tl.tensor,
    stride_slot: tl.tensor,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr, SINKS: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: causal attention of one tile of a row's queries, with the query heads of one KV head, to all that
    they see; writes the result to ``out``. Programs are (query tile, KV head). The last tiles, which see most,
    start first. Pointers are ``query`` to ``out``; the other tensors are single values."""
    EACH: tl.constexpr = QUERIES // GROUP
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    row = row_of(starts, tile, rows, EACH)
    start, stop = tl.load(starts + row).to(tl.int32), tl.load(starts + row + 1).to(tl.int32)
    skipped = (tile - (start // EACH + row)) * EACH
    if start + skipped >= stop:
        return
    length = tl.load(lengths + row).to(tl.int32)
    members, dims = tl.arange(0, QUERIES), tl.arange(0, WIDE)
    tokens = start + skipped + members // GROUP
    heads = head * GROUP + members % GROUP
    theirs = ((tokens < stop) & (members < EACH * GROUP))[:, None] & (dims < DIM)[None, :]
    shift = length - stop  # add it to a token's index in the batch for its position
    positions = tokens + shift
    places = tokens.to(tl.int64)[:, None]
    asked = tl.load(
        query + places * query_row + heads[:, None] * query_head + dims[None, :], theirs, other=0.0
    )
    keys_at = arena + layer.to(tl.int64) * stride_layer + head.to(tl.int64) * stride_head
    values_at = keys_at + stride_side
    table = tables + row.to(tl.int64) * stride_table
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    total, acc = tl.zeros([QUERIES], tl.float32), tl.zeros([QUERIES, WIDE], tl.float32)
    lead = start + skipped + shift  # the first query's position
    end = tl.minimum(lead + EACH, length)
    first, seen_from = lead * 0, lead * 0
    if WINDOW > 0:
        seen_from = tl.maximum(lead - WINDOW + 1, 0)
        first = seen_from // TILE * TILE
    else:
        first = (lead + 1) // TILE * TILE
        best, total, acc = fold_tiles(
            best, total, acc, asked, positions, keys_at, values_at, table, 0, first, seen_from, scale,
            stride_block, stride_slot, WINDOW, SOFT_CAP, DIM, WIDE, BLOCK, TILE, False,
        )  # fmt: skip
    best, total, acc = fold_tiles(
        best, total, acc, asked, positions, keys_at, values_at, table, first, end, seen_from, scale,
        stride_block, stride_slot, WINDOW, SOFT_CAP, DIM, WIDE, BLOCK, TILE, True,
    )  # fmt: skip
    if SINKS:
        total = with_sink(best, total, tl.load(sinks + heads).to(tl.float32))
    target = (places * tl.num_programs(1) * GROUP + heads[:, None]) * DIM + dims[None, :]
    tl.store(out + target, normal(acc, total).to(out.dtype.element_ty), theirs)


def extend_attention(
    query: Tensor, arena: Tensor, layer: int, batch: PagedBatch, how: Attention, sinks: Tensor | None = None
) -> Tensor:
    """Causal attention of each row's tokens over its own blocks: ``[tokens, q_heads, head_dim]``.

    ``query``: the same shape; K and V of its tokens are stored already. ``sinks``: ``[q_heads]``, one more
    score per head, without a value (Xiao et al., 2023); None: none.
    """
    group, heads, block, dim = group_of(query, arena), *arena.shape[3:]
    expect("positions", batch.positions, (query.shape[0],))
    if sinks is not None:
        expect("sinks", sinks, (query.shape[1],))
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    rows = batch.context_lengths.shape[0]
    launch = chosen("extend", query, dim, arena.dtype)
    tiles = query.shape[0] // (launch["QUERIES"] // group) + rows
    if query.shape[0]:
        extend_tile[(tiles, heads)](
            query, readable(arena), batch.tables, batch.context_lengths, batch.row_starts, sinks, out,
            layer, how.scale, rows, query.stride(0), query.stride(1), batch.tables.stride(0),
            *arena.stride()[:5],
            WINDOW=how.window or 0, SOFT_CAP=how.soft_cap or 0.0, GROUP=group, DIM=dim,
            WIDE=triton.next_power_of_2(dim), BLOCK=block, SINKS=sinks is not None, **launch,
        )  # fmt: skip
    return out
