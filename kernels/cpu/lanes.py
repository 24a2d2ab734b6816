"""Attention in tiles: packing, products and softmax in LLVM IR, with the same bits for one query and for many.

Of many queries (`prefill`) each has a lane of the vectors. Scores are stored as ``[position, query]``, weighted
values as ``[dim, query]``: numbers of K and V are spread over all lanes, queries and exponentials ("shares")
are read as vectors. So a query's numbers depend on its own lane only, and neither K nor V is transposed. For a
few queries (`decode`) lanes are positions, then dims, and the queries' numbers are spread. Both do the same
operations in the same order for each number, and merge the same spans of `SPAN` positions.

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

In decode, with 16 queries in a column:

    keys     [TILE / LANES, dim words, LANES]        words of `LANES` positions side by side
    scores   [TILE / LANES, query, LANES]            fp32
    shares   [query, TILE]                           words
    sums     [dims / LANES, query, LANES]            fp32

All memory is passed as pointers to fp32, also for words.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .vectors import (
    FLOAT,
    HALVES,
    I16,
    I32,
    I64,
    LANES,
    WIDE,
    WORDS,
    across,
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
    rounded,
    rounded_pairs,
    spread,
    store,
    turned,
)

TILE = 64
"""Positions of the context in a tile of K and V."""

SPAN = 4 * TILE
"""Positions of the context that are attended to together; the results of spans are merged."""

HEIGHTS = {1: 16, 2: 8} if has_wide_registers() else {1: 4, 2: 2}
"""How many rows the tile of sums of `product` has in prefill, by its number of columns (1 or 2): as many as
registers hold; divisors of `TILE`."""

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
        store(builder, _words(builder, first.dtype, args[0], args[1]), args[2])
        return context.get_dummy_value()

    return types.void(first, second, into), codegen


def _words(builder: Any, kind: Any, first: Any, second: Any) -> Any:
    """Write IR that makes `LANES` words of the elements of ``kind`` at the pointer ``first``, with those at the
    pointer ``second`` as upper halves if words hold two bfloat16 (see `in_pairs`); returns the vector."""
    if not in_pairs(kind):
        return builder.bitcast(load(builder, kind, first), WORDS)
    one, two = (raw(builder, ir.VectorType(I16, LANES), each) for each in (first, second))
    order = [half * LANES + lane for lane in range(LANES) for half in (0, 1)]
    mixed = ir.Constant(ir.VectorType(I32, 2 * LANES), order)
    return builder.bitcast(builder.shuffle_vector(one, two, mixed), WORDS)


def product(rows: int, columns: int, *, run: int, apart: int, fresh: bool) -> Any:
    """Make an intrinsic that computes one tile of a matrix product: ``into[row, lane] (+)= sum over steps of
    left[step, row] * right[step, lane]``.

    A step is one word of 32 bits (one fp32 number, or two of bfloat16). The tile has ``columns`` columns of
    `LANES` lanes. ``fresh``: overwrite ``into`` instead of adding.

    In ``left`` the word of a row at a step is ``step // run * left_line + step % run + row * apart``. Columns
    of ``right`` and ``into`` have `LANES` words for each step or row, and begin ``right_column`` and
    ``into_column`` words apart. The intrinsic returns nothing. Its arguments: a number of the element type,
    ``left``, ``left_line``, ``right``, ``right_column``, ``steps``, ``into``, ``into_column``; ``left``,
    ``right`` and ``into`` are pointers, the others values.
    """

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
            pointers = [builder.gep(one, [I64(row * LANES)]) for row in range(rows) for one in corners]

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

            begin = [
                constant(0.0) if fresh else load(builder, types.float32, pointer) for pointer in pointers
            ]
            for vector, pointer in zip(loop(builder, deep, begin, body), pointers, strict=True):
                store(builder, vector, pointer)
            return context.get_dummy_value()

        return types.void(tag, left, left_line, right, right_column, steps, into, into_column), codegen

    return tile


def weigh_tile(rows: int, columns: int) -> Any:
    """Make an intrinsic that adds to the sums of ``rows`` queries the values of positions, in decode's layout,
    weighted by their shares, for ``columns`` columns of `LANES` dims.

    The intrinsic returns nothing. ``addresses``: pointer to the addresses of the positions' lines, at the first
    of the dims; ``steps``: how many words of positions, a value; ``shares``, ``sums``: pointers to those of the
    first query."""

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(typing: Any, tag: Any, addresses: Any, begin: Any, steps: Any, shares: Any, sums: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, addresses, first, count, words, into = args
            kind, each = context.get_value_type(types.CPointer(tag)), 2 if in_pairs(tag) else 1
            corners = [
                builder.gep(into, [I64((column * LANES + row) * LANES)])
                for row in range(rows)
                for column in range(columns)
            ]

            def body(step: Any, sums: list[Any]) -> list[Any]:
                at = builder.mul(step, I64(each))
                lines = [
                    builder.gep(
                        builder.inttoptr(
                            builder.load(builder.gep(addresses, [builder.add(at, I64(one))])), kind
                        ),
                        [first],
                    )
                    for one in range(each)
                ]
                vectors = [
                    builder.bitcast(
                        _words(
                            builder,
                            tag,
                            *(builder.gep(lines[one % each], [I64(c * LANES)]) for one in (0, 1)),
                        ),
                        WIDE,
                    )
                    for c in range(columns)
                ]
                numbers = [
                    spread(builder, builder.load(builder.gep(words, [builder.add(step, I64(row * TILE))])))
                    for row in range(rows)
                ]
                multiply = fused_pairs if in_pairs(tag) else fused
                pairs = [(number, vector) for number in numbers for vector in vectors]
                return [multiply(builder, a, b, old) for (a, b), old in zip(pairs, sums, strict=True)]

            begin = [load(builder, types.float32, pointer) for pointer in corners]
            for vector, pointer in zip(loop(builder, count, begin, body), corners, strict=True):
                store(builder, vector, pointer)
            return context.get_dummy_value()

        return types.void(tag, addresses, begin, steps, shares, sums), codegen

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
            pointer = builder.gep(scores, [builder.mul(step, I64(LANES))])
            position = spread(builder, builder.trunc(builder.add(first, step), I32))
            seen = builder.and_(
                builder.icmp_signed(">=", position, low), builder.icmp_signed("<=", position, high)
            )
            store(
                builder,
                builder.select(seen, load(builder, types.float32, pointer), constant(UNSEEN)),
                pointer,
            )
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
                pointer = builder.gep(sums, [builder.mul(step, I64(LANES))])
                store(builder, builder.fmul(load(builder, types.float32, pointer), shrunk), pointer)
                return nothing

            loop(builder, dims, [], shrink)
        total = load(builder, types.float32, beside)
        added = _shares(builder, in_pairs(tag), scores, times, builder.fneg(most), shares)
        store(builder, builder.fadd(total, added), beside)
        return context.get_dummy_value()

    return types.void(tag, scores, factor, state, shares, sums, dims), codegen


def _greatest(builder: Any, scores: Any) -> Any:
    """Write IR that finds the greatest score of each lane in one column (`LANES` queries) of a tile; returns
    the vector of these. ``scores``: pointer to the column's scores."""
    together = 4

    def body(step: Any, found: list[Any]) -> list[Any]:
        pointer = builder.gep(scores, [builder.mul(step, I64(together * LANES))])
        pointers = [builder.gep(pointer, [I64(at * LANES)]) for at in range(together)]
        pairs = zip(pointers, found, strict=True)
        return [greater(builder, load(builder, types.float32, one), old) for one, old in pairs]

    first, *rest = loop(builder, I64(TILE // together), [constant(UNSEEN)] * together, body)
    for other in rest:
        first = greater(builder, other, first)
    return first


def _shares(builder: Any, paired: bool, scores: Any, times: Any, lowered: Any, shares: Any) -> Any:
    """Write IR that stores ``2^(score * times + lowered)`` for one column's scores (`LANES` queries) of a tile
    at the pointer ``shares``; in bfloat16 if ``paired`` (words hold two numbers). ``scores``: a pointer;
    ``times``, ``lowered``: vectors. Returns a vector, each lane's sum: of each 16 positions in turn, added in
    pairs, and pairs of pairs."""

    def body(step: Any, sums: list[Any]) -> list[Any]:
        pointer = builder.gep(scores, [builder.mul(step, I64(LANES * LANES))])
        to = builder.gep(shares, [builder.mul(step, I64(LANES * LANES // (2 if paired else 1)))])
        levels: list[tuple[int, Any]] = []
        found: list[Any] = []
        for at in range(LANES):
            score = load(builder, types.float32, builder.gep(pointer, [I64(at * LANES)]))
            found.append(exp2(builder, fused(builder, score, times, lowered)))
            if not paired:
                store(builder, found[at], builder.gep(to, [I64(at * LANES)]))
            elif at % 2:
                words = rounded_pairs(builder, found[at - 1], found[at])
                store(builder, words, builder.gep(to, [I64(at // 2 * LANES)]))
            levels.append((1, found[at]))
            while len(levels) > 1 and levels[-1][0] == levels[-2][0]:
                (count, right), (_, left) = levels.pop(), levels.pop()
                levels.append((2 * count, builder.fadd(left, right)))
        return [builder.fadd(sums[0], levels[0][1])]

    (total,) = loop(builder, I64(TILE // LANES), [constant(0.0)], body)
    return total


@intrinsic  # type: ignore[untyped-decorator]
def soften_one(
    typing: Any, tag: Any, scores: Any, factor: Any, state: Any, shares: Any, sums: Any, columns: Any
) -> Any:
    """Intrinsic, returns nothing: `soften` of one query in decode's layout. All pointers are those of the query
    itself; ``columns``: how many vectors of sums it has, a value. For functions compiled `in_order`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, scores, factor, state, shares, sums, columns = args
        times, beside = spread(builder, factor), builder.gep(state, [I64(LANES)])
        before = spread(builder, builder.load(state))
        groups = [
            load(builder, types.float32, builder.gep(scores, [I64(at * LANES * LANES)]))
            for at in range(TILE // LANES)
        ]
        most = constant(UNSEEN)
        for group in groups:
            most = greater(builder, group, most)
        most = across(builder, most, lambda one, other: greater(builder, other, one))
        most = greater(builder, builder.fmul(most, times), before)
        with builder.if_then(any_lane(builder, builder.fcmp_unordered("!=", most, before))):
            shrunk = exp2(builder, builder.fsub(before, most))
            builder.store(builder.extract_element(most, I32(0)), state)
            total = builder.fmul(spread(builder, builder.load(beside)), shrunk)
            builder.store(builder.extract_element(total, I32(0)), beside)

            def shrink(step: Any, nothing: list[Any]) -> list[Any]:
                pointer = builder.gep(sums, [builder.mul(step, I64(LANES * LANES))])
                store(builder, builder.fmul(load(builder, types.float32, pointer), shrunk), pointer)
                return nothing

            loop(builder, columns, [], shrink)
        lowered, added = builder.fneg(most), constant(0.0)
        for at, group in enumerate(groups):
            found = exp2(builder, fused(builder, group, times, lowered))
            if in_pairs(tag):
                store(builder, rounded(builder, found), builder.gep(shares, [I64(at * LANES // 2)]))
            else:
                store(builder, found, builder.gep(shares, [I64(at * LANES)]))
            added = builder.fadd(added, across(builder, found, builder.fadd))
        total = builder.fadd(spread(builder, builder.load(beside)), added)
        builder.store(builder.extract_element(total, I32(0)), beside)
        return context.get_dummy_value()

    return types.void(tag, scores, factor, state, shares, sums, columns), codegen


@intrinsic  # type: ignore[untyped-decorator]
def shrinks(typing: Any, most: Any, other: Any, into: Any) -> Any:
    """Intrinsic, returns nothing: of two spans with the greatest scores at the pointers ``most`` and ``other``
    (`LANES` queries each), the factors on their sums when they are merged. The factors of the second are
    stored behind those of the first at the pointer ``into``, and the greater scores at ``most``. For functions
    compiled `in_order`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, second, to = args
        one, two = (load(builder, types.float32, each) for each in (pointer, second))
        most = greater(builder, two, one)
        store(builder, exp2(builder, builder.fsub(one, most)), to)
        store(builder, exp2(builder, builder.fsub(two, most)), builder.gep(to, [I64(LANES)]))
        store(builder, most, pointer)
        return context.get_dummy_value()

    return types.void(most, other, into), codegen


@intrinsic  # type: ignore[untyped-decorator]
def merge(typing: Any, total: Any, factor: Any, other: Any, second: Any) -> Any:
    """Intrinsic, returns nothing: ``total = total * factor + other * second`` of `LANES` numbers at the
    pointers ``total`` and ``other``. ``factor``, ``second``: pointers to as many factors, or single values."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, first, added, then = args
        first, then = (
            spread(builder, each) if kind == types.float32 else load(builder, types.float32, each)
            for each, kind in ((first, factor), (then, second))
        )
        shrunk = builder.fmul(load(builder, types.float32, pointer), first)
        store(builder, fused(builder, load(builder, types.float32, added), then, shrunk), pointer)
        return context.get_dummy_value()

    return types.void(total, factor, other, second), codegen


@intrinsic  # type: ignore[untyped-decorator]
def turn_lines(typing: Any, tag: Any, addresses: Any, words: Any, into: Any) -> Any:
    """Intrinsic, returns nothing: store the words of `LANES` lines, whose addresses are at the pointer
    ``addresses``, side by side at the pointer ``into``: ``[words, LANES]``. ``words``: those of a line, a
    multiple of `LANES`, a value. ``tag``: a number of the element type."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, addresses, count, to = args
        kind = context.get_value_type(types.CPointer(tag))
        each = 2 * LANES if in_pairs(tag) else LANES
        begins = [
            builder.inttoptr(builder.load(builder.gep(addresses, [I64(line)])), kind) for line in range(LANES)
        ]

        def body(step: Any, nothing: list[Any]) -> list[Any]:
            at = builder.mul(step, I64(each))
            vectors = []
            for begin in begins:
                pointer = builder.gep(begin, [at])
                if in_pairs(tag):
                    vectors.append(builder.bitcast(raw(builder, HALVES, pointer), WORDS))
                else:
                    vectors.append(builder.bitcast(load(builder, tag, pointer), WORDS))
            for word, vector in enumerate(turned(builder, vectors)):
                line = builder.add(builder.mul(step, I64(LANES * LANES)), I64(word * LANES))
                store(builder, vector, builder.gep(to, [line]))
            return nothing

        loop(builder, builder.udiv(count, I64(LANES)), [], body)
        return context.get_dummy_value()

    return types.void(tag, addresses, words, into), codegen


@intrinsic  # type: ignore[untyped-decorator]
def aligned(typing: Any, numbers: Any) -> Any:
    """Intrinsic, returns a pointer: to the first fp32 number at or behind the pointer ``numbers`` at which a
    cache line begins; at most 15 numbers on."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = builder.add(builder.ptrtoint(args[0], I64), I64(63))
        return builder.inttoptr(builder.and_(address, I64(-64)), FLOAT.as_pointer())

    return numbers(numbers), codegen
