"""What adapters add to the rows of a product (SGMV): each row by the pairs in its own slot.

Programs are (tile of rows, slot, ...). A program ends at once if no row of its tile has its slot. So rows need
not be sorted, and what is launched depends on shapes alone. Tiles have one size, and each sum runs in one
order: a row has the same bits in any batch. (Chen et al., "Punica: multi-tenant LoRA serving", 2023.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..low_rank import DEPTH_STEP, RANK_STEP, STRIP, LowRank
from .configurations import chosen
from .support import expect

LENGTH = 1024
"""So many numbers of a row are multiplied by one program; the sums of several are added in their order."""


@triton.jit(do_not_specialize=["tokens"])
def shrink_rows(
    x: tl.tensor, a: tl.tensor, ranks: tl.tensor, slots: tl.tensor, thin: tl.tensor, tokens: tl.tensor,
    IN: tl.constexpr, LINES: tl.constexpr, PARTS: tl.constexpr, ROOM: tl.constexpr, EACH: tl.constexpr,
    ROWS: tl.constexpr, RANK: tl.constexpr, DEPTH: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: ``x @ a`` for ``ROWS`` rows, ``RANK`` of one part's rank, and ``EACH`` numbers of a row, of the
    rows whose slot this program has. Written to ``thin``, fp32 ``[piece of the row, token, part, rank]``.
    Programs are (tile of rows, slot, piece and part and tile of the rank). All but ``tokens`` are pointers."""
    slot, work = tl.program_id(1), tl.program_id(2)
    step = work % (ROOM // RANK)
    part, piece = work // (ROOM // RANK) % PARTS, work // (ROOM // RANK) // PARTS
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mine = tl.load(slots + rows, rows < tokens, other=-1) == slot
    if tl.sum(mine.to(tl.int32)) == 0:
        return
    if step * RANK >= tl.load(ranks + slot * PARTS + part):
        return
    lines, depth = step * RANK + tl.arange(0, RANK), tl.arange(0, DEPTH)
    x_at = x + rows.to(tl.int64)[:, None] * IN + depth[None, :]
    a_at = a + ((slot * PARTS + part).to(tl.int64) * LINES + depth)[:, None] * ROOM + lines[None, :]
    acc = tl.zeros([ROWS, RANK], tl.float32)
    for at in tl.range(piece * EACH, tl.minimum(piece * EACH + EACH, IN), DEPTH):
        inside = at + depth < IN
        left = tl.load(x_at + at, mine[:, None] & inside[None, :], other=0.0)
        right = tl.load(a_at + at * ROOM, inside[:, None], other=0.0)
        acc = tl.dot(left, right, acc, input_precision="tf32x3")
    cells = ((piece * tokens + rows).to(tl.int64) * PARTS + part) * ROOM
    tl.store(thin + cells[:, None] + lines[None, :], acc, mine[:, None])


@triton.jit(do_not_specialize=["tokens"])
def expand_rows(
    thin: tl.tensor, b: tl.tensor, ranks: tl.tensor, slots: tl.tensor, out: tl.tensor, tokens: tl.tensor,
    PIECES: tl.constexpr, PARTS: tl.constexpr, ROOM: tl.constexpr, OUT: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, STRIPS: tl.constexpr, STRIP: tl.constexpr,
    ROWS: tl.constexpr, RANK: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: add ``thin @ b`` to ``ROWS`` rows and ``COLUMNS`` columns of ``out`` ``[tokens, OUT]``, of the
    rows whose slot this program has. ``FIRST``, ``SECOND``: the columns of the first two parts. Programs are
    (tile of rows, slot, tile of a part's columns). All but ``tokens`` are pointers."""
    slot, tile = tl.program_id(1), tl.program_id(2)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mine = tl.load(slots + rows, rows < tokens, other=-1) == slot
    if tl.sum(mine.to(tl.int32)) == 0:
        return
    ONE: tl.constexpr = (FIRST + COLUMNS - 1) // COLUMNS
    TWO: tl.constexpr = ONE + (SECOND + COLUMNS - 1) // COLUMNS
    part = (tile >= ONE).to(tl.int32) + (tile >= TWO).to(tl.int32)
    start = tl.where(part == 0, 0, tl.where(part == 1, FIRST, FIRST + SECOND))
    width = tl.where(part == 0, FIRST, tl.where(part == 1, SECOND, OUT - FIRST - SECOND))
    TWO_STRIPS: tl.constexpr = (FIRST + STRIP - 1) // STRIP
    THREE_STRIPS: tl.constexpr = TWO_STRIPS + (SECOND + STRIP - 1) // STRIP
    strip = tl.where(part == 0, 0, tl.where(part == 1, TWO_STRIPS, THREE_STRIPS))
    tile -= tl.where(part == 0, 0, tl.where(part == 1, ONE, TWO))
    rank = tl.load(ranks + slot * PARTS + part).to(tl.int32)
    if rank == 0:
        return
    columns, lines = tile * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, RANK)
    wanted = columns < width
    strips = slot.to(tl.int64) * STRIPS + strip + columns // STRIP
    b_at = b + strips[None, :] * (ROOM * STRIP) + lines[:, None] * STRIP + (columns % STRIP)[None, :]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in tl.range(0, rank, RANK):
        left = tl.zeros([ROWS, RANK], tl.float32)
        for piece in tl.static_range(PIECES):
            parts = ((piece * tokens + rows).to(tl.int64) * PARTS + part) * ROOM + at
            left += tl.load(thin + parts[:, None] + lines[None, :], mine[:, None], other=0.0)
        right = tl.load(b_at + at * STRIP, wanted[None, :], other=0.0).to(tl.float32)
        acc = tl.dot(left, right, acc, input_precision="tf32x3")
    cells = out + rows.to(tl.int64)[:, None] * OUT + (start + columns)[None, :]
    there = mine[:, None] & wanted[None, :]
    acc += tl.load(cells, there, other=0.0).to(tl.float32)
    tl.store(cells, acc.to(out.dtype.element_ty), there)


def add_low_rank(out: Tensor, x: Tensor, pairs: LowRank, slots: Tensor) -> None:
    """Add to each row of ``out`` ``[tokens, out]``, in place, what the pairs in its slot make of its row of
    ``x`` ``[tokens, in]``. ``slots``: int64 ``[tokens]``, -1 for a row to which nothing is added. The sums are
    in fp32, and rounded once. At most three parts. Raises ValueError for shapes or types that do not fit."""
    tokens, width = x.shape
    held, parts, lines, room = pairs.a.shape
    expect("x", x, (tokens, width))
    expect("out", out, (tokens, sum(pairs.widths)))
    expect("a", pairs.a, (held, parts, -(-width // DEPTH_STEP) * DEPTH_STEP, room))
    expect("slots", slots, (tokens,))
    if not pairs.a.dtype == pairs.b.dtype == x.dtype == out.dtype or parts > 3:
        raise ValueError(f"pairs of {pairs.a.dtype} in {parts} parts, x of {x.dtype}, out of {out.dtype}")
    if not tokens:
        return
    pieces = triton.cdiv(width, LENGTH)
    thin = x.new_empty((pieces, tokens, parts, room), dtype=torch.float32)
    launch = chosen("shrink", x, width)
    tiles = triton.cdiv(tokens, launch["ROWS"])
    shrink_rows[(tiles, held, pieces * parts * (room // launch["RANK"]))](
        x, pairs.a, pairs.ranks, slots, thin, tokens,
        IN=width, LINES=lines, PARTS=parts, ROOM=room, EACH=LENGTH, **launch,
    )  # fmt: skip
    launch = chosen("expand", x, width)
    columns = sum(triton.cdiv(one, launch["COLUMNS"]) for one in pairs.widths)
    first, second, *_ = (*pairs.widths, 0, 0)
    expand_rows[(triton.cdiv(tokens, launch["ROWS"]), held, columns)](
        thin, pairs.b, pairs.ranks, slots, out, tokens,
        PIECES=pieces, PARTS=parts, ROOM=room, OUT=out.shape[1], FIRST=first, SECOND=second,
        STRIPS=pairs.b.shape[1], STRIP=STRIP, RANK=RANK_STEP, **launch,
    )  # fmt: skip
