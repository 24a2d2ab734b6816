"""Dot products and weighted sums of lines (rows of numbers in memory), in tiles that keep their sums in
vector registers.

The tiles are LLVM IR, as loops would compile badly. They take pointers to elements and the distance between
lines. Each number depends on its own two lines only, not on how many others are computed with it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .compiling import inlined
from .elements import Pointer, offset, widen
from .vectors import (
    HALVES,
    I64,
    LANES,
    WIDE,
    WORDS,
    constant,
    fused,
    fused_pairs,
    greater,
    lines,
    load,
    loop,
    multiplies_bf16,
    picked,
    raw,
    spread,
    store,
    summed,
)

DEPTH = 2 * LANES
"""How many numbers of each line `dot_tile` multiplies at a time."""
CHUNK = 4 * LANES
"""How many columns a wide tile of `weigh_tile` adds to; a narrow one adds to `LANES`."""


def columns_for(rows: int) -> int:
    """How many columns a tile of `dot_tile` has with ``rows`` (1 to 4) rows, so that it has 8 to 16 sums."""
    return 8 if rows <= 2 else 4


def dot_tile(rows: int) -> Any:
    """Make an intrinsic that computes a tile of dot products: ``sums[r, c] = x[r] . w[c]`` for ``rows`` (1 to
    4) lines of x and ``columns_for(rows)`` lines of w.

    The intrinsic returns nothing. ``x``, ``w`` and ``sums`` are pointers, its other arguments values: ``x``,
    ``x_line`` (numbers from line to line), ``w``, ``w_line``, ``depth`` (numbers of a line, a positive multiple
    of `DEPTH`), ``sums`` (fp32), ``sums_line``. bfloat16 is multiplied directly if the processor can
    (``vdpbf16ps``: exact products, fp32 sums), everything else in fp32.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(
        typing: Any, x: Any, x_line: Any, w: Any, w_line: Any, depth: Any, sums: Any, sums_line: Any
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            left, left_line, right, right_line, deep, into, into_line = args
            kind, columns = x.dtype, columns_for(rows)
            a = lines(builder, left, left_line, rows)
            b = lines(builder, right, right_line, columns)
            multiply = _pairs if kind == types.uint16 and multiplies_bf16() else _widened

            def body(step: Any, sums: list[Any]) -> list[Any]:
                at = builder.mul(step, I64(DEPTH))
                return multiply(builder, kind, [builder.gep(one, [at]) for one in a],
                                [builder.gep(one, [at]) for one in b], sums)  # fmt: skip

            nothing = [ir.Constant(WIDE, None)] * (rows * columns)
            steps = builder.lshr(deep, I64(DEPTH.bit_length() - 1))
            found = summed(builder, loop(builder, steps, nothing, body))
            for row in range(rows):
                place = builder.gep(into, [builder.mul(I64(row), into_line)])
                store(builder, picked(builder, found, range(row * columns, (row + 1) * columns)), place)
            return context.get_dummy_value()

        return types.void(x, x_line, w, w_line, depth, sums, sums_line), codegen

    return tile


def weigh_tile(rows: int, vectors: int) -> Any:
    """Make an intrinsic that adds weighted sums of lines: ``into[r, :] += shares[r] @ values`` for ``rows`` (1
    to 4) rows and ``vectors * LANES`` columns.

    The intrinsic returns nothing. ``shares``, ``values`` and ``into`` are pointers, its other arguments values:
    ``shares`` (the weights, fp32), ``shares_line`` (numbers from line to line), ``values``, ``values_line``,
    ``count`` (lines of values, at least one), ``into`` (fp32), ``into_line``.
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
            places = [
                builder.gep(line, [I64(vector * LANES)])
                for line in lines(builder, total, total_line, rows)
                for vector in range(vectors)
            ]

            def body(step: Any, sums: list[Any]) -> list[Any]:
                line = builder.gep(right, [builder.mul(step, right_line)])
                row = [load(builder, kind, builder.gep(line, [I64(v * LANES)])) for v in range(vectors)]
                shares = [spread(builder, builder.load(builder.gep(one, [step]))) for one in factors]
                pairs = [(share, vector) for share in shares for vector in row]
                return [fused(builder, a, b, old) for (a, b), old in zip(pairs, sums, strict=True)]

            begin = [load(builder, types.float32, place) for place in places]
            for vector, place in zip(loop(builder, many, begin, body), places, strict=True):
                store(builder, vector, place)
            return context.get_dummy_value()

        return types.void(shares, shares_line, values, values_line, count, into, into_line), codegen

    return tile


@intrinsic  # type: ignore[untyped-decorator]
def greatest(typing: Any, numbers: Any, vectors: Any) -> Any:
    """Intrinsic, returns a value: the greatest of the ``vectors * LANES`` fp32 numbers at the pointer
    ``numbers``; NaN does not count. ``vectors``: a value, at least one."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place, count = args

        def body(step: Any, found: list[Any]) -> list[Any]:
            at = builder.gep(place, [builder.mul(step, I64(LANES))])
            return [greater(builder, load(builder, types.float32, at), found[0])]

        (most,) = loop(builder, count, [constant(float("-inf"))], body)
        step = LANES // 2
        while step:
            moved = [(lane + step) % LANES for lane in range(LANES)]
            other = builder.shuffle_vector(most, most, ir.Constant(WORDS, moved))
            most, step = greater(builder, other, most), step // 2
        return builder.extract_element(most, ir.IntType(32)(0))

    return types.float32(numbers, types.int64), codegen


def _widened(builder: Any, kind: Any, a: list[Any], b: list[Any], sums: list[Any]) -> list[Any]:
    """Write IR that adds `DEPTH` more products to each of the ``sums``, in fp32. ``a``, ``b``: pointers to the
    lines, of elements of ``kind``. Returns the new sums, as vectors, one for each pair of a line of ``a`` and
    one of ``b``."""
    for half in range(DEPTH // LANES):
        left = [load(builder, kind, builder.gep(one, [I64(half * LANES)])) for one in a]
        right = [load(builder, kind, builder.gep(one, [I64(half * LANES)])) for one in b]
        pairs = [(one, other) for one in left for other in right]
        sums = [fused(builder, one, other, old) for (one, other), old in zip(pairs, sums, strict=True)]
    return sums


def _pairs(builder: Any, kind: Any, a: list[Any], b: list[Any], sums: list[Any]) -> list[Any]:
    """Write IR that adds `DEPTH` more products of bfloat16 to each of the ``sums``, neighbouring ones in pairs
    (``vdpbf16ps``). ``a``, ``b``: pointers to the lines. Returns the new sums, as vectors, one for each pair of
    a line of ``a`` and one of ``b``."""
    left, right = [raw(builder, HALVES, one) for one in a], [raw(builder, HALVES, one) for one in b]
    pairs = [(one, other) for one in left for other in right]
    return [fused_pairs(builder, one, other, old) for (one, other), old in zip(pairs, sums, strict=True)]


# --- lines of any length ------------------------------------------------------------------------------------

GROUP = 8
"""Columns that `dots` computes together, by one tile or two; fewer columns are computed without tiles."""

_dot1, _dot2, _dot3, _dot4 = (dot_tile(rows) for rows in (1, 2, 3, 4))
_weigh1, _weigh2, _weigh3, _weigh4 = (weigh_tile(rows, CHUNK // LANES) for rows in (1, 2, 3, 4))
_weigh1_narrow, _weigh2_narrow, _weigh3_narrow, _weigh4_narrow = (
    weigh_tile(rows, 1) for rows in (1, 2, 3, 4)
)


@inlined
def dots(rows: int, x: Pointer, count: int, w: Pointer, depth: int, sums: Pointer, sums_line: int) -> None:
    """Dot products, ``sums[r, c] = x[r] . w[c]``, of ``rows`` lines of ``x`` with ``count`` lines of ``w``,
    each contiguous, of ``depth`` numbers. ``sums`` is fp32, with ``sums_line`` numbers from line to line.
    Compiled numba code that calls the tiles."""
    if depth % DEPTH or count < GROUP:
        for row in range(rows):
            for column in range(count):
                total = np.float32(0)
                for i in range(depth):
                    total += widen(x[row * depth + i]) * widen(w[column * depth + i])
                sums[row * sums_line + column] = total
        return
    for start in range(0, count, GROUP):
        column = min(start, count - GROUP)
        lines, other = offset(w, column * depth), offset(w, (column + 4) * depth)
        for row in range(0, rows, 4):
            left, line = rows - row, offset(x, row * depth)
            into = offset(sums, row * sums_line + column)
            if left >= 4:
                _dot4(line, depth, lines, depth, depth, into, sums_line)
                _dot4(line, depth, other, depth, depth, offset(into, 4), sums_line)
            elif left == 3:
                _dot3(line, depth, lines, depth, depth, into, sums_line)
                _dot3(line, depth, other, depth, depth, offset(into, 4), sums_line)
            elif left == 2:
                _dot2(line, depth, lines, depth, depth, into, sums_line)
            else:
                _dot1(line, depth, lines, depth, depth, into, sums_line)


@inlined
def weigh(rows: int, shares: Pointer, shares_line: int, count: int, values: Pointer, width: int,
          into: Pointer, into_line: int) -> None:  # fmt: skip
    """Add weighted sums of lines: ``into[r, :width] += shares[r, :count] @ values`` for ``rows`` rows.
    ``values`` has ``count`` lines, at least one, of ``width`` numbers; ``shares`` are the weights. ``shares``
    and ``into`` are fp32, with ``shares_line`` and ``into_line`` numbers from line to line. Compiled numba
    code that calls the tiles."""
    if width % LANES:
        for row in range(rows):
            for line in range(count):
                share = shares[row * shares_line + line]
                for i in range(width):
                    into[row * into_line + i] += share * widen(values[line * width + i])
        return
    for row in range(0, rows, 4):
        left, share = rows - row, offset(shares, row * shares_line)
        column = 0
        while column < width:
            wide = column + CHUNK <= width
            lines, to = offset(values, column), offset(into, row * into_line + column)
            if left >= 4:
                if wide:
                    _weigh4(share, shares_line, lines, width, count, to, into_line)
                else:
                    _weigh4_narrow(share, shares_line, lines, width, count, to, into_line)
            elif left == 3:
                if wide:
                    _weigh3(share, shares_line, lines, width, count, to, into_line)
                else:
                    _weigh3_narrow(share, shares_line, lines, width, count, to, into_line)
            elif left == 2:
                if wide:
                    _weigh2(share, shares_line, lines, width, count, to, into_line)
                else:
                    _weigh2_narrow(share, shares_line, lines, width, count, to, into_line)
            elif wide:
                _weigh1(share, shares_line, lines, width, count, to, into_line)
            else:
                _weigh1_narrow(share, shares_line, lines, width, count, to, into_line)
            column += CHUNK if wide else LANES
