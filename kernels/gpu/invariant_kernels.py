"""Batch-invariant kernels: attention and matrix products with the same bits for a row in any batch.

Attention: the context is cut every `STRETCH` tokens from position 0, and dealt to `PARTS` programs in turn.
Each reads its stretches in the same tiles and order, and the parts are merged in one order. So a token gets the
same bits alone, in a chunk, or computed again after a preemption. `decode` and `extend` are faster, but cut as
the batch suggests.

Matrix products: one tile size for any number of rows, and each sum runs over the inner axis in one program,
in steps of one length. The vendor's library chooses another algorithm, with another order of sums, for
another number of rows. (He et al., "Defeating nondeterminism in LLM inference", Thinking Machines, 2025.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import PagedBatch
from ..interface import Attention
from .configurations import chosen
from .extend import fold_tiles
from .parts import expect_fitting, finish, merged
from .softmax import log_sum, normal
from .support import expect, group_of, readable

STRETCH = 2048
"""Tokens of the context between two cuts: a multiple of every tile size."""
PARTS = 16
"""How many programs read a long context; each token has scratch for as many results, whatever its context."""


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


@triton.jit(do_not_specialize=["layer", "rows", "stride_table", "stride_part"])
def extend_stretch(
    query: tl.tensor, arena: tl.tensor, tables: tl.tensor, lines: tl.tensor, lengths: tl.tensor,
    starts: tl.tensor, partial: tl.tensor, lse: tl.tensor,
    layer: tl.tensor, scale: tl.tensor, rows: tl.tensor, query_row: tl.tensor, query_head: tl.tensor,
    stride_table: tl.tensor, stride_part: tl.tensor,
    stride_block: tl.tensor, stride_layer: tl.tensor, stride_side: tl.tensor, stride_head: tl.tensor,
    stride_slot: tl.tensor,
    EACH_STRETCH: tl.constexpr, PARTS: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: attend for one tile of a row's queries to every ``PARTS``-th stretch of the context, in order, of
    ``EACH_STRETCH`` tokens each. Writes this partial result of every token in the tile to ``partial`` ``[part,
    token, head, dim]``, and its log-sum-exp to ``lse``; nothing if the tile's last query sees none of the
    stretches. Programs are (query tile, KV head, part). Pointers are ``query`` to ``lse``; the other tensors
    are single values.

    Every tile of keys is masked even if it need not be, so that there is one order of sums.
    """
    EACH: tl.constexpr = QUERIES // GROUP
    tile, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = row_of(starts, tile, rows, EACH)
    start, stop = tl.load(starts + row).to(tl.int32), tl.load(starts + row + 1).to(tl.int32)
    skipped = (tile - (start // EACH + row)) * EACH
    if start + skipped >= stop:
        return
    length = tl.load(lengths + row).to(tl.int32)
    shift = length - stop  # add it to a token's index in the batch for its position
    lead = start + skipped + shift  # the first query's position
    seen_to = tl.minimum(lead + EACH, length)
    if part * EACH_STRETCH >= seen_to:
        return
    members, dims = tl.arange(0, QUERIES), tl.arange(0, WIDE)
    tokens = start + skipped + members // GROUP
    heads = head * GROUP + members % GROUP
    there = (tokens < stop) & (members < EACH * GROUP)
    theirs = there[:, None] & (dims < DIM)[None, :]
    indexes = tokens.to(tl.int64)
    asked = tl.load(
        query + indexes[:, None] * query_row + heads[:, None] * query_head + dims[None, :], theirs, other=0.0
    )
    keys_at = arena + layer.to(tl.int64) * stride_layer + head.to(tl.int64) * stride_head
    table = tables + tl.load(lines + row).to(tl.int64) * stride_table
    seen_from = lead * 0
    if WINDOW > 0:
        seen_from = tl.maximum(lead - WINDOW + 1, 0)
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    total, acc = tl.zeros([QUERIES], tl.float32), tl.zeros([QUERIES, WIDE], tl.float32)
    for begin in tl.range(part * EACH_STRETCH, seen_to, PARTS * EACH_STRETCH):
        best, total, acc = fold_tiles(
            best, total, acc, asked, tokens + shift, keys_at, keys_at + stride_side, table,
            tl.maximum(begin, seen_from // TILE * TILE), tl.minimum(begin + EACH_STRETCH, seen_to), seen_from,
            scale, stride_block, stride_slot, WINDOW, SOFT_CAP, DIM, WIDE, BLOCK, TILE, True,
        )  # fmt: skip
    cells = part.to(tl.int64) * stride_part + indexes * (tl.num_programs(1) * GROUP) + heads
    tl.store(partial + cells[:, None] * DIM + dims[None, :], normal(acc, total), theirs)
    tl.store(lse + cells, log_sum(best, total), there)


@triton.jit
def reduce_stretches(
    partial: tl.tensor, lse: tl.tensor, positions: tl.tensor, sinks: tl.tensor, out: tl.tensor,
    EACH_STRETCH: tl.constexpr, PARTS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, SINKS: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: merge the partial results of `extend_stretch` into ``out``; how many a token has follows from its
    position. Programs are (token, query head). Pointers are ``partial`` to ``out``."""
    head, heads = tl.program_id(1), tl.num_programs(1)
    cell = tl.program_id(0).to(tl.int64) * heads + head
    stretches = (tl.load(positions + tl.program_id(0)) // EACH_STRETCH).to(tl.int32) + 1
    step = tl.num_programs(0) * heads
    best, total, acc = merged(partial, lse, cell, step, tl.minimum(stretches, PARTS), DIM, WIDE, PARTS)
    finish(out + cell * DIM, best, total, acc, sinks, head, DIM, WIDE, SINKS)


def extend_attention(
    query: Tensor, arena: Tensor, layer: int, batch: PagedBatch, how: Attention, sinks: Tensor | None = None
) -> Tensor:
    """Causal attention of each row's tokens over its own blocks, with the same bits in any batch: ``[tokens,
    q_heads, head_dim]``. What is launched depends on the numbers of tokens and rows alone.

    ``query``: the same shape; K and V of its tokens are stored already. ``sinks``: ``[q_heads]``, one more
    score per head, without a value (Xiao et al., 2023); None: none.
    """
    group, heads, block, dim = group_of(query, arena), *arena.shape[3:]
    expect_fitting(batch, query, sinks)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if not query.shape[0]:
        return out
    launch, rows = chosen("stretch", query, dim), batch.context_lengths.shape[0]
    partial = query.new_empty((PARTS, *query.shape), dtype=torch.float32)
    lse = partial.new_empty(partial.shape[:3])
    tiles, wide = query.shape[0] // (launch["QUERIES"] // group) + rows, triton.next_power_of_2(dim)
    extend_stretch[(tiles, heads, PARTS)](
        query, readable(arena), batch.tables, batch.lines, batch.context_lengths, batch.row_starts,
        partial, lse,
        layer, how.scale, rows, query.stride(0), query.stride(1), batch.tables.stride(0), lse.stride(0),
        *arena.stride()[:5],
        EACH_STRETCH=STRETCH, PARTS=PARTS, WINDOW=how.window or 0, SOFT_CAP=how.soft_cap or 0.0, GROUP=group,
        DIM=dim, WIDE=wide, BLOCK=block, **launch,
    )  # fmt: skip
    reduce_stretches[query.shape[:2]](
        partial, lse, batch.positions, sinks, out,
        EACH_STRETCH=STRETCH, PARTS=PARTS, DIM=dim, WIDE=wide, SINKS=sinks is not None, num_warps=4,
    )  # fmt: skip
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
    cells = rows.to(tl.int64)[:, None] * OUT + columns[None, :]
    tl.store(out + cells, acc.to(out.dtype.element_ty), there & wanted)


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
