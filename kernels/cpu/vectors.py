"""Vectors of 16 numbers in LLVM IR, for the functions that write IR while a kernel is compiled.

Each function takes an IR builder, and values and pointers of the compiled code, and writes instructions; most
return a value of the compiled code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import binding, ir
from numba import config, types
from numba.core import cgutils

LANES = 16
"""Numbers in a vector, on every processor."""

I8, I16, I32, I64, FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
WIDE, WORDS = ir.VectorType(FLOAT, LANES), ir.VectorType(I32, LANES)
"""LLVM vector types: ``WIDE`` has ``LANES`` numbers of fp32, ``WORDS`` has ``LANES`` words of 32 bits."""

Vectors = list[Any]


class _Bfloat16(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat type, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat16)

    def __hash__(self) -> int:
        return hash(_Bfloat16)


HALVES = ir.VectorType(_Bfloat16(), 2 * LANES)
"""LLVM vector type of ``2 * LANES`` numbers of bfloat16."""


def features() -> dict[str, bool]:
    """What the processor has, by LLVM's names, for which code is compiled: this machine's, or those that
    numba is told by ``NUMBA_CPU_FEATURES``."""
    if config.CPU_FEATURES is None:
        return dict(binding.get_host_cpu_features())
    return {name[1:]: name[0] == "+" for name in config.CPU_FEATURES.split(",") if name}


def multiplies_bf16() -> bool:
    """Whether the processor multiplies bfloat16 numbers directly (AVX-512 BF16)."""
    return bool(features().get("avx512bf16"))


def multiplies_bytes() -> str:
    """The prefix of the processor's intrinsics that multiply bytes and sum four products at once (VNNI): for
    vectors of 512 bits, of 256 bits, or "" without them."""
    has = features()
    if has.get("avx512vnni"):
        return "llvm.x86.avx512.vpdpbusd.512"
    return "llvm.x86.avx512.vpdpbusd.256" if has.get("avxvnni") else ""


def has_avx2() -> bool:
    """Whether the processor has integer instructions for vectors of 256 bits (AVX2)."""
    return bool(features().get("avx2"))


def has_wide_registers() -> bool:
    """Whether the processor has 32 registers that hold a whole vector of `LANES` fp32 numbers each
    (AVX-512)."""
    return bool(features().get("avx512f"))


def constant(number: float, kind: ir.VectorType = WIDE) -> Any:
    """A constant vector of IR with ``number`` in every lane."""
    return ir.Constant(kind, [number] * LANES)


def lines(builder: Any, base: Any, line: Any, count: int) -> list[Any]:
    """Write IR that computes pointers to the first ``count`` lines at the pointer ``base``; returns these
    pointers. ``line``: how many elements apart the lines begin, a value of the compiled code."""
    return [builder.gep(base, [builder.mul(I64(at), line)]) for at in range(count)]


def raw(builder: Any, kind: ir.Type, pointer: Any) -> Any:
    """Write IR that loads one value of the LLVM type ``kind``, a number or a vector, from the pointer
    ``pointer``; returns the value, not converted."""
    return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=2)


def load(builder: Any, kind: Any, pointer: Any) -> Any:
    """Write IR that loads ``LANES`` elements of the numba type ``kind`` from the pointer ``pointer`` and
    converts them to fp32 (uint16 is bfloat16, int16 is float16); returns the vector."""
    if kind == types.float32:
        return builder.load(builder.bitcast(pointer, WIDE.as_pointer()), align=4)
    words = raw(builder, ir.VectorType(I16, LANES), pointer)
    if kind == types.int16:
        return builder.fpext(builder.bitcast(words, ir.VectorType(ir.HalfType(), LANES)), WIDE)
    return builder.bitcast(builder.shl(builder.zext(words, WORDS), constant(16, WORDS)), WIDE)


def store(builder: Any, vector: Any, pointer: Any) -> None:
    """Write IR that stores ``vector``, a value, at the pointer ``pointer``; returns nothing."""
    builder.store(vector, builder.bitcast(pointer, vector.type.as_pointer()), align=4)


def spread(builder: Any, number: Any) -> Any:
    """Write IR that puts ``number``, a single value (fp32 or a word), into every lane; returns the vector."""
    nothing = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    first = builder.insert_element(nothing, number, I32(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(WORDS, [0] * LANES))


def picked(builder: Any, vector: Any, lanes: range) -> Any:
    """Write IR that takes those ``lanes`` of ``vector``, a value, in order; returns the shorter vector."""
    return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))


def fused(builder: Any, one: Any, other: Any, old: Any) -> Any:
    """Write IR that computes ``one * other + old`` of three vectors, rounded once if the processor can; returns
    the vector."""
    can = features().get("fma")  # `fmuladd` alone is rounded once in some tiles and not in others
    return _call(builder, f"llvm.{'fma' if can else 'fmuladd'}.v16f32", WIDE, one, other, old)


def fused_pairs(builder: Any, one: Any, other: Any, old: Any) -> Any:
    """Write IR that adds to ``old``, in each lane, the exact products of the two bfloat16 numbers in the words
    of the vectors ``one`` and ``other``, summed in fp32; returns the vector of sums."""
    halves = [builder.bitcast(each, HALVES) for each in (one, other)]
    return _call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", WIDE, old, *halves)


def rounded_pairs(builder: Any, low: Any, high: Any) -> Any:
    """Write IR that makes words of two bfloat16 numbers each: those of the vectors ``low`` and ``high`` (fp32),
    rounded to nearest even, in the lower and upper half of a word; returns the vector of words."""
    behind = _call(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", HALVES, high, low)
    order = [half * LANES + lane for lane in range(LANES) for half in (0, 1)]
    mixed = ir.Constant(ir.VectorType(I32, 2 * LANES), order)
    return builder.bitcast(builder.shuffle_vector(behind, behind, mixed), WORDS)


def rounded(builder: Any, numbers: Any) -> Any:
    """Write IR that rounds a vector of fp32 numbers to bfloat16, to nearest even, two neighbours in a word;
    returns the vector of `LANES` / 2 words."""
    found = _call(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", HALVES, numbers, numbers)
    return picked(builder, builder.bitcast(found, WORDS), range(LANES // 2))


def turned(builder: Any, vectors: Vectors) -> Vectors:
    """Write IR that turns `LANES` vectors of words: vector i of the result has word i of each of ``vectors``,
    in order."""
    step = 1
    while step < LANES:
        # In groups of 2 * step lanes: the halves of two vectors that are `step` apart change places.
        low = [lane if not lane & step else LANES + lane - step for lane in range(LANES)]
        high = [lane + step if not lane & step else LANES + lane for lane in range(LANES)]
        orders = (ir.Constant(WORDS, low), ir.Constant(WORDS, high))
        vectors = [
            builder.shuffle_vector(vectors[at & ~step], vectors[at | step], orders[bool(at & step)])
            for at in range(LANES)
        ]
        step *= 2
    return vectors


def across(builder: Any, vector: Any, join: Callable[[Any, Any], Any]) -> Any:
    """Write IR that joins the lanes of ``vector`` in pairs, then pairs of pairs; returns a vector with the
    result in every lane. ``join``: writes the IR that joins two vectors."""
    step = 1
    while step < LANES:
        beside = ir.Constant(WORDS, [lane ^ step for lane in range(LANES)])
        vector = join(vector, builder.shuffle_vector(vector, vector, beside))
        step *= 2
    return vector


def byte_products(builder: Any, codes: Any, numbers: Any, old: Any, most: int) -> Any:
    """Write IR that adds to each of the words ``old`` four exact products: of the unsigned bytes in the same
    word of ``codes``, none above ``most``, and the signed bytes in that of ``numbers``, none below -127.
    Returns the vector of words."""
    name = multiplies_bytes()
    if name.endswith("512"):
        return _call(builder, name, WORDS, old, codes, numbers)
    if name:
        return _by_halves(
            builder, lambda *each: _call(builder, name, each[0].type, *each), old, codes, numbers
        )
    if not has_avx2():
        return _plain_products(builder, codes, numbers, old)
    if most <= 128:  # two products fit 16 bits
        return _by_halves(builder, lambda *each: _pair_products(builder, *each), old, codes, numbers)
    low = builder.and_(codes, constant(0x0F0F0F0F, WORDS))
    high = builder.and_(builder.lshr(codes, constant(4, WORDS)), constant(0x0F0F0F0F, WORDS))
    nothing = ir.Constant(WORDS, None)
    more = _by_halves(builder, lambda *each: _pair_products(builder, *each), nothing, high, numbers)
    old = builder.add(old, builder.shl(more, constant(4, WORDS)))
    return _by_halves(builder, lambda *each: _pair_products(builder, *each), old, low, numbers)


def _pair_products(builder: Any, old: Any, codes: Any, numbers: Any) -> Any:
    """`byte_products` of 8 words, for codes up to 128, by AVX2."""
    octets, pairs = ir.VectorType(I8, 32), ir.VectorType(I16, 16)
    both = [builder.bitcast(each, octets) for each in (codes, numbers)]
    products = _call(builder, "llvm.x86.avx2.pmadd.ub.sw", pairs, *both)
    summed = _call(builder, "llvm.x86.avx2.pmadd.wd", old.type, products, ir.Constant(pairs, [1] * 16))
    return builder.add(old, summed)


def _plain_products(builder: Any, codes: Any, numbers: Any, old: Any) -> Any:
    """`byte_products` on any processor."""
    for byte in range(4):
        one = builder.and_(builder.lshr(codes, constant(8 * byte, WORDS)), constant(255, WORDS))
        up = builder.shl(numbers, constant(24 - 8 * byte, WORDS))
        old = builder.add(old, builder.mul(one, builder.ashr(up, constant(24, WORDS))))
    return old


def looked_up(builder: Any, table: Sequence[int], codes: Any) -> Any:
    """Write IR that replaces each byte of the words ``codes``, which are below 16, by that entry of ``table``,
    16 unsigned bytes; returns the vector of words."""
    if not has_avx2():
        found = ir.Constant(WORDS, None)
        for byte in range(4):
            one = builder.and_(builder.lshr(codes, constant(8 * byte, WORDS)), constant(15, WORDS))
            entry = constant(table[0], WORDS)
            for at in range(1, 16):
                same = builder.icmp_unsigned("==", one, constant(at, WORDS))
                entry = builder.select(same, constant(table[at], WORDS), entry)
            found = builder.or_(found, builder.shl(entry, constant(8 * byte, WORDS)))
        return found
    wide = bool(features().get("avx512bw"))
    octets = ir.VectorType(I8, 64 if wide else 32)
    name = "llvm.x86.avx512.pshuf.b.512" if wide else "llvm.x86.avx2.pshuf.b"
    entries = ir.Constant(octets, [*table] * (octets.count // 16))

    def chosen(some: Any) -> Any:
        found = _call(builder, name, octets, entries, builder.bitcast(some, octets))
        return builder.bitcast(found, some.type)

    return chosen(codes) if wide else _by_halves(builder, chosen, codes)


def _by_halves(builder: Any, act: Callable[..., Any], *vectors: Any) -> Any:
    """Write the IR of ``act`` for both halves of vectors of ``LANES`` words; returns the whole result."""
    low, high = (
        act(*(picked(builder, each, range(at, at + LANES // 2)) for each in vectors))
        for at in (0, LANES // 2)
    )
    return builder.shuffle_vector(low, high, ir.Constant(WORDS, [*range(LANES)]))


def greater(builder: Any, new: Any, old: Any) -> Any:
    """Write IR that takes the greater number in each lane of two vectors, that of ``old`` if ``new`` is NaN;
    returns the vector."""
    return builder.select(builder.fcmp_ordered(">", new, old), new, old)


def any_lane(builder: Any, lanes: Any) -> Any:
    """Write IR that tells whether one of ``LANES`` booleans (``lanes``, a vector) is true; returns a single
    boolean of the compiled code."""
    return builder.icmp_unsigned("!=", builder.bitcast(lanes, I16), I16(0))


_SHIFT = 12582912.0  # 1.5 * 2^23: added to a small number, its low bits are the nearest integer
_LEAST = -126.0
_SERIES = (
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
    1.0,
)


def exp2(builder: Any, x: Any) -> Any:
    """Write IR that computes ``2^x`` in each lane of the vector ``x``, for numbers below 127, within two units
    in the last place; 0 below -126, 1 for 0, NaN for NaN. Returns the vector.

    Its sums must keep their order: call it from functions compiled with `compiling.in_order`. Source: Cephes'
    ``exp2f``.
    """
    shifted = builder.fadd(x, constant(_SHIFT))
    rest = builder.fsub(x, builder.fsub(shifted, constant(_SHIFT)))
    series = constant(_SERIES[0])
    for factor in _SERIES[1:]:
        series = fused(builder, series, rest, constant(factor))
    power = builder.shl(builder.bitcast(shifted, WORDS), constant(23, WORDS))
    result = builder.bitcast(builder.add(builder.bitcast(series, WORDS), power), WIDE)
    return builder.select(builder.fcmp_unordered(">=", x, constant(_LEAST)), result, constant(0.0))


def loop(builder: Any, count: Any, begin: Vectors, body: Callable[[Any, Vectors], Vectors]) -> Vectors:
    """Write IR for a loop of ``count`` steps, at least one. ``body(step, vectors)`` writes the IR of a step,
    and returns the vectors for the next step; the first step gets ``begin``. Returns the vectors of the last
    step."""
    before, block = builder.block, builder.append_basic_block("step")
    after = builder.append_basic_block("done")
    builder.branch(block)
    builder.position_at_end(block)
    step = builder.phi(I64)
    carried = [builder.phi(each.type) for each in begin]
    results = body(step, carried)
    following, last = builder.add(step, I64(1)), builder.block  # another one than `block` behind a loop in it
    step.add_incoming(I64(0), before)
    step.add_incoming(following, last)
    for old, first, new in zip(carried, begin, results, strict=True):
        old.add_incoming(first, before)
        old.add_incoming(new, last)
    builder.cbranch(builder.icmp_signed("<", following, count), block, after)
    builder.position_at_end(after)
    return results


def _call(builder: Any, name: str, result: ir.Type, *arguments: Any) -> Any:
    shape = ir.FunctionType(result, [each.type for each in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, shape, name), arguments)
