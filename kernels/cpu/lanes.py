"""Prefill attention with a query in each lane of a vector: packing, products and softmax in LLVM IR.

Scores are stored as ``[position, query]``, weighted values as ``[dim, query]``: numbers of K and V are spread
over all lanes, queries and exponentials ("shares") are read as vectors, and nothing is summed across lanes.
So a query's numbers depend on its own lane only, and neither K nor V is transposed.

The unit of depth is a **word** of 32 bits: one number of fp32, or two neighbouring ones of bfloat16 if the
processor multiplies these directly (``vdpbf16ps``: exact products, fp32 sums); shares are then rounded to
bfloat16 after they are summed. A **column** is ``LANES`` queries. Sources: Dao et al., "FlashAttention"
(2022) for the running softmax; Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication"
(2008) for tiles of sums in registers.

    keys     [dim words / LANES, TILE, LANES]        words: LANES of them of each position, position by position
    values   [TILE in words, dims]                   words: of neighbouring positions
    queries  [column, dim words, LANES]              words
    scores   [column, TILE, LANES]                   fp32
    shares   [column, TILE in words, LANES]          words
    sums     [column, dims, LANES]                   fp32
    state    [column, 2, LANES]                      fp32: greatest score so far times log2 e; sum of shares

All memory is passed as pointers to fp32, also for words.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from .vectors import (
    FLOAT,
    HALVES,
    I32,
    I64,
    LANES,
    WORDS,
    any_lane,
    constant,
    exp2,
    fused,
    fused_pairs,
    greater,
    has_wide_registers,
    load,
    loop,
    multiplies_bf16,
    raw,
    rounded_pairs,
    spread,
    store,
)

TILE = 64
"""Positions of the context in a tile of K and V."""

HEIGHTS = {1: 16, 2: 8} if has_wide_registers() else {1: 4, 2: 2}
"""How many rows the tile of sums of `product` has, by its number of columns (1 or 2): as many as registers
hold; divisors of `TILE`."""

UNSEEN = float("-inf")
LOWEST = -1e30
"""``UNSEEN``: the score of a position that a query does not see. ``LOWEST``: a query's greatest score before
it has seen a position."""


def in_pairs(kind: Any) -> bool:
    """Whether a word of 32 bits holds two numbers of the numba type ``kind``: bfloat16, on a processor that
    multiplies it directly. Otherwise a word is one fp32 number."""
    return bool(kind == types.uint16 and multiplies_bf16())


@intrinsic  # type: ignore[untyped-decorator]
def per_word(typing: Any, tag: Any) -> Any:
    """Intrinsic, returns a value, int64: how many elements of ``tag``'s type a word of 32 bits holds, 1 or 2.
    ``tag``: any number of that type."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return I64(2 if in_pairs(tag) else 1)

    return types.int64(tag), codegen


@intrinsic  # type: ignore[untyped-decorator]
def pack_line(typing: Any, elements: Any, into: Any) -> Any:
    """Intrinsic, returns nothing: store ``LANES`` words at the pointer ``into``, made of neighbouring elements
    at the pointer ``elements``: of one each, converted to fp32, or of two bfloat16 each (see `in_pairs`)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = elements.dtype
        words = raw(builder, HALVES, args[0]) if in_pairs(kind) else load(builder, kind, args[0])
        store(builder, words, args[1])
        return context.get_dummy_value()

    return types.void(elements, into), codegen


@intrinsic  # type: ignore[untyped-decorator]
def pack_lines(typing: Any, first: Any, second: Any, into: Any) -> Any:
    """Intrinsic, returns nothing: store ``LANES`` words at the pointer ``into``. Word i is element i at the
    pointer ``first``, in fp32; if words hold two bfloat16 (see `in_pairs`), also element i at the pointer
    ``second`` as its upper half."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind, words = first.dtype, load(builder, first.dtype, args[0])
        if in_pairs(kind):  # bfloat16 is the upper half of fp32
            low = builder.lshr(builder.bitcast(words, WORDS), constant(16, WORDS))
            words = builder.or_(low, builder.bitcast(load(builder, kind, args[1]), WORDS))
        store(builder, words, args[2])
        return context.get_dummy_value()

    return types.void(first, second, into), codegen


def product(columns: int, *, run: int, apart: int, fresh: bool) -> Any:
    """Make an intrinsic that computes one tile of a matrix product: ``into[row, lane] (+)= sum over steps of
    left[step, row] * right[step, lane]``.

    A step is one word of 32 bits (one fp32 number, or two of bfloat16). The tile has ``HEIGHTS[columns]``
    rows, and ``columns`` columns of `LANES` lanes. ``fresh``: overwrite ``into`` instead of adding.

    In ``left`` the word of a row at a step is ``step // run * left_line + step % run + row * apart``. Columns
    of ``right`` and ``into`` have `LANES` words for each step or row, and begin ``right_column`` and
    ``into_column`` words apart. The intrinsic returns nothing. Its arguments: a number of the element type,
    ``left``, ``left_line``, ``right``, ``right_column``, ``steps``, ``into``, ``into_column``; ``left``,
    ``right`` and ``into`` are pointers, the others values.
    """
    rows = HEIGHTS[columns]

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(
        typing: Any, tag: Any, left: Any, left_line: Any, right: Any, right_column: Any, steps: Any, into: Any,
        into_column: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, a, a_line, b, b_column, deep, total, total_column = args
            multiply = fused_pairs if in_pairs(tag) else fused
            begins = [builder.gep(b, [builder.mul(I64(at), b_column)]) for at in range(columns)]
            corners = [builder.gep(total, [builder.mul(I64(at), total_column)]) for at in range(columns)]
            places = [builder.gep(one, [I64(row * LANES)]) for row in range(rows) for one in corners]

            def body(step: Any, sums: list[Any]) -> list[Any]:
                line, within = builder.udiv(step, I64(run)), builder.urem(step, I64(run))
                at = builder.gep(a, [builder.add(builder.mul(line, a_line), within)])
                down = builder.mul(step, I64(LANES))
                vectors = [load(builder, types.float32, builder.gep(one, [down])) for one in begins]
                numbers = [
                    spread(builder, builder.load(builder.gep(at, [I64(row * apart)]))) for row in range(rows)
                ]
                pairs = [(number, vector) for number in numbers for vector in vectors]
                return [multiply(builder, a, b, old) for (a, b), old in zip(pairs, sums, strict=True)]

            begin = [constant(0.0) if fresh else load(builder, types.float32, place) for place in places]
            for vector, place in zip(loop(builder, deep, begin, body), places, strict=True):
                store(builder, vector, place)
            return context.get_dummy_value()

        return types.void(tag, left, left_line, right, right_column, steps, into, into_column), codegen

    return tile


@intrinsic  # type: ignore[untyped-decorator]
def hide(typing: Any, scores: Any, first: Any, oldest: Any, newest: Any) -> Any:
    """Intrinsic, returns nothing: mask the scores of one column (`LANES` queries) in place. ``scores``: pointer
    to the scores with the tile of keys that begins at position ``first``, a value. The scores of positions that
    the query does not see are set to `UNSEEN`. ``oldest``, ``newest``: pointers to the first and last position
    that each lane's query sees, as int32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scores, first, *limits = args
        low, high = (builder.bitcast(load(builder, types.float32, one), WORDS) for one in limits)

        def body(step: Any, nothing: list[Any]) -> list[Any]:
            place = builder.gep(scores, [builder.mul(step, I64(LANES))])
            position = spread(builder, builder.trunc(builder.add(first, step), I32))
            seen = builder.and_(
                builder.icmp_signed(">=", position, low), builder.icmp_signed("<=", position, high)
            )
            store(builder, builder.select(seen, load(builder, types.float32, place), constant(UNSEEN)), place)
            return nothing

        loop(builder, I64(TILE), [], body)
        return context.get_dummy_value()

    return types.void(scores, first, oldest, newest), codegen


@intrinsic  # type: ignore[untyped-decorator]
def soften(
    typing: Any, tag: Any, scores: Any, factor: Any, state: Any, shares: Any, sums: Any, dims: Any
) -> Any:
    """Intrinsic, returns nothing: the running softmax of one column (`LANES` queries) over one tile of keys.
    Reads the scores at the pointer ``scores``, and writes ``2^(score * factor - greatest so far)`` to the
    pointer ``shares``. ``factor``: a value, fp32 and positive, the scale times log2 e. ``tag``: a number of the
    element type.

    ``state``: pointer to each query's greatest score so far (times ``factor``) and sum of shares; both are
    updated in place. ``sums``: pointer to the column's ``dims`` (a value) weighted values so far, which are
    rescaled in place to a new greatest score. For functions compiled `in_order`.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, scores, factor, state, shares, sums, dims = args
        times, beside = spread(builder, factor), builder.gep(state, [I64(LANES)])
        before = load(builder, types.float32, state)
        most = greater(builder, builder.fmul(_greatest(builder, scores), times), before)
        with builder.if_then(any_lane(builder, builder.fcmp_unordered("!=", most, before))):
            shrunk = exp2(builder, builder.fsub(before, most))
            store(builder, most, state)
            store(builder, builder.fmul(load(builder, types.float32, beside), shrunk), beside)

            def shrink(step: Any, nothing: list[Any]) -> list[Any]:
                place = builder.gep(sums, [builder.mul(step, I64(LANES))])
                store(builder, builder.fmul(load(builder, types.float32, place), shrunk), place)
                return nothing

            loop(builder, dims, [], shrink)
        total = load(builder, types.float32, beside)
        for part in _shares(builder, in_pairs(tag), scores, times, builder.fneg(most), shares):
            total = builder.fadd(total, part)
        store(builder, total, beside)
        return context.get_dummy_value()

    return types.void(tag, scores, factor, state, shares, sums, dims), codegen


def _greatest(builder: Any, scores: Any) -> Any:
    """Write IR that finds the greatest score of each lane in one column (`LANES` queries) of a tile; returns
    the vector of these. ``scores``: pointer to the column's scores."""
    together = 4

    def body(step: Any, found: list[Any]) -> list[Any]:
        place = builder.gep(scores, [builder.mul(step, I64(together * LANES))])
        places = [builder.gep(place, [I64(at * LANES)]) for at in range(together)]
        pairs = zip(places, found, strict=True)
        return [greater(builder, load(builder, types.float32, one), old) for one, old in pairs]

    first, *rest = loop(builder, I64(TILE // together), [constant(UNSEEN)] * together, body)
    for other in rest:
        first = greater(builder, other, first)
    return first


def _shares(builder: Any, paired: bool, scores: Any, times: Any, lowered: Any, shares: Any) -> list[Any]:
    """Write IR that stores ``2^(score * times + lowered)`` for one column's scores (`LANES` queries) of a tile
    at the pointer ``shares``; in bfloat16 if ``paired`` (words hold two numbers). ``scores``: a pointer;
    ``times``, ``lowered``: vectors. Returns vectors with each lane's sums: of even and odd positions if
    ``paired``, else one of all."""
    together = 2 if paired else 1

    def body(step: Any, sums: list[Any]) -> list[Any]:
        place = builder.gep(scores, [builder.mul(step, I64(together * LANES))])
        places = [builder.gep(place, [I64(at * LANES)]) for at in range(together)]
        found = [
            exp2(builder, fused(builder, load(builder, types.float32, one), times, lowered)) for one in places
        ]
        words = rounded_pairs(builder, *found) if paired else found[0]
        store(builder, words, builder.gep(shares, [builder.mul(step, I64(LANES))]))
        return [builder.fadd(old, new) for old, new in zip(sums, found, strict=True)]

    return loop(builder, I64(TILE // together), [constant(0.0)] * together, body)


@intrinsic  # type: ignore[untyped-decorator]
def aligned(typing: Any, numbers: Any) -> Any:
    """Intrinsic, returns a pointer: to the first fp32 number at or behind the pointer ``numbers`` at which a
    cache line begins; at most 15 numbers on."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = builder.add(builder.ptrtoint(args[0], I64), I64(63))
        return builder.inttoptr(builder.and_(address, I64(-64)), FLOAT.as_pointer())

    return numbers(numbers), codegen
