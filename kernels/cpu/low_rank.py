"""Adds to the rows of a product what their adapters make of the input (`kernels.low_rank`).

The matrices are read in one direction, each once for up to `ROWS` rows of one adapter that follow one another.
A row's sums have one order, whatever stands beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from ..low_rank import DEPTH_STEP, RANK_STEP, STRIP
from .compiling import in_order
from .elements import Pointer, memory, narrow, offset, widen
from .vectors import I64, LANES, constant, fused, lines, load, loop, spread, store

ROWS = 16
"""The most rows that are computed together."""


def _tile(rows: int, vectors: int, chains: int) -> Any:
    """Make an intrinsic that adds weighted sums of lines: ``into[r, :] += shares[r] @ values`` for ``rows``
    rows and ``vectors * LANES`` columns. Each sum has ``chains`` parts, of every so many-th line.

    The intrinsic returns nothing. ``shares``, ``values`` and ``into`` are pointers, its other arguments values:
    ``shares`` (the weights, fp32), ``shares_line`` (numbers from line to line), ``values``, ``values_line``,
    ``count`` (lines of values, a positive multiple of ``chains``), ``into`` (fp32), ``into_line``.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(
        typing: Any, shares: Any, shares_line: Any, values: Any, values_line: Any, count: Any, into: Any,
        into_line: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            factor, factor_line, right, right_line, many, total, total_line = args
            kind = values.dtype
            factors = lines(builder, factor, factor_line, rows)
            pointers = [
                builder.gep(line, [I64(vector * LANES)])
                for line in lines(builder, total, total_line, rows)
                for vector in range(vectors)
            ]

            def body(step: Any, sums: list[Any]) -> list[Any]:
                made = []
                for chain in range(chains):
                    at = builder.add(builder.mul(step, I64(chains)), I64(chain))
                    line = builder.gep(right, [builder.mul(at, right_line)])
                    row = [load(builder, kind, builder.gep(line, [I64(v * LANES)])) for v in range(vectors)]
                    each = [spread(builder, builder.load(builder.gep(one, [at]))) for one in factors]
                    pairs = [(share, vector) for share in each for vector in row]
                    olds = sums[chain * len(pairs) : (chain + 1) * len(pairs)]
                    made += [fused(builder, a, b, old) for (a, b), old in zip(pairs, olds, strict=True)]
                return made

            begin = [load(builder, types.float32, pointer) for pointer in pointers]
            begin += [constant(0.0)] * (len(pointers) * (chains - 1))
            sums = loop(builder, builder.udiv(many, I64(chains)), begin, body)
            while len(sums) > len(pointers):
                half = len(sums) // 2
                sums = [builder.fadd(a, b) for a, b in zip(sums[:half], sums[half:], strict=True)]
            for vector, pointer in zip(sums, pointers, strict=True):
                store(builder, vector, pointer)
            return context.get_dummy_value()

        return types.void(shares, shares_line, values, values_line, count, into, into_line), codegen

    return tile


_shrink1, _shrink4 = (_tile(rows, RANK_STEP // LANES, DEPTH_STEP) for rows in (1, 4))
_expand1, _expand4 = (_tile(rows, STRIP // LANES, 1) for rows in (1, 4))


@in_order
def add_to_rows(
    low: int, high: int, x: Pointer, out: Pointer, a: Pointer, b: Pointer, ranks: Pointer, starts: Pointer,
    slots: Pointer, k: int, n: int, depth: int, parts: int, room: int, strips: int, tag: Any,
) -> None:  # fmt: skip
    """Add to each of the rows ``[low, high)`` of ``out`` ``[rows, n]`` what the pairs in its slot make of its
    row of ``x`` ``[rows, k]``; slot -1: nothing. Arrays as in `LowRank`; ``slots``: int64 ``[rows]``;
    ``depth``, ``room``: the sizes of ``a``; ``strips``: of ``b`` in a slot. ``tag``: a number of the element
    type."""
    given, thin = np.zeros((ROWS, depth), np.float32), np.empty((ROWS, room), np.float32)
    wide = np.zeros((ROWS, STRIP), np.float32)
    at = low
    while at < high:
        slot, end = slots[at], at + 1
        while end < high and end - at < ROWS and slots[end] == slot:
            end += 1
        rows, strip = end - at, slot * strips
        if slot < 0:
            at = end
            continue
        for row in range(rows):
            line, source = given[row], offset(x, (at + row) * k)
            for i in range(k):
                line[i] = widen(source[i])
        for part in range(parts):
            first, last, rank = starts[part], starts[part + 1], ranks[slot * parts + part]
            if rank == 0:
                strip += (last - first + STRIP - 1) // STRIP
                continue
            thin[:rows] = 0
            down = offset(a, (slot * parts + part) * depth * room)
            for step in range(0, rank, RANK_STEP):
                row = 0
                while row < rows:
                    shares, into = memory(given[row]), memory(thin[row, step:])
                    if rows - row >= 4:
                        _shrink4(shares, depth, offset(down, step), room, depth, into, room)
                        row += 4
                    else:
                        _shrink1(shares, depth, offset(down, step), room, depth, into, room)
                        row += 1
            for column in range(first, last, STRIP):
                width, up = min(STRIP, last - column), offset(b, strip * room * STRIP)
                strip += 1
                for row in range(rows):
                    line, to = wide[row], offset(out, (at + row) * n + column)
                    for i in range(width):
                        line[i] = widen(to[i])
                row = 0
                while row < rows:
                    shares, into = memory(thin[row]), memory(wide[row])
                    if rows - row >= 4:
                        _expand4(shares, room, up, STRIP, rank, into, STRIP)
                        row += 4
                    else:
                        _expand1(shares, room, up, STRIP, rank, into, STRIP)
                        row += 1
                for row in range(rows):
                    line, to = wide[row], offset(out, (at + row) * n + column)
                    for i in range(width):
                        to[i] = narrow(line[i], tag)
        at = end
