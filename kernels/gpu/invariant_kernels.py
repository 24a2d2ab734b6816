"""Batch-invariant kernels: attention and matrix products with the same bits for a row in any batch.

Attention: the context is cut every `STRETCH` tokens from position 0, each cut is read in the same tiles, and
the cuts are merged in one order. So a token gets the same bits alone, in a chunk, or computed again after a
preemption. `decode` and `extend` are faster, but cut as the batch suggests.

Matrix products: one tile size for any number of rows, and each sum runs over the inner axis in one program,
in steps of one length. The vendor's library chooses another algorithm, with another order of sums, for
another number of rows. (He et al., "Defeating nondeterminism in LLM inference", Thinking Machines, 2025.)
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
"""Tokens of the context between two cuts: a multiple of every tile size."""


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
    """Kernel: attend for one tile of a row's queries to one stretch of the context, ``EACH_PART`` tokens.
    Writes partial result number ``stretch`` of every token in the tile to ``out[token, head, parts, dim]``, and
    its log-sum-exp to ``lse``; nothing for a stretch behind the tile's last query. Programs are (query tile, KV
    head, stretch). Pointers are ``query`` to ``lse``; the other tensors are single values.

    Every tile of keys is masked even if it need not be, so that there is one order of sums.
    """
    EACH: tl.constexpr = QUERIES // GROUP
    tile, head, stretch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = row_of(starts, tile, rows, EACH)
    start, stop = tl.load(starts + row).to(tl.int32), tl.load(starts + row + 1).to(tl.int32)
    skipped = (tile - (start // EACH + row)) * EACH
    if start + skipped >= stop:
        return
    length = tl.load(lengths + row).to(tl.int32)
    shift = length - stop  # add it to a token's index in the batch for its position
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
    """Causal attention of each row's tokens over its own blocks, with the same bits in any batch: ``[tokens,
    q_heads, head_dim]``.

    ``query``: the same shape; K and V of its tokens are stored already. ``sinks``: ``[q_heads]``, one more
    score per head, without a value (Xiao et al., 2023); None: none.
    """
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
    seen = replace(batch, context_lengths=batch.positions + 1)  # each token is its own row here
    merge(parts, seen, replace(how, window=None), launch["TILE"], out, sinks=sinks)
    return out


# --- matrix products ----------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["tokens"])
def product_tile(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, out: tl.tensor,
    tokens: tl.tensor, stride_x: tl.tensor, stride_weight: tl.tensor,
    IN: tl.constexpr, OUT: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: one tile of ``x @ weight.T + bias``, ``ROWS`` tokens by ``COLUMNS`` outputs, written to ``out``.
    Programs are numbered down the rows, then over the columns. Pointers are ``x`` to ``out``; the other tensors
    are single values."""
    down = tl.cdiv(tokens, ROWS)
    rows = tl.program_id(0) % down * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) // down * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    there, wanted = (rows < tokens)[:, None], (columns < OUT)[None, :]
    x_at = x + rows.to(tl.int64)[:, None] * stride_x + depth[None, :]
    weight_at = weight + columns.to(tl.int64)[None, :] * stride_weight + depth[:, None]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in tl.range(0, IN, DEPTH):
        if IN % DEPTH == 0:
            left, right = tl.load(x_at + at, there, other=0.0), tl.load(weight_at + at, wanted, other=0.0)
        else:
            inside = at + depth < IN
            left = tl.load(x_at + at, there & inside[None, :], other=0.0)
            right = tl.load(weight_at + at, wanted & inside[:, None], other=0.0)
        acc = tl.dot(left, right, acc, input_precision="tf32x3")
    if BIAS:
        acc += tl.load(bias + columns, columns < OUT, other=0.0).to(tl.float32)[None, :]
    places = rows.to(tl.int64)[:, None] * OUT + columns[None, :]
    tl.store(out + places, acc.to(out.dtype.element_ty), there & wanted)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, each row with the same bits in any batch: ``[tokens, in]``, ``[out, in]``,
    ``[out]`` to ``[tokens, out]``, of x's type. Raises ValueError for other shapes or types."""
    tokens, width = x.shape
    outs = weight.shape[0]
    expect("x", x, (tokens, width))
    expect("weight", weight, (outs, width))
    if bias is not None:
        expect("bias", bias, (outs,))
    if weight.dtype != x.dtype:
        raise ValueError(f"weight is {weight.dtype}, x {x.dtype}")
    out = torch.empty((tokens, outs), dtype=x.dtype, device=x.device)
    launch = chosen("product", x, width)
    if tokens:
        tiles = triton.cdiv(tokens, launch["ROWS"]) * triton.cdiv(outs, launch["COLUMNS"])
        product_tile[(tiles,)](
            x, weight, bias, out, tokens, x.stride(0), weight.stride(0),
            IN=width, OUT=outs, BIAS=bias is not None, **launch,
        )  # fmt: skip
    return out
