"""Products of small matrices whose sums stay in vector registers: LLVM IR, written where loops compile badly.

Takes memory as it stands: pointers to elements and the distance between lines. Knows no layout and no model.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

ROWS, LANES, VECTORS = 4, 16, 2
COLUMNS = LANES * VECTORS
"""A tile of `multiply_tile` is ``ROWS`` by ``COLUMNS`` numbers."""
DEPTH = 2 * LANES
"""`dot_tile` takes so many numbers of each line at a time."""
CHUNK = 4 * LANES
"""`weigh_tile` adds to so many columns."""

_I16, _I32, _I64, _FLOAT = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_WIDE = ir.VectorType(_FLOAT, LANES)


def columns_for(rows: int) -> int:
    """How many columns a tile of `dot_tile` has with so many rows (1 to 4): 8 or 16 sums."""
    return 8 if rows <= 2 else 4


def dot_tile(rows: int) -> Any:
    """An intrinsic: ``sums[r, c] = x[r] . w[c]`` for ``rows`` (1 to 4) lines of x, `columns_for` of w.

    Its arguments: ``x``, ``x_line`` (numbers from line to line), ``w``, ``w_line``, ``depth`` (a positive
    multiple of `DEPTH`), ``sums`` (fp32), ``sums_line``. bfloat16 is multiplied as it is where the processor
    can (``vdpbf16ps``: exact products, fp32 sums), everything else in fp32.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(
        typing: Any, x: Any, x_line: Any, w: Any, w_line: Any, depth: Any, sums: Any, sums_line: Any
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            left, left_line, right, right_line, deep, into, into_line = args
            kind, columns = x.dtype, columns_for(rows)
            a = _lines(builder, left, left_line, rows)
            b = _lines(builder, right, right_line, columns)
            multiply = _pairs if kind == types.uint16 and _multiplies_bf16() else _widened

            def body(step: Any, sums: list[Any]) -> list[Any]:
                at = builder.mul(step, _I64(DEPTH))
                return multiply(builder, kind, [builder.gep(one, [at]) for one in a],
                                [builder.gep(one, [at]) for one in b], sums)  # fmt: skip

            nothing = [ir.Constant(_WIDE, None)] * (rows * columns)
            steps = builder.lshr(deep, _I64(DEPTH.bit_length() - 1))
            found = _summed(builder, _loop(builder, steps, nothing, body))
            for row in range(rows):
                place = builder.gep(into, [builder.mul(_I64(row), into_line)])
                _store(builder, _picked(builder, found, range(row * columns, (row + 1) * columns)), place)
            return context.get_dummy_value()

        return types.void(x, x_line, w, w_line, depth, sums, sums_line), codegen

    return tile


def weigh_tile(rows: int, vectors: int) -> Any:
    """An intrinsic: ``into[r, :] += shares[r] @ values`` for ``rows`` (1 to 4) and ``vectors * LANES`` columns.

    Its arguments: ``shares`` (fp32), ``shares_line``, ``values``, ``values_line``, ``count`` (lines of values,
    at least one), ``into`` (fp32), ``into_line``.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(
        typing: Any, shares: Any, shares_line: Any, values: Any, values_line: Any, count: Any, into: Any,
        into_line: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            factor, factor_line, right, right_line, many, total, total_line = args
            kind = values.dtype
            factors = _lines(builder, factor, factor_line, rows)
            places = [
                builder.gep(line, [_I64(vector * LANES)])
                for line in _lines(builder, total, total_line, rows)
                for vector in range(vectors)
            ]

            def body(step: Any, sums: list[Any]) -> list[Any]:
                line = builder.gep(right, [builder.mul(step, right_line)])
                row = [_load(builder, kind, builder.gep(line, [_I64(v * LANES)])) for v in range(vectors)]
                shares = [_spread(builder, builder.load(builder.gep(one, [step]))) for one in factors]
                pairs = [(share, vector) for share in shares for vector in row]
                return [_fused(builder, a, b, old) for (a, b), old in zip(pairs, sums, strict=True)]

            begin = [_load(builder, types.float32, place) for place in places]
            for vector, place in zip(_loop(builder, many, begin, body), places, strict=True):
                _store(builder, vector, place)
            return context.get_dummy_value()

        return types.void(shares, shares_line, values, values_line, count, into, into_line), codegen

    return tile


@intrinsic  # type: ignore[untyped-decorator]
def multiply_tile(typing: Any, left: Any, row: Any, right: Any, column: Any, into: Any, depth: Any) -> Any:
    """``into[row:, column:] += left[row:, :depth] @ right[:depth, column:]``, ``ROWS`` by ``COLUMNS`` numbers.

    Contiguous fp32 matrices; a depth of at least one. The tile stays in registers over the depth.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        matrices = [context.make_array(signature.args[at])(context, builder, args[at]) for at in (0, 2, 4)]
        _, line, _, start, _, deep = args
        (a, a_width), (b, b_width), (c, c_width) = [
            (matrix.data, builder.extract_value(matrix.shape, 1)) for matrix in matrices
        ]
        rows = [builder.add(line, _I64(step)) for step in range(ROWS)]
        lines = [builder.gep(a, [builder.mul(one, a_width)]) for one in rows]
        corners = [builder.gep(c, [builder.add(builder.mul(one, c_width), start)]) for one in rows]
        places = [builder.gep(one, [_I64(v * LANES)]) for one in corners for v in range(VECTORS)]
        columns = builder.gep(b, [start])

        def body(step: Any, sums: list[Any]) -> list[Any]:
            at = builder.gep(columns, [builder.mul(step, b_width)])
            right = [
                _load(builder, types.float32, builder.gep(at, [_I64(v * LANES)])) for v in range(VECTORS)
            ]
            left = [_spread(builder, builder.load(builder.gep(one, [step]))) for one in lines]
            pairs = [(number, vector) for number in left for vector in right]
            return [_fused(builder, a, b, old) for (a, b), old in zip(pairs, sums, strict=True)]

        begin = [_load(builder, types.float32, place) for place in places]
        for vector, place in zip(_loop(builder, deep, begin, body), places, strict=True):
            _store(builder, vector, place)
        return context.get_dummy_value()

    return types.void(left, row, right, column, into, depth), codegen


# --- what tiles are made of ---------------------------------------------------------------------------------


class _Bfloat16(ir.Type):  # type: ignore[misc]
    """The type that llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat16)

    def __hash__(self) -> int:
        return hash(_Bfloat16)


def _multiplies_bf16() -> bool:
    return bool(binding.get_host_cpu_features().get("avx512bf16"))


def _lines(builder: Any, base: Any, line: Any, count: int) -> list[Any]:
    """Pointers to the first ``count`` lines."""
    return [builder.gep(base, [builder.mul(_I64(at), line)]) for at in range(count)]


def _raw(builder: Any, kind: ir.Type, place: Any) -> Any:
    return builder.load(builder.bitcast(place, kind.as_pointer()), align=2)


def _load(builder: Any, kind: Any, place: Any) -> Any:
    """``LANES`` elements as fp32: see `elements.widen`."""
    if kind == types.float32:
        return builder.load(builder.bitcast(place, _WIDE.as_pointer()), align=4)
    words = _raw(builder, ir.VectorType(_I16, LANES), place)
    if kind == types.int16:
        return builder.fpext(builder.bitcast(words, ir.VectorType(ir.HalfType(), LANES)), _WIDE)
    wide = ir.VectorType(_I32, LANES)
    return builder.bitcast(builder.shl(builder.zext(words, wide), ir.Constant(wide, [16] * LANES)), _WIDE)


def _store(builder: Any, vector: Any, place: Any) -> None:
    builder.store(vector, builder.bitcast(place, vector.type.as_pointer()), align=4)


def _widened(builder: Any, kind: Any, a: list[Any], b: list[Any], sums: list[Any]) -> list[Any]:
    """The sums with `DEPTH` more products each, in fp32."""
    for half in range(DEPTH // LANES):
        left = [_load(builder, kind, builder.gep(one, [_I64(half * LANES)])) for one in a]
        right = [_load(builder, kind, builder.gep(one, [_I64(half * LANES)])) for one in b]
        pairs = [(one, other) for one in left for other in right]
        sums = [_fused(builder, one, other, old) for (one, other), old in zip(pairs, sums, strict=True)]
    return sums


def _pairs(builder: Any, kind: Any, a: list[Any], b: list[Any], sums: list[Any]) -> list[Any]:
    """The same by bfloat16 products, which are added in pairs."""
    numbers = ir.VectorType(_Bfloat16(), DEPTH)
    shape = ir.FunctionType(_WIDE, [_WIDE, numbers, numbers])
    multiply = cgutils.get_or_insert_function(builder.module, shape, "llvm.x86.avx512bf16.dpbf16ps.512")
    left, right = [_raw(builder, numbers, one) for one in a], [_raw(builder, numbers, one) for one in b]
    pairs = [(one, other) for one in left for other in right]
    return [builder.call(multiply, [old, *pair]) for pair, old in zip(pairs, sums, strict=True)]


def _picked(builder: Any, vector: Any, lanes: range) -> Any:
    """Those lanes alone."""
    return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(_I32, len(lanes)), list(lanes)))


def _summed(builder: Any, vectors: list[Any]) -> Any:
    """The sum over all lanes of vector i in lane i; 8 to 16 vectors."""
    shuffle, step = builder.shuffle_vector, 1
    if len(vectors) > LANES // 2:
        vectors = vectors + [ir.Constant(_WIDE, None)] * (LANES - len(vectors))
    while len(vectors) > 1:
        # Lanes in groups of 2 * step: of the first vector's sums so far the first half, then of the second's.
        first = [at + (LANES - step if at & step else 0) for at in range(LANES)]
        second = [at + step for at in first]
        ones, others = ir.Constant(_LANE_NUMBERS, first), ir.Constant(_LANE_NUMBERS, second)
        vectors = [
            builder.fadd(shuffle(a, b, ones), shuffle(a, b, others))
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        step *= 2
    (found,) = vectors
    while step < LANES:
        moved = [(at + step) % LANES for at in range(LANES)]
        found = builder.fadd(found, shuffle(found, found, ir.Constant(_LANE_NUMBERS, moved)))
        step *= 2
    return found


_LANE_NUMBERS = ir.VectorType(_I32, LANES)


def _spread(builder: Any, number: Any) -> Any:
    """A vector with ``number`` in every lane."""
    nothing = ir.Constant(_WIDE, ir.Undefined)
    first = builder.insert_element(nothing, number, _I32(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(_LANE_NUMBERS, [0] * LANES))


def _fused(builder: Any, one: Any, other: Any, old: Any) -> Any:
    """``one * other + old``, which the code generator may round once."""
    return builder.fadd(builder.fmul(one, other, flags=["contract"]), old, flags=["contract"])


def _loop(builder: Any, count: Any, begin: list[Any], body: Any) -> list[Any]:
    """``body(step, vectors) -> vectors`` for ``count`` steps, at least one; returns the last vectors."""
    before, loop = builder.block, builder.append_basic_block("step")
    after = builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    step = builder.phi(_I64)
    carried = [builder.phi(_WIDE) for _ in begin]
    results: list[Any] = body(step, carried)
    following = builder.add(step, _I64(1))
    step.add_incoming(_I64(0), before)
    step.add_incoming(following, loop)
    for old, first, new in zip(carried, begin, results, strict=True):
        old.add_incoming(first, before)
        old.add_incoming(new, loop)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
    builder.position_at_end(after)
    return results
