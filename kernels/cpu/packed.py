"""Products with packed weights (`kernels.packed`): activations in 8 bits, integer sums, fp32 between groups.

Each run of 32 activations is rounded to whole numbers from -127 to 127 times a scale of its own. The products
with a group's codes are summed exactly, in integers; the sums of the groups are added in fp32, one after the
other. A lane is a row of the weights, and nothing is summed across lanes: so each number of the result depends
on its own row of the activations and its own row of the weights alone, whatever else is computed with it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from ..packed import LEAST
from ..packed_types import PANEL, RUN, TYPES, PackedType
from .compiling import alone
from .elements import Pointer, bits_of, memory, narrow, offset, pointer, widen
from .vectors import (
    I8,
    I32,
    I64,
    LANES,
    WIDE,
    WORDS,
    byte_products,
    constant,
    fused,
    lines,
    looked_up,
    loop,
    raw,
    spread,
    store,
)

assert PANEL == LANES

TAGS: dict[str, Any] = {name: (np.int8(0),) * kind.number for name, kind in TYPES.items()}
"""An argument that says which type of packed weights a compiled function gets: a tuple, as long as the type's
number says. Numba compiles a version for each length."""

_BY_NUMBER = {kind.number: kind for kind in TYPES.values()}

ROOM = 1 << 18
"""Bytes of activations that a thread multiplies with all its weights before it goes on to others, so that they
stay in its cache."""


def _codes(builder: Any, kind: PackedType, at: Any) -> list[Any]:
    """Write IR that unpacks the codes of 32 numbers of a panel at the pointer ``at``; returns 8 vectors,
    one for each word of 4 numbers: the lanes are the rows, and each byte is a code."""
    words: list[Any] = [None] * 8
    begin, low = 0, 0
    for bits in kind.planes:
        vectors = [raw(builder, WORDS, builder.gep(at, [I64(begin + 64 * each)])) for each in range(bits)]
        mask = constant(((1 << bits) - 1 << low) * 0x01010101, WORDS)
        for word in range(8):
            vector, down = {
                8: (word, 0),
                4: (word % 4, 4 * (word // 4)),
                2: (word // 4, 2 * (word % 4)),
                1: (0, word),
            }[bits]
            found, move = vectors[vector], down - low
            if move > 0:
                found = builder.lshr(found, constant(move, WORDS))
            elif move < 0:
                found = builder.shl(found, constant(-move, WORDS))
            if bits < 8:
                found = builder.and_(found, mask)
            words[word] = found if words[word] is None else builder.or_(words[word], found)
        begin, low = begin + 64 * bits, low + bits
    if kind.table is not None:
        entries = [one + kind.zero for one in kind.table]
        words = [looked_up(builder, entries, each) for each in words]
    return words


def _floats(builder: Any, kind: PackedType, at: Any) -> Any:
    """Write IR that loads 16 scales of a type at the pointer ``at``; returns them in fp32."""
    if kind.wide:
        return raw(builder, WIDE, at)
    return builder.fpext(raw(builder, ir.VectorType(ir.HalfType(), LANES), at), WIDE)


def _octets(builder: Any, at: Any) -> Any:
    """Write IR that loads 16 unsigned bytes at the pointer ``at``; returns them as words."""
    return builder.zext(raw(builder, ir.VectorType(I8, LANES), at), WORDS)


def _exponents(builder: Any, at: Any) -> Any:
    """Write IR that loads 16 exponents at the pointer ``at``; returns half of 2 to the power of each less
    127."""
    found = _octets(builder, at)
    usual = builder.shl(builder.sub(found, constant(1, WORDS)), constant(23, WORDS))
    small = builder.shl(constant(0x00200000, WORDS), found)
    bits = builder.select(builder.icmp_unsigned("<", found, constant(2, WORDS)), small, usual)
    return builder.bitcast(bits, WIDE)


def _of_block(builder: Any, kind: PackedType, head: Any) -> tuple[Any, Any]:
    """Write IR that loads the factors and offsets of a block at the pointer ``head``; returns both, vectors of
    fp32."""
    factor = _exponents(builder, head) if kind.exponent else _floats(builder, kind, head)
    if not kind.offset:
        return factor, ir.Constant(WIDE, None)
    return factor, _floats(builder, kind, builder.gep(head, [I64(kind.scale_bytes * PANEL)]))


def _factors(
    builder: Any, kind: PackedType, head: Any, factor: Any, added: Any, group: Any
) -> tuple[Any, Any]:
    """Write IR that loads the factors and offsets of the group number ``group`` (a value) of a block at the
    pointer ``head``; returns both, vectors of fp32. ``factor``, ``added``: those of the block."""
    if not kind.groups:
        return factor, added
    first = builder.gep(head, [I64(PANEL * (4 if kind.offset else 2))])
    at = builder.gep(first, [builder.mul(group, I64(PANEL))])
    if kind.signed:
        words = builder.sext(raw(builder, ir.VectorType(I8, LANES), at), WORDS)
        return builder.fmul(factor, builder.sitofp(words, WIDE)), added
    words = _octets(builder, at)
    if kind.joined:
        offsets, words = builder.lshr(words, constant(4, WORDS)), builder.and_(words, constant(15, WORDS))
    elif kind.offset:
        offsets = _octets(builder, builder.gep(at, [I64(PANEL * kind.groups)]))
    factor = builder.fmul(factor, builder.sitofp(words, WIDE))
    return factor, builder.fmul(added, builder.sitofp(offsets, WIDE)) if kind.offset else added


def _tile(rows: int) -> Any:
    """Make an intrinsic that multiplies a panel with ``rows`` rows of activations, and stores ``sums[r,
    lane]``.

    The intrinsic returns nothing. ``tag``: one of `TAGS`; ``panel``: a pointer to the panel's bytes; ``blocks``
    of it and ``runs`` of a row, values; ``into``: a pointer to the sums, fp32 ``[rows, 16]``. Pointers to the
    first row of the rounded activations: ``numbers`` (int8), ``scales`` (fp32, one for each run), ``starts``
    (int32, for each group its sum times minus the type's zero), ``added`` (fp32, for each group its sum times
    its scale).
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(
        typing: Any, tag: Any, panel: Any, blocks: Any, numbers: Any, scales: Any, starts: Any, added: Any,
        runs: Any, into: Any,
    ) -> Any:  # fmt: skip
        kind = _BY_NUMBER[tag.count]

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, weights, count, octets, shares, begins, sums, run_line, to = args
            each = RUN // kind.group
            most = max(kind.table) + kind.zero if kind.table else (1 << sum(kind.planes)) - 1
            group_line = builder.mul(run_line, I64(each))
            octet_lines = lines(builder, octets, builder.mul(run_line, I64(RUN)), rows)
            share_lines = lines(builder, shares, run_line, rows)
            begin_lines, sum_lines = (lines(builder, each_of, group_line, rows) for each_of in (begins, sums))

            def run(
                head: Any, codes: Any, factor: Any, extra: Any, inside: Any, at: Any, totals: list[Any]
            ) -> list[Any]:
                """32 numbers: number ``inside`` of the block, ``at`` of the row."""
                words = _codes(builder, kind, codes)
                for group in range(each):
                    number = builder.add(builder.mul(inside, I64(each)), I64(group))
                    index = builder.add(builder.mul(at, I64(each)), I64(group))
                    scale, shift = _factors(builder, kind, head, factor, extra, number)
                    mine = range(group * 8 // each, (group + 1) * 8 // each)
                    for row in range(rows):
                        if kind.zero:
                            whole = spread(builder, builder.load(builder.gep(begin_lines[row], [index])))
                        else:
                            whole = ir.Constant(WORDS, None)
                        for word in mine:
                            where = builder.add(builder.mul(at, I64(RUN)), I64(4 * word))
                            four = raw(builder, I32, builder.gep(octet_lines[row], [where]))
                            whole = byte_products(builder, words[word], spread(builder, four), whole, most)
                        share = spread(builder, builder.load(builder.gep(share_lines[row], [at])))
                        found = builder.fmul(builder.sitofp(whole, WIDE), share)
                        totals[row] = fused(builder, found, scale, totals[row])
                        if kind.offset:
                            share = spread(builder, builder.load(builder.gep(sum_lines[row], [index])))
                            totals[row] = fused(builder, share, shift, totals[row])
                return totals

            def block(step: Any, totals: list[Any]) -> list[Any]:
                head = builder.gep(weights, [builder.mul(step, I64(kind.unit))])
                factor, extra = _of_block(builder, kind, head)
                codes = builder.gep(head, [I64(kind.head)])
                if kind.block == RUN:
                    return run(head, codes, factor, extra, I64(0), step, [*totals])

                def inner(inside: Any, totals: list[Any]) -> list[Any]:
                    at = builder.add(builder.mul(step, I64(kind.block // RUN)), inside)
                    here = builder.gep(codes, [builder.mul(inside, I64(kind.run))])
                    return run(head, here, factor, extra, inside, at, [*totals])

                return loop(builder, I64(kind.block // RUN), totals, inner)

            found = loop(builder, count, [ir.Constant(WIDE, None)] * rows, block)
            for row, total in enumerate(found):
                store(builder, total, builder.gep(to, [I64(row * PANEL)]))
            return context.get_dummy_value()

        return types.void(tag, panel, blocks, numbers, scales, starts, added, runs, into), codegen

    return tile


_tile1, _tile2, _tile4, _tile8 = (_tile(rows) for rows in (1, 2, 4, 8))


@intrinsic  # type: ignore[untyped-decorator]
def _sizes(typing: Any, tag: Any) -> Any:
    """Intrinsic, returns a tuple of values, of the type that ``tag`` selects: the numbers of a group, the code
    of the number 0, the numbers of a block, the bytes of a panel's block, and 1 if all activations of a token
    have one scale, else 0."""
    kind = _BY_NUMBER[tag.count]

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = [I64(one) for one in (kind.group, kind.zero, kind.block, kind.unit, int(kind.token))]
        return context.make_tuple(builder, signature.return_type, values)

    return types.UniTuple(types.int64, 5)(tag), codegen


_strict = njit(nogil=True, error_model="numpy", fastmath=False)
"""Compile a function that others here call, each operation rounded as it is written."""
_SHIFT = np.float32(12582912.0)  # 1.5 * 2^23: added to a small number, its low bits are the nearest integer
_SHIFT_BITS = np.int32(0x4B400000)
_LEAST = np.float32(LEAST)


@_strict  # type: ignore[untyped-decorator]
def _lines(at: int, rows: int, width: int, group: int) -> Any:
    """Where the rounded activations, ``[rows, width]``, lie in the scratch memory at the address ``at``:
    pointers to ``numbers``, ``scales``, ``starts`` and ``sums`` (see `_tile`)."""
    scales = at + rows * width
    starts = scales + rows * width // RUN * 4
    sums = starts + rows * width // group * 4
    kept = (pointer(scales, np.float32(0)), pointer(starts, np.int32(0)), pointer(sums, np.float32(0)))
    return pointer(at, np.int8(0)), *kept


@_strict  # type: ignore[untyped-decorator]
def take(low: int, high: int, rows: int, x_at: int, lines_at: int, width: int, kind: Any, tag: Any) -> None:
    """Round the rows ``[low, high)`` of the activations ``[rows, width]`` to 8 bits, into the scratch memory at
    ``lines_at``: see `_tile`. It has 4 bytes for each number. A run with a number that is not finite gets a
    scale of NaN. ``kind``: one of `TAGS`; ``tag``: a number of the element type (`elements.TAGS`)."""
    group, zero, _, _, token = _sizes(kind)
    x, (numbers, scales, starts, sums) = pointer(x_at, tag), _lines(lines_at, rows, width, group)
    line = np.empty(RUN, np.float32)
    most, wrong = np.float32(0), np.float32(0)
    for run in range(low * width // RUN, high * width // RUN):
        if token == 0:
            most, wrong = np.float32(0), np.float32(0)
        elif run * RUN % width == 0:
            most, wrong = np.float32(0), np.float32(0)
            for i in range(run * RUN, run * RUN + width):
                size = abs(widen(x[i]))
                most = size if size > most else most
                wrong += widen(x[i]) * np.float32(0)
        for i in range(RUN):
            line[i] = widen(x[run * RUN + i])
        for i in range(RUN):
            size = abs(line[i])
            most = size if size > most else most
            wrong += line[i] * np.float32(0)  # NaN if one is not finite
        factor = np.float32(127) / most if most > _LEAST and wrong == 0 else np.float32(0)
        scale = most / np.float32(127) + wrong
        scales[run] = scale
        for at in range(0, RUN, group):
            total = np.int32(0)
            for i in range(at, at + group):
                whole = bits_of(line[i] * factor + _SHIFT) - _SHIFT_BITS if factor > 0 else np.int32(0)
                numbers[run * RUN + i] = np.int8(whole)
                total += whole
            index = (run * RUN + at) // group
            starts[index] = -zero * total
            sums[index] = np.float32(total) * scale


@_strict  # type: ignore[untyped-decorator]
def _panels(low: int, high: int, panels: Pointer, size: int, blocks: int, first: int, end: int, width: int,
            group: int, lines: Any, bias: Pointer, biased: bool, out: Pointer, out_line: int, n: int, kind: Any,
            tag: Any) -> None:  # fmt: skip
    """Multiply the panels ``[low, high)`` with the rows ``[first, end)`` of the rounded activations."""
    runs, cut, (numbers, scales, starts, sums) = width // RUN, width // group, lines
    room = np.empty((8, PANEL), np.float32)
    to = memory(room)
    for panel in range(low, high):
        weights = offset(panels, panel * size)
        row, count = first, min(PANEL, n - panel * PANEL)
        while row < end:
            done = 8 if end - row >= 8 else 4 if end - row >= 4 else 2 if end - row >= 2 else 1
            q, d = offset(numbers, row * width), offset(scales, row * runs)
            s, o = offset(starts, row * cut), offset(sums, row * cut)
            if done == 8:
                _tile8(kind, weights, blocks, q, d, s, o, runs, to)
            elif done == 4:
                _tile4(kind, weights, blocks, q, d, s, o, runs, to)
            elif done == 2:
                _tile2(kind, weights, blocks, q, d, s, o, runs, to)
            else:
                _tile1(kind, weights, blocks, q, d, s, o, runs, to)
            for each in range(done):
                target = offset(out, (row + each) * out_line + panel * PANEL)
                if biased:
                    for i in range(count):
                        room[each, i] += widen(bias[panel * PANEL + i])
                for i in range(count):
                    target[i] = narrow(room[each, i], tag)
            row += done


@_strict  # type: ignore[untyped-decorator]
def multiply(low: int, high: int, rows: int, lines_at: int, weight_at: int, bias_at: int, out_at: int,
             out_line: int, n: int, width: int, kind: Any, tag: Any) -> None:  # fmt: skip
    """Multiply the panels ``[low, high)`` of a packed matrix ``[n, width]`` with the ``rows`` activations that
    `take` has left at ``lines_at``, add ``bias`` ``[n]`` (address 0: none), and write their columns of the
    result, whose rows begin ``out_line`` numbers apart. ``kind``, ``tag``: as for `take`."""
    bias, out, panels = pointer(bias_at, tag), pointer(out_at, tag), pointer(weight_at, np.uint8(0))
    group, _, block, unit, _ = _sizes(kind)
    blocks, lines, some = width // block, _lines(lines_at, rows, width, group), max(8, ROOM // width // 8 * 8)
    for first in range(0, rows, some):
        _panels(low, high, panels, blocks * unit, blocks, first, min(first + some, rows), width, group, lines,
                bias, bias_at != 0, out, out_line, n, kind, tag)  # fmt: skip


@intrinsic  # type: ignore[untyped-decorator]
def _unpack(typing: Any, tag: Any, block: Any, codes: Any, factors: Any, added: Any) -> Any:
    """Intrinsic, returns nothing: unpack a panel's block at the pointer ``block``. Stored at pointers:
    ``codes``, uint8 ``[numbers / 4, 16, 4]``, looked up in the type's table; ``factors``, ``added``: fp32
    ``[numbers / group, 16]``."""
    kind = _BY_NUMBER[tag.count]

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, head, octets, scales, shifts = args
        factor, extra = _of_block(builder, kind, head)
        each = RUN // kind.group

        def run(at: Any, nothing: list[Any]) -> list[Any]:
            here = builder.gep(head, [builder.add(I64(kind.head), builder.mul(at, I64(kind.run)))])
            for number, word in enumerate(_codes(builder, kind, here)):
                index = builder.add(builder.mul(at, I64(PANEL * RUN)), I64(PANEL * 4 * number))
                store(builder, word, builder.gep(octets, [index]))
            for group in range(each):
                number = builder.add(builder.mul(at, I64(each)), I64(group))
                index = builder.mul(number, I64(PANEL))
                scale, shift = _factors(builder, kind, head, factor, extra, number)
                store(builder, scale, builder.gep(scales, [index]))
                store(builder, shift, builder.gep(shifts, [index]))
            return nothing

        loop(builder, I64(kind.block // RUN), [], run)
        return context.get_dummy_value()

    return types.void(tag, block, codes, factors, added), codegen


@alone
def rows(ids_at: int, count: int, weight_at: int, out_at: int, width: int, kind: Any, tag: Any) -> None:
    """Write ``count`` rows of a packed matrix ``[n, width]`` to ``[count, width]``, by their ``ids``, int64.
    Compiled numba code; names with ``_at`` are addresses; ``kind``, ``tag``: as for `take`."""
    ids, panels, out = pointer(ids_at, np.int64(0)), pointer(weight_at, np.uint8(0)), pointer(out_at, tag)
    group, zero, block, unit, _ = _sizes(kind)
    codes, factors = np.empty(block * PANEL, np.uint8), np.empty((block // group, PANEL), np.float32)
    added, blocks = np.empty((block // group, PANEL), np.float32), width // block
    for row in range(count):
        panel, lane = ids[row] // PANEL, ids[row] % PANEL
        for at in range(blocks):
            begin = offset(panels, (panel * blocks + at) * unit)
            _unpack(kind, begin, memory(codes), memory(factors), memory(added))
            for i in range(block):
                whole = np.float32(np.int32(codes[(i // 4 * PANEL + lane) * 4 + i % 4]) - np.int32(zero))
                number = whole * factors[i // group, lane] + added[i // group, lane]
                out[row * width + at * block + i] = narrow(number, tag)
