"""How contexts are cut into parts that programs attend to at once, and how the parts' results are merged.

A tile of a row's queries (for decode, its one token) has one part or several, and a program computes one part.
The number of parts is decided on the device, from lengths that the host does not read. The host bounds the
number of programs and the scratch memory by the batch's shape and the device alone, so a captured launch holds
for any lengths.

    programs   | row 0, tile 0: part 0 | part 1 | tile 1: part 0 | part 1 | row 1, tile 0: part 0 | … | unused
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import PagedBatch
from .configurations import multiprocessors
from .softmax import LOG2E
from .support import expect

SHORTEST = 256
"""The fewest tokens of context that are cut off for a program of their own."""
WHOLE = 2**30
"""More tokens than any context has."""


@triton.jit
def last_at(starts: tl.tensor, number: tl.tensor, rows: tl.tensor, STEP: tl.constexpr) -> tl.tensor:
    """The last row with a start at or before ``number``; a value. ``starts``: pointer to the rows' starts,
    which ascend, ``STEP`` numbers apart."""
    low, high = rows * 0, rows
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(starts + middle * STEP) <= number
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def tiles_of(
    row_starts: tl.tensor, lengths: tl.tensor, numbers: tl.tensor, rows: tl.tensor, most: tl.tensor,
    EACH: tl.constexpr, SINGLES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """For each of the rows ``numbers`` how many tiles of queries it has (none if it is not of the kind that
    `split_parts` cuts), and how many tokens such a tile attends to, at most ``most``."""
    there = numbers < rows
    start = tl.load(row_starts + numbers, there, other=0)
    count = (tl.load(row_starts + numbers + 1, there, other=0) - start).to(tl.int32)
    if SINGLES:
        tiles = (count == 1).to(tl.int32)
    else:
        tiles = tl.where(count > 1, (count + EACH - 1) // EACH, 0)
    length = tl.load(lengths + numbers, there, other=1).to(tl.int32)
    return tiles, tl.maximum(tl.minimum(length, most), 1)


@triton.jit(do_not_specialize=["rows", "most", "shortest", "extra"])
def split_parts(
    row_starts: tl.tensor, lengths: tl.tensor, split: tl.tensor,
    rows: tl.tensor, most: tl.tensor, shortest: tl.tensor, extra: tl.tensor,
    EACH: tl.constexpr, SINGLES: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel, of one program: cut the contexts of the rows of one token (``SINGLES``) or of those of several,
    in tiles of ``EACH``. Writes to ``split`` ``[rows + 1, 3]`` for each row its first program, its first entry
    in scratch and the parts of each of its tiles; in the end the number of programs. Pointers are
    ``row_starts`` to ``split``; the other tensors are single values.

    A part has about ``stretch`` tokens, so that all tiles together have at most ``extra`` parts beyond their
    first: floor((span - 1) / stretch) of each, and the sum of (span - 1) / stretch is at most ``extra``.
    So a row of one token with a context of one, which pads a batch, changes no other row's parts.
    """
    total = (rows * 0).to(tl.int64)
    for at in tl.range(0, rows, ROWS):
        tiles, span = tiles_of(row_starts, lengths, at + tl.arange(0, ROWS), rows, most, EACH, SINGLES)
        total += tl.sum(tiles.to(tl.int64) * (span - 1), 0)
    stretch = tl.maximum((total + extra - 1) // extra, shortest)
    first, used = rows * 0, rows * 0
    for at in tl.range(0, rows, ROWS):
        numbers = at + tl.arange(0, ROWS)
        tiles, span = tiles_of(row_starts, lengths, numbers, rows, most, EACH, SINGLES)
        parts = tl.where(tiles > 0, ((span - 1) // stretch).to(tl.int32) + 1, 0)
        programs = tiles * parts
        entries = tl.where(parts > 1, programs, 0)
        own = split + numbers * 3
        tl.store(own, first + tl.cumsum(programs, 0) - programs, numbers < rows)
        tl.store(own + 1, used + tl.cumsum(entries, 0) - entries, numbers < rows)
        tl.store(own + 2, parts, numbers < rows)
        first += tl.sum(programs, 0)
        used += tl.sum(entries, 0)
    tl.store(split + rows * 3, first)


@triton.jit
def merged(
    partial: tl.tensor, lse: tl.tensor, first: tl.tensor, step: tl.tensor, parts: tl.tensor,
    DIM: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Merge a query's partial results, weighted by their log-sum-exps, `PARTS` at a time: the state of its
    softmax, as `softmax.fold` returns it. They lie ``step`` apart from ``first`` on in ``partial`` ``[…, dim]``
    and in ``lse``, both pointers. Each order of sums follows from ``parts`` alone."""
    numbers, dims = tl.arange(0, PARTS), tl.arange(0, WIDE)
    best, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    acc = tl.zeros([WIDE], tl.float32)
    for at in tl.range(0, parts, PARTS):
        there = at + numbers < parts
        cells = first + (at + numbers).to(tl.int64) * step
        logs = tl.load(lse + cells, there, other=float("-inf"))
        values = tl.load(
            partial + cells[:, None] * DIM + dims[None, :], there[:, None] & (dims < DIM)[None, :], other=0.0
        )
        top = tl.maximum(best, tl.max(logs, 0))
        safe = tl.where(top == float("-inf"), 0.0, top)
        weights, decay = tl.math.exp2(logs - safe), tl.math.exp2(best - safe)
        total = total * decay + tl.sum(weights, 0)
        acc = acc * decay + tl.sum(weights[:, None] * values, 0)
        best = top
    return best, total, acc


@triton.jit
def finish(
    target: tl.tensor, best: tl.tensor, total: tl.tensor, acc: tl.tensor, sinks: tl.tensor, head: tl.tensor,
    DIM: tl.constexpr, WIDE: tl.constexpr, SINKS: tl.constexpr,
) -> None:  # fmt: skip
    """Write a query's result to the pointer ``target``, from the state that `merged` returns and, with
    ``SINKS``, the head's attention sink."""
    if SINKS:
        total += tl.math.exp2(tl.load(sinks + head).to(tl.float32) * LOG2E - best)
    dims = tl.arange(0, WIDE)
    tl.store(target + dims, (acc / total).to(target.dtype.element_ty), dims < DIM)


@triton.jit(do_not_specialize=["rows"])
def reduce_parts(
    partial: tl.tensor, lse: tl.tensor, split: tl.tensor, row_starts: tl.tensor, sinks: tl.tensor,
    out: tl.tensor, rows: tl.tensor,
    DIM: tl.constexpr, WIDE: tl.constexpr, EACH: tl.constexpr, SINGLES: tl.constexpr, SINKS: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: merge the partial results of a query with several parts into ``out``. Programs are (row, query
    head) with ``SINGLES``, else (token, query head). Pointers are ``partial`` to ``out``."""
    row, head = tl.program_id(0), tl.program_id(1)
    token = row.to(tl.int64)
    if SINGLES:
        token = tl.load(row_starts + row)
    else:
        row = last_at(row_starts, token, rows, 1)
    used, parts = tl.load(split + row * 3 + 1), tl.load(split + row * 3 + 2)
    if parts <= 1 or token >= tl.load(row_starts + row + 1):
        return
    within = (token - tl.load(row_starts + row)).to(tl.int32)
    heads = tl.num_programs(1)
    first = ((used + within // EACH * parts).to(tl.int64) * EACH + within % EACH) * heads + head
    best, total, acc = merged(partial, lse, first, EACH * heads, parts, DIM, WIDE, PARTS)
    finish(out + (token * heads + head) * DIM, best, total, acc, sinks, head, DIM, WIDE, SINKS)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a batch's rows of one token, or of its rows of several (``singles``), in tiles of ``each``
    tokens.

    ``split``: what `split_parts` wrote. ``programs``: how many a launch needs for each KV head. ``values``:
    scratch, fp32 ``[entries, each, q_heads, dim]``, for the partial results of tiles with several parts;
    ``lse``: ``[entries, each, q_heads]``, their log-sum-exps to base 2. All sizes depend only on the numbers of
    tokens and rows and on the device.
    """

    split: Tensor
    programs: int
    values: Tensor
    lse: Tensor
    each: int
    singles: bool

    @classmethod
    def of(
        cls, batch: PagedBatch, query: Tensor, tiles: int, extra: int, span: int, each: int, *, singles: bool
    ) -> Parts:
        """Cut contexts into parts, once for all layers alike, and allocate scratch. ``query`` ``[tokens,
        q_heads, dim]``. ``tiles``: at most as many as there are. ``extra``: how many parts there may be beyond
        one for each tile; 0: none. ``span``: at most as many tokens as a tile attends to."""
        rows, heads, dim = batch.context_lengths.shape[0], *query.shape[1:]
        key = (span, each, extra, singles)
        split = batch.splits.get(key)
        if split is None:
            split = torch.empty((rows + 1, 3), dtype=torch.int32, device=query.device)
            split_parts[(1,)](
                batch.row_starts, batch.context_lengths, split, rows, span, SHORTEST if extra else WHOLE,
                max(extra, 1), EACH=each, SINGLES=singles, ROWS=1024, num_warps=4,
            )  # fmt: skip
            batch.splits[key] = split
        # A tile with n parts has n - 1 beyond its first: those with several have at most 2 * extra together.
        values = query.new_empty((2 * extra, each, heads, dim), dtype=torch.float32)
        return cls(split, tiles + extra, values, values.new_empty(values.shape[:3]), each, singles)

    def reduce(self, batch: PagedBatch, out: Tensor, sinks: Tensor | None) -> None:
        """Merge the results of tiles with several parts into ``out`` ``[tokens, q_heads, dim]``. ``sinks``:
        ``[q_heads]``, one more score per head, without a value; None: none."""
        tokens, heads, dim = out.shape
        rows = batch.context_lengths.shape[0]
        reduce_parts[(rows if self.singles else tokens, heads)](
            self.values, self.lse, self.split, batch.row_starts, sinks, out, rows,
            DIM=dim, WIDE=triton.next_power_of_2(dim), EACH=self.each, SINGLES=self.singles,
            SINKS=sinks is not None, PARTS=32, num_warps=4,
        )  # fmt: skip


def share_of(device: torch.device, programs: int, kv_heads: int) -> int:
    """How many programs each KV head has if each multiprocessor has ``programs`` of them."""
    return -(-programs * multiprocessors(device) // kv_heads)


def expect_fitting(batch: PagedBatch, query: Tensor, sinks: Tensor | None) -> None:
    """Raise ValueError unless a batch, its queries and sinks fit one another."""
    rows = batch.context_lengths.shape[0]
    expect("positions", batch.positions, (query.shape[0],))
    expect("row starts", batch.row_starts, (rows + 1,))
    expect("lines", batch.lines, (rows,))
    if sinks is not None:
        expect("sinks", sinks, (query.shape[1],))
