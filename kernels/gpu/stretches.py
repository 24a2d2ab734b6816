"""Attention of a ragged batch whose every token has the same bits in any company and any chunk.

Whether a token comes alone, in a chunk, or is computed again after a preemption, its context is cut at the
same places, `STRETCH` tokens apart from position 0, each cut is read by the same tiles, and the cuts are merged
in one order. `decode` and `extend` are faster, and cut as the batch suggests.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import PagedBatch
from ..interface import Attention
from .configurations import chosen
from .decode import Parts, merge
from .extend import fold_tiles, row_of
from .softmax import log_sum, normal
from .support import expect, group_of, readable

STRETCH = 2048
"""Tokens between two cuts: a multiple of every tile."""


@triton.jit(do_not_specialize=["layer", "rows", "parts", "stride_table"])
def extend_stretch(
    query: tl.tensor, arena: tl.tensor, tables: tl.tensor, lengths: tl.tensor, starts: tl.tensor,
    out: tl.tensor, lse: tl.tensor,
    layer: tl.tensor, scale: tl.tensor, rows: tl.tensor, parts: tl.tensor,
    query_row: tl.tensor, query_head: tl.tensor, stride_table: tl.tensor,
    stride_block: tl.tensor, stride_layer: tl.tensor, stride_side: tl.tensor, stride_head: tl.tensor,
    stride_slot: tl.tensor,
    EACH_PART: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Part ``stretch`` of every token that sees into it; programs are (query tile, KV head, stretch).

    Every tile is masked, whether or not it need be: one path, one order of summing.
    """
    EACH: tl.constexpr = QUERIES // GROUP
    tile, head, stretch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = row_of(starts, tile, rows, EACH)
    start, stop = tl.load(starts + row).to(tl.int32), tl.load(starts + row + 1).to(tl.int32)
    skipped = (tile - (start // EACH + row)) * EACH
    if start + skipped >= stop:
        return
    length = tl.load(lengths + row).to(tl.int32)
    shift = length - stop  # from a token's place in the batch to its position
    lead = start + skipped + shift  # the first query's position
    begin = stretch * EACH_PART
    end = tl.minimum(tl.minimum(lead + EACH, length), begin + EACH_PART)
    if begin >= end:
        return
    members, dims = tl.arange(0, QUERIES), tl.arange(0, WIDE)
    tokens = start + skipped + members // GROUP
    heads = head * GROUP + members % GROUP
    there = (tokens < stop) & (members < EACH * GROUP)
    theirs = there[:, None] & (dims < DIM)[None, :]
    places = tokens.to(tl.int64)
    asked = tl.load(
        query + places[:, None] * query_row + heads[:, None] * query_head + dims[None, :], theirs, other=0.0
    )
    keys_at = arena + layer.to(tl.int64) * stride_layer + head.to(tl.int64) * stride_head
    seen_from = lead * 0
    if WINDOW > 0:
        seen_from = tl.maximum(lead - WINDOW + 1, 0)
        begin = tl.maximum(begin, seen_from // TILE * TILE)
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    total, acc = tl.zeros([QUERIES], tl.float32), tl.zeros([QUERIES, WIDE], tl.float32)
    best, total, acc = fold_tiles(
        best, total, acc, asked, tokens + shift, keys_at, keys_at + stride_side,
        tables + row.to(tl.int64) * stride_table, begin, end, seen_from, scale, stride_block,
        stride_slot, WINDOW, SOFT_CAP, DIM, WIDE, BLOCK, TILE, True,
    )  # fmt: skip
    part = (places * tl.num_programs(1) * GROUP + heads) * parts + stretch
    tl.store(out + part[:, None] * DIM + dims[None, :], normal(acc, total), theirs)
    tl.store(lse + part, log_sum(best, total), there)


def extend_attention(
    query: Tensor, arena: Tensor, layer: int, batch: PagedBatch, how: Attention, sinks: Tensor | None = None
) -> Tensor:
    """Causal attention of each row's tokens over its own blocks: as `extend.extend_attention`."""
    group, heads, block, dim = group_of(query, arena), *arena.shape[3:]
    expect("positions", batch.positions, (query.shape[0],))
    if sinks is not None:
        expect("sinks", sinks, (query.shape[1],))
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if not query.shape[0]:
        return out
    launch, rows = chosen("stretch", query, dim), batch.context_lengths.shape[0]
    count = -(-batch.tables.shape[1] * block // STRETCH)
    parts = Parts.empty(query, count, STRETCH)
    tiles = query.shape[0] // (launch["QUERIES"] // group) + rows
    extend_stretch[(tiles, heads, count)](
        query, readable(arena), batch.tables, batch.context_lengths, batch.row_starts, parts.values, parts.lse,
        layer, how.scale, rows, count, query.stride(0), query.stride(1), batch.tables.stride(0),
        *arena.stride()[:5],
        EACH_PART=STRETCH, WINDOW=how.window or 0, SOFT_CAP=how.soft_cap or 0.0, GROUP=group, DIM=dim,
        WIDE=triton.next_power_of_2(dim), BLOCK=block, **launch,
    )  # fmt: skip
    seen = replace(batch, context_lengths=batch.positions + 1)  # a token is a row of its own from here on
    merge(parts, seen, replace(how, window=None), launch["TILE"], out, sinks=sinks)
    return out
