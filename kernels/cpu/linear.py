"""Products with weights that are not quantised, in panels of 16 rows (`kernels.packed`).

Each number of the result is one sum in fp32, of one product after the other; of bfloat16, where the processor
can (``vdpbf16ps``), of two products at a time. A lane is a row of the weights, and nothing is summed across
lanes: so it depends on its own row of the activations and its own row of the weights alone, whatever else is
computed with it."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from ..packed_types import PANEL, RUN
from .compiling import alone
from .elements import Pointer, memory, narrow, offset, pointer, widen
from .vectors import (
    FLOAT,
    I64,
    LANES,
    WIDE,
    WORDS,
    constant,
    fused,
    fused_pairs,
    has_wide_registers,
    load,
    loop,
    multiplies_bf16,
    raw,
    spread,
    store,
)

assert PANEL == LANES

ROOM = 1 << 18
"""Bytes of activations that a thread multiplies with all its weights before it goes on to others, so that they
stay in its cache."""
STEPS = 4
"""Words of a row that are multiplied in one pass of a tile's loop; a divisor of those of a run."""
TOGETHER = 4
"""Panels that are multiplied together."""


def _in_pairs(tag: Any) -> bool:
    """Whether activations are taken in words of two bfloat16, for weights of the numba type ``tag``."""
    return bool(tag == types.uint16 and multiplies_bf16())


def _tile(rows: int, panels: int) -> Any:
    """Make an intrinsic that multiplies ``rows`` rows of activations with ``panels`` panels.

    The intrinsic returns nothing. ``tag``: an element of the weights' type; ``weights``: a pointer to the first
    panel's bytes, ``size`` of a panel; ``x``: a pointer to the bytes of the first row of activations, ``line``
    of a row; ``runs`` of a row, of 32 numbers each; ``sums``: a pointer, fp32 ``[panels, 8, 16]``. Rows are
    padded with zeros to whole runs; they are fp32, or bfloat16 if `_in_pairs`.
    """

    def weights_of(builder: Any, tag: Any, pointer: Any) -> list[Any]:
        """Write IR that loads the weights at the pointer ``pointer`` that are multiplied with a word of each
        row, or with two if only the weights are in pairs; returns a vector for each word."""
        if tag == types.float32:
            return [load(builder, types.float32, pointer)]
        if tag == types.int16:
            return [load(builder, types.int16, pointer)]
        words = raw(builder, WORDS, pointer)
        if _in_pairs(tag):
            return [builder.bitcast(words, WIDE)]
        low = builder.shl(words, constant(16, WORDS))
        high = builder.and_(words, constant(0xFFFF0000, WORDS))
        return [builder.bitcast(each, WIDE) for each in (low, high)]

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(typing: Any, tag: Any, weights: Any, size: Any, x: Any, line: Any, runs: Any, sums: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, begin, panel_bytes, left, row_bytes, count, to = args
            beside = 2 if tag == types.uint16 else 1
            words = 1 if _in_pairs(tag) else beside
            step_bytes = PANEL * beside * tag.bitwidth // 8
            multiply = fused_pairs if _in_pairs(tag) else fused
            corners = [builder.gep(begin, [builder.mul(I64(at), panel_bytes)]) for at in range(panels)]
            lines = [
                builder.bitcast(builder.gep(left, [builder.mul(I64(row), row_bytes)]), FLOAT.as_pointer())
                for row in range(rows)
            ]

            def body(number: Any, totals: list[Any]) -> list[Any]:
                totals = [*totals]
                for step in range(STEPS):
                    at = builder.add(builder.mul(number, I64(STEPS)), I64(step))
                    down = builder.mul(at, I64(step_bytes))
                    vectors = [weights_of(builder, tag, builder.gep(each, [down])) for each in corners]
                    for word in range(words):
                        across = builder.add(builder.mul(at, I64(words)), I64(word))
                        for row in range(rows):
                            number_of = spread(
                                builder, builder.load(builder.gep(lines[row], [across]), align=2)
                            )
                            for panel in range(panels):
                                cell = row * panels + panel
                                totals[cell] = multiply(
                                    builder, number_of, vectors[panel][word], totals[cell]
                                )
                return totals

            steps = builder.mul(count, I64(RUN // beside // STEPS))
            found = loop(builder, steps, [ir.Constant(WIDE, None)] * (rows * panels), body)
            for cell, total in enumerate(found):
                row, panel = divmod(cell, panels)
                store(builder, total, builder.gep(to, [I64((panel * 8 + row) * PANEL)]))
            return context.get_dummy_value()

        return types.void(tag, weights, size, x, line, runs, sums), codegen

    return tile


WIDE_ROWS = 8 if has_wide_registers() else 4
"""The most rows that are multiplied together: as many as registers hold the sums of, with two panels."""

_tile1, _tile2, _tile4, _tile8 = (_tile(rows, 1) for rows in (1, 2, 4, 8))
_tile1x4, _tile2x4, _tile4x2, _tile8x2 = (_tile(*each) for each in ((1, 4), (2, 4), (4, 2), (8, 2)))


@intrinsic  # type: ignore[untyped-decorator]
def _size(typing: Any, tag: Any) -> Any:
    """Intrinsic, returns a tuple of values, of the weights' type ``tag``: the bytes of a number; those of an
    activation, as products take it; and how many numbers of a row lie side by side in a panel."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = (tag.bitwidth // 8, 2 if _in_pairs(tag) else 4, 2 if tag == types.uint16 else 1)
        return context.make_tuple(builder, signature.return_type, [I64(each) for each in found])

    return types.UniTuple(types.int64, 3)(tag), codegen


_strict = njit(nogil=True, error_model="numpy", fastmath=False)
"""Compile a function that others here call, each operation rounded as it is written."""


@_strict  # type: ignore[untyped-decorator]
def take(low: int, high: int, rows: int, x_at: int, lines_at: int, width: int, kind: Any, tag: Any) -> None:
    """Copy the rows ``[low, high)`` of the activations ``[rows, width]`` to the scratch memory at ``lines_at``,
    4 bytes for each number of each row in whole runs, in the form in which `multiply` takes them: each padded
    with zeros, in fp32 or as they are. ``kind``, ``tag``: numbers of the types of the weights and of the
    activations (`elements.TAGS`)."""
    _, size, _ = _size(kind)
    x, padded = pointer(x_at, tag), (width + RUN - 1) // RUN * RUN
    wide, same = pointer(lines_at, np.float32(0)), pointer(lines_at, tag)
    for row in range(low, high):
        at = row * padded
        if size == 4:
            for i in range(width):
                wide[at + i] = widen(x[row * width + i])
            for i in range(width, padded):
                wide[at + i] = np.float32(0)
        else:
            for i in range(width):
                same[at + i] = x[row * width + i]
            for i in range(width, padded):
                same[at + i] = narrow(np.float32(0), tag)


@_strict  # type: ignore[untyped-decorator]
def _panels(low: int, high: int, weights: Pointer, size: int, lines: Pointer, first: int, end: int, line: int,
            runs: int, bias: Pointer, biased: bool, out: Pointer, out_line: int, n: int, kind: Any,
            tag: Any) -> None:  # fmt: skip
    """Multiply the panels ``[low, high)``, of ``size`` bytes each, with the activations ``[first, end)`` of
    ``lines``, of ``line`` bytes each."""
    room = np.empty((TOGETHER, 8, PANEL), np.float32)
    panel = low
    while panel < high:
        begin, some = offset(weights, panel * size), TOGETHER if high - panel >= TOGETHER else 1
        row = first
        while row < end:
            left = end - row
            done = WIDE_ROWS if left >= WIDE_ROWS else 4 if left >= 4 else 2 if left >= 2 else 1
            x, to = offset(lines, row * line), memory(room)
            if some == 1:
                if done == 8:
                    _tile8(kind, begin, size, x, line, runs, to)
                elif done == 4:
                    _tile4(kind, begin, size, x, line, runs, to)
                elif done == 2:
                    _tile2(kind, begin, size, x, line, runs, to)
                else:
                    _tile1(kind, begin, size, x, line, runs, to)
            elif done == 8:
                _tile8x2(kind, begin, size, x, line, runs, to)
                _tile8x2(kind, offset(begin, 2 * size), size, x, line, runs, offset(to, 16 * PANEL))
            elif done == 4:
                _tile4x2(kind, begin, size, x, line, runs, to)
                _tile4x2(kind, offset(begin, 2 * size), size, x, line, runs, offset(to, 16 * PANEL))
            elif done == 2:
                _tile2x4(kind, begin, size, x, line, runs, to)
            else:
                _tile1x4(kind, begin, size, x, line, runs, to)
            for at in range(some):
                column = (panel + at) * PANEL
                count = min(PANEL, n - column)
                for each in range(done):
                    target = offset(out, (row + each) * out_line + column)
                    if biased:
                        for i in range(count):
                            room[at, each, i] += widen(bias[column + i])
                    for i in range(count):
                        target[i] = narrow(room[at, each, i], tag)
            row += done
        panel += some


@_strict  # type: ignore[untyped-decorator]
def multiply(low: int, high: int, rows: int, lines_at: int, weight_at: int, bias_at: int, out_at: int,
             out_line: int, n: int, width: int, kind: Any, tag: Any) -> None:  # fmt: skip
    """Multiply the panels ``[low, high)`` of a packed matrix ``[n, width]`` with the ``rows`` activations that
    `take` has left at ``lines_at``, add ``bias`` ``[n]`` (address 0: none), and write their columns of the
    result, whose rows begin ``out_line`` numbers apart. ``kind``, ``tag``: as for `take`."""
    bias, out, weights = pointer(bias_at, tag), pointer(out_at, tag), pointer(weight_at, np.uint8(0))
    number, size, _ = _size(kind)
    runs, lines = (width + RUN - 1) // RUN, pointer(lines_at, np.uint8(0))
    line, panel = runs * RUN * size, runs * RUN * PANEL * number
    some = max(8, ROOM // line // 8 * 8)
    for first in range(0, rows, some):
        _panels(low, high, weights, panel, lines, first, min(first + some, rows), line, runs, bias,
                bias_at != 0, out, out_line, n, kind, tag)  # fmt: skip


@alone
def rows(ids_at: int, count: int, weight_at: int, out_at: int, width: int, kind: Any, tag: Any) -> None:
    """Write ``count`` rows of a packed matrix to ``[count, width]``, by their ``ids``, int64. Compiled numba
    code; names with ``_at`` are addresses; ``kind``, ``tag``: as for `take`."""
    ids, weights, out = pointer(ids_at, np.int64(0)), pointer(weight_at, kind), pointer(out_at, tag)
    _, _, beside = _size(kind)
    panel = (width + RUN - 1) // RUN * RUN * PANEL
    for row in range(count):
        begin = ids[row] // PANEL * panel + ids[row] % PANEL * beside
        for i in range(width):
            out[row * width + i] = narrow(
                widen(weights[begin + i // beside * PANEL * beside + i % beside]), tag
            )
