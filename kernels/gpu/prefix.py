"""Decode attention of rows with a common prefix (families): the prefix is read once for all of them, then
merged with their own tails.

The queries of a family's rows are packed into one tile, so a common block is loaded once per tile instead of
once per row. (Cascade inference: Ye et al., 2024; Hydragen: Juravsky et al., 2024.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import Families, PagedBatch
from ..interface import Attention
from .configurations import chosen
from .decode import Parts, decode_attention, merge, read_stretches, stretch_for
from .extend import fold_tiles, row_of
from .softmax import log_sum, normal
from .support import expect, group_of, readable


@triton.jit(do_not_specialize=["layer", "families", "parts", "stride_table"])
def prefix_stretch(
    query: tl.tensor, arena: tl.tensor, tables: tl.tensor, starts: tl.tensor, shared: tl.tensor,
    out: tl.tensor, lse: tl.tensor,
    layer: tl.tensor, scale: tl.tensor, families: tl.tensor, parts: tl.tensor, each: tl.tensor,
    query_row: tl.tensor, query_head: tl.tensor, stride_table: tl.tensor,
    stride_block: tl.tensor, stride_layer: tl.tensor, stride_side: tl.tensor, stride_head: tl.tensor,
    stride_slot: tl.tensor,
    SOFT_CAP: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    QUERIES: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: attend for a tile of a family's rows to one stretch of the family's common prefix, ``each``
    tokens. Writes partial result number ``stretch`` of each of these rows to ``out[row, head, parts, dim]``,
    and its log-sum-exp to ``lse``. Programs are (tile of a family's rows, KV head, stretch). Pointers are
    ``query`` to ``lse``; the other tensors are single values.

    For a family with a prefix too short for such a stretch it writes zeros with a log-sum-exp of -inf.
    """
    EACH: tl.constexpr = QUERIES // GROUP
    tile, head, stretch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    family = row_of(starts, tile, families, EACH)
    start, stop = tl.load(starts + family).to(tl.int32), tl.load(starts + family + 1).to(tl.int32)
    skipped = (tile - (start // EACH + family)) * EACH
    if start + skipped >= stop:
        return
    length = tl.load(shared + family).to(tl.int32)
    members, dims = tl.arange(0, QUERIES), tl.arange(0, WIDE)
    rows = start + skipped + members // GROUP
    heads = head * GROUP + members % GROUP
    there = (rows < stop) & (members < EACH * GROUP)
    theirs = there[:, None] & (dims < DIM)[None, :]
    places = rows.to(tl.int64)
    asked = tl.load(
        query + places[:, None] * query_row + heads[:, None] * query_head + dims[None, :], theirs, other=0.0
    )
    keys_at = arena + layer.to(tl.int64) * stride_layer + head.to(tl.int64) * stride_head
    values_at = keys_at + stride_side
    table = tables + start.to(tl.int64) * stride_table
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    total, acc = tl.zeros([QUERIES], tl.float32), tl.zeros([QUERIES, WIDE], tl.float32)
    first = stretch * each
    end = tl.minimum(first + each, length)
    whole = tl.maximum(end // TILE * TILE, first)
    positions = tl.zeros([QUERIES], tl.int32) + length  # every query stands behind the prefix
    best, total, acc = fold_tiles(
        best, total, acc, asked, positions, keys_at, values_at, table, first, whole, 0, scale,
        stride_block, stride_slot, 0, SOFT_CAP, DIM, WIDE, BLOCK, TILE, False,
    )  # fmt: skip
    if whole < end:
        # Behind the end no key is loaded; its score of zero must not count, so the last position is end - 1.
        best, total, acc = fold_tiles(
            best, total, acc, asked, tl.zeros([QUERIES], tl.int32) + end - 1, keys_at, values_at, table, whole,
            end, 0, scale, stride_block, stride_slot, 0, SOFT_CAP, DIM, WIDE, BLOCK, TILE, True,
        )  # fmt: skip
    part = (places * tl.num_programs(1) * GROUP + heads) * parts + stretch
    tl.store(out + part[:, None] * DIM + dims[None, :], normal(acc, total), theirs)
    tl.store(lse + part, log_sum(best, total), there)


def prefix_attention(
    query: Tensor,
    arena: Tensor,
    layer: int,
    batch: PagedBatch,
    how: Attention,
    families: Families,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one token per row, ``[rows, q_heads, head_dim]``, that reads the common prefix of each
    family of rows once. ``sinks``: ``[q_heads]``, one more score per head, without a value; None: none.

    With a sliding window, or without a common prefix, it is `decode.decode_attention`: a window reads little
    of a prefix.
    """
    rows, q_heads, dim = query.shape
    group, heads, block = group_of(query, arena), arena.shape[3], arena.shape[4]
    expect("context lengths", batch.context_lengths, (rows,))
    expect("family begins", families.begins, (rows,))
    if how.window is not None or not families.longest:
        return decode_attention(query, arena, layer, batch, how, sinks)
    launch, tile = chosen("prefix", query, dim), chosen("decode", query, dim)["TILE"]
    count = families.shared.shape[0]
    tiles = rows // (launch["QUERIES"] // group) + count
    stretch = stretch_for(tiles * heads, families.longest, query.device)
    own = -(-(families.tail + tile) // stretch)  # a tail's first tile begins before it
    shared = -(-families.longest // stretch)
    parts = Parts.empty(query, shared + own, stretch, shared)
    prefix_stretch[(tiles, heads, shared)](
        query, readable(arena), batch.tables, families.starts, families.shared, parts.values, parts.lse,
        layer, how.scale, count, shared + own, stretch,
        query.stride(0), query.stride(1), batch.tables.stride(0), *arena.stride()[:5],
        SOFT_CAP=how.soft_cap or 0.0, GROUP=group, DIM=dim, WIDE=triton.next_power_of_2(dim), BLOCK=block,
        **launch,
    )  # fmt: skip
    read_stretches(query, arena, layer, batch, how, parts, own, begins=families.begins)
    out = torch.empty((rows, q_heads, dim), dtype=query.dtype, device=query.device)
    merge(parts, batch, how, tile, out, begins=families.begins, sinks=sinks)
    return out
