"""Programs: operations that all threads do one after the other, in one call of compiled code.

An operation is a row of a program: its number, and the indices of its operands among the program's values
(addresses and counts, int64) and factors (fp64). Its work is cut into parts, one for each thread; when a thread
has done its part, it waits in a loop for the others, which takes a fraction of what starting them does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, config, get_num_threads, prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from ..packed_types import PANEL, RUN, TYPES
from . import decode, elementwise, linear, low_rank, packed, prefill
from .batch import CpuBatch
from .compiling import cache_folder, compiled, inlined
from .elements import TAGS, Pointer, address_of, memory, offset, pointer
from .lanes import SPAN
from .vectors import I64, LANES

NORM, GATE, ROTATE, ATTEND, MULTIPLY, ADAPT = range(6)
"""The numbers of the operations."""

OPERANDS = 24
"""The most operands of an operation."""

MATRICES = 3
"""The most matrices of a `MULTIPLY`."""

SPINS = 4000
"""So often a thread looks whether the others have come, before it lets other processes have its core."""

PATIENCE = 1 << 28
"""Cycles, about a tenth of a second, that a part waits for the others to begin."""
CLAIMED = -(1 << 40)
"""The count of parts that have begun, of a program that one thread has claimed."""
ALONE_SECONDS = 10.0
"""After a program had to be claimed, programs run on one thread for so long."""

# --- products by address ------------------------------------------------------------------------------------

TAKE, PRODUCT = 0, 1
PIECE, RUNNER = 12, 7
"""How many operands the compiled functions have that are called by address: those of `piece` and of
`runner`."""
_kept: list[Any] = []
"""Compiled functions, which must live as long as their addresses are used."""


def _compiled(function: Callable[..., None], operands: int) -> int:
    """The address of ``function``, which takes so many int64, compiled."""
    folder, before = cache_folder(), config.CACHE_DIR
    config.CACHE_DIR = folder or before
    try:
        made = cfunc(types.void(*(types.int64,) * operands), cache=folder is not None, error_model="numpy")(
            function
        )
    finally:
        config.CACHE_DIR = before
    _kept.append(made)
    address: int = made.address
    return address


@cache
def piece(kind: str, dtype: torch.dtype) -> int:
    """The address of a compiled function that does a thread's part of a product with a matrix of the type
    ``kind`` (of `packed_types`), for other numbers of ``dtype``: for `TAKE` with ``take`` of `linear` or
    `packed`, for `PRODUCT` with its ``multiply``."""
    return _compiled((_quantised if kind in TYPES else _plain)(KINDS[kind], TAGS[dtype]), PIECE)


KINDS = {**packed.TAGS, **{str(dtype).removeprefix("torch."): tag for dtype, tag in TAGS.items()}}
"""For each type of weights in panels an argument that selects the compiled version."""


def _plain(kind: Any, tag: Any) -> Any:
    def plain_piece(stage, part, parts, rows, x, lines, weight, bias, out, out_line, n, width):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
        if stage == TAKE:
            linear.take(rows * part // parts, rows * (part + 1) // parts, rows, x, lines, width, kind, tag)
        else:
            count = (n + PANEL - 1) // PANEL
            low, high = count * part // parts, count * (part + 1) // parts
            linear.multiply(low, high, rows, lines, weight, bias, out, out_line, n, width, kind, tag)

    return plain_piece


def _quantised(kind: Any, tag: Any) -> Any:
    def packed_piece(stage, part, parts, rows, x, lines, weight, bias, out, out_line, n, width):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
        if stage == TAKE:
            packed.take(rows * part // parts, rows * (part + 1) // parts, rows, x, lines, width, kind, tag)
        else:
            count = (n + PANEL - 1) // PANEL
            low, high = count * part // parts, count * (part + 1) // parts
            packed.multiply(low, high, rows, lines, weight, bias, out, out_line, n, width, kind, tag)

    return packed_piece


def _caller(operands: int) -> Any:
    """Make an intrinsic that calls the compiled function at an address with so many operands, and returns
    nothing. All are values, int64: the address, then the operands as a tuple."""

    @intrinsic  # type: ignore[untyped-decorator]
    def call(typing: Any, address: Any, given: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            shape = ir.FunctionType(ir.VoidType(), [I64] * operands)
            values = [builder.extract_value(args[1], at) for at in range(operands)]
            builder.call(builder.inttoptr(args[0], shape.as_pointer()), values)
            return context.get_dummy_value()

        return types.void(types.int64, types.UniTuple(types.int64, operands)), codegen

    return call


_call, _call_runner = _caller(PIECE), _caller(RUNNER)


# --- waiting ------------------------------------------------------------------------------------------------

_sched_yield: Any = types.ExternalFunction("sched_yield", types.int32())


@intrinsic  # type: ignore[untyped-decorator]
def _arrive(typing: Any, counter: Any) -> Any:
    """Intrinsic, returns a value: count one more at the pointer ``counter`` (int64), in one piece; the count
    before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", args[0], I64(1), "acq_rel")

    return types.int64(counter), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _look(typing: Any, counter: Any) -> Any:
    """Intrinsic, returns a value: the count at the pointer ``counter`` (int64), after a short pause."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        shape = ir.FunctionType(ir.VoidType(), [])
        builder.call(cgutils.get_or_insert_function(builder.module, shape, "llvm.x86.sse2.pause"), [])
        return builder.load_atomic(args[0], "acquire", 8)

    return types.int64(counter), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _claim(typing: Any, counter: Any, seen: Any) -> Any:
    """Intrinsic, returns a value, whether it took effect: set the count at the pointer ``counter`` (int64) to
    `CLAIMED`, if it is ``seen``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = builder.cmpxchg(args[0], args[1], I64(CLAIMED), "acq_rel", "acquire")
        return builder.extract_value(found, 1)

    return types.boolean(counter, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _cycles(typing: Any) -> Any:
    """Intrinsic, returns a value, int64: the processor's count of cycles."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        shape = ir.FunctionType(I64, [])
        clock = cgutils.get_or_insert_function(builder.module, shape, "llvm.readcyclecounter")
        return builder.call(clock, [])

    return types.int64(), codegen


@inlined
def _meet(started: Pointer, parts: int) -> int:
    """Begin a part: wait until all ``parts`` have begun. Returns into how many parts the program is cut: 0: it
    is not this thread's. OpenMP may run parts one after the other (``OMP_DYNAMIC``, ``OMP_THREAD_LIMIT``): one
    that has waited for `PATIENCE` claims the whole program, and the others have nothing to do."""
    if parts == 1:
        return 1
    if _arrive(started) < 0:
        return 0
    looks, begin = 0, _cycles()
    while True:
        here = _look(started)
        if here < 0:
            return 0
        if here == parts:
            return parts
        looks += 1
        if looks > SPINS:
            _sched_yield()
            if _cycles() - begin > PATIENCE and _claim(started, here):
                return 1


@inlined
def _wait(counter: Pointer, parts: int) -> None:
    """Wait until all ``parts`` threads have come here as often as this one."""
    if parts == 1:
        return
    target = (_arrive(counter) // parts + 1) * parts
    looks = 0
    while _look(counter) < target:
        looks += 1
        if looks > SPINS:
            _sched_yield()


# --- operations ---------------------------------------------------------------------------------------------


@inlined
def _norm(part: int, parts: int, a: Any, eps: float, tag: Any) -> None:
    """`elementwise.norm_rows`. ``a``: rows, width, x, residual (0: none), weight (0: no norm), total, out."""
    rows, width = a[0], a[1]
    elementwise.norm_rows(
        rows * part // parts, rows * (part + 1) // parts, pointer(a[2], tag), pointer(a[3], tag), a[3] != 0,
        pointer(a[4], tag), a[4] != 0, pointer(a[5], tag), pointer(a[6], tag), width, eps, tag,
    )  # fmt: skip


@inlined
def _gate(part: int, parts: int, a: Any, tag: Any) -> None:
    """`elementwise.gate_rows`. ``a``: rows, width, gate and up, out, kind."""
    low, high = a[0] * part // parts, a[0] * (part + 1) // parts
    elementwise.gate_rows(low, high, pointer(a[2], tag), pointer(a[3], tag), a[1], a[4], tag)


@inlined
def _rotate(part: int, parts: int, a: Any, eps: float, tag: Any) -> None:
    """`elementwise.rotate_tokens`. ``a``: tokens, q_heads, kv_heads, head_dim, rotary_dim, block_tokens,
    layers, layer, slots, qkv, weight, kind, cos, sin, arena, query."""
    tokens, q_heads, kv_heads, dim, turning, slots, layers, layer = (
        a[0],
        a[1],
        a[2],
        a[3],
        a[4],
        a[5],
        a[6],
        a[7],
    )
    size = 2 * kv_heads * slots * dim
    elementwise.rotate_tokens(
        tokens * part // parts, tokens * (part + 1) // parts, pointer(a[8], types.int64(0)), pointer(a[9], tag),
        pointer(a[10], tag), a[11], eps, pointer(a[12], tag), pointer(a[13], tag), pointer(a[14], tag),
        pointer(a[15], tag), (q_heads, kv_heads, dim, turning, slots, layers * size, layer * size), tag,
    )  # fmt: skip


@inlined
def _attend(part: int, parts: int, a: Any, scale: float, soft_cap: float, counter: Pointer, tag: Any) -> None:
    """Attention: `decode` of rows with one token, `prefill` of the others. ``a``: singles, longest, address of
    singles, of scratch; chunks, most, address of chunks; q_heads, kv_heads, head_dim, block_tokens, layers,
    layer, window; query, out, arena, starts, contexts, tables, widest."""
    singles, longest, chunks, most = a[0], a[1], a[4], a[5]
    q_heads, kv_heads, dim, slots, layers, layer, window = a[7], a[8], a[9], a[10], a[11], a[12], a[13]
    word, share, size = types.int64(0), q_heads // kv_heads, 2 * kv_heads * slots * dim
    query, out, arena = pointer(a[14], tag), pointer(a[15], tag), pointer(a[16], tag)
    starts, contexts, tables = pointer(a[17], word), pointer(a[18], word), pointer(a[19], word)
    widest, shape = a[20], (share, kv_heads, dim, slots, layers * size)
    if chunks:
        prefill.attend_chunks(
            part, parts, pointer(a[6], word), chunks, most, query, out, arena, starts, contexts, tables, widest,
            layer * size, shape, scale, window, soft_cap, tag,
        )  # fmt: skip
    if singles:
        spans, dims = (longest + SPAN - 1) // SPAN, (dim + LANES - 1) // LANES * LANES
        found = carray(pointer(a[3], np.float32(0)), (singles, kv_heads, spans, share, dims + 2))
        decode.attend_singles(
            part, parts, pointer(a[2], word), singles, spans, query, arena, starts, contexts, tables, widest,
            layer * size, shape, scale, window, soft_cap, found, tag,
        )  # fmt: skip
        _wait(counter, parts)
        decode.merge_singles(
            part, parts, pointer(a[2], word), singles, spans, starts, shape, found, out, tag
        )  # fmt: skip


@inlined
def _multiply(part: int, parts: int, a: Any, counter: Pointer) -> None:
    """A product with up to `MATRICES` packed matrices, whose columns lie beside each other. ``a``: rows, width,
    x, scratch (`scratch_bytes`), out, columns of out; of each matrix the address of its `piece` (0: there is
    none), of its weight and bias, and its rows; the bytes of a number. Few rows are taken by each thread for
    itself, as that is less work than waiting."""
    rows, width, x, scratch, out, line, element = a[0], a[1], a[2], a[3], a[4], a[5], a[18]
    alone = rows < 2 * parts
    room = rows * ((width + RUN - 1) // RUN * RUN) * 4
    if alone:
        scratch += part * (1 + (a[10] != 0) + (a[14] != 0)) * room
    for number in range(MATRICES):
        call, weight, bias, n = a[6 + 4 * number], a[7 + 4 * number], a[8 + 4 * number], a[9 + 4 * number]
        if call and not (number and call == a[2 + 4 * number]):
            begin, of = (0, 1) if alone else (part, parts)
            into = scratch + number * room
            _call(call, (TAKE, begin, of, rows, x, into, weight, bias, out, line, n, width))
    if not alone:
        _wait(counter, parts)
    lines = scratch
    for number in range(MATRICES):
        call, weight, bias, n = a[6 + 4 * number], a[7 + 4 * number], a[8 + 4 * number], a[9 + 4 * number]
        if call:
            if not (number and call == a[2 + 4 * number]):
                lines = scratch + number * room
            _call(call, (PRODUCT, part, parts, rows, x, lines, weight, bias, out, line, n, width))
        out += n * element


@inlined
def _adapt(part: int, parts: int, a: Any, tag: Any) -> None:
    """`low_rank.add_to_rows`. ``a``: rows, x, out, the addresses of the pairs' a, b, ranks and starts, that of
    the slots; numbers of a row of x and of out, lines of a, parts of the map, room, strips."""
    word = types.int64(0)
    low_rank.add_to_rows(
        a[0] * part // parts, a[0] * (part + 1) // parts, pointer(a[1], tag), pointer(a[2], tag),
        pointer(a[3], tag), pointer(a[4], tag), pointer(a[5], word), pointer(a[6], word), pointer(a[7], word),
        a[8], a[9], a[10], a[11], a[12], a[13], tag,
    )  # fmt: skip


@cache
def runner(dtype: torch.dtype) -> int:
    """The address of a compiled function that does a thread's part of all operations of a program, with
    elements of ``dtype``: see `run`."""
    tag = TAGS[dtype]

    def program_part(part, parts, program_at, operations, values_at, counter_at, factors_at):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
        a, word = np.empty(OPERANDS, np.int64), np.int64(0)
        program, values, counter = (
            pointer(program_at, word),
            pointer(values_at, word),
            pointer(counter_at, word),
        )
        factors = pointer(factors_at, np.float64(0))
        for at in range(operations):
            row = offset(program, at * (3 + OPERANDS))
            for i in range(OPERANDS):
                a[i] = values[row[3 + i]]
            operation, first, second = row[0], factors[row[1]], factors[row[2]]
            if operation == NORM:
                _norm(part, parts, a, first, tag)
            elif operation == GATE:
                _gate(part, parts, a, tag)
            elif operation == ROTATE:
                _rotate(part, parts, a, first, tag)
            elif operation == ATTEND:
                _attend(part, parts, a, first, second, counter, tag)
            elif operation == ADAPT:
                _adapt(part, parts, a, tag)
            else:
                _multiply(part, parts, a, counter)
            _wait(counter, parts)

    return _compiled(program_part, RUNNER)


@inlined
def _part(part: int, parts: int, address: int, program: Any, values: Any, counters: Any,
          factors: Any) -> None:  # fmt: skip
    """Part number ``part`` of `run`. ``counters``: of waiting, and of parts that have begun; the third
    becomes 1 if one thread does all."""
    cut = _meet(offset(memory(counters), 1), parts)
    if cut == 0:
        return
    if cut < parts:
        part, counters[2] = 0, 1
    addresses = (address_of(memory(values)), address_of(memory(counters)), address_of(memory(factors)))
    _call_runner(address, (part, cut, address_of(memory(program)), len(program), *addresses))


@compiled
def _run(parts: int, address: int, program: Any, values: Any, factors: Any) -> bool:
    """`run` with the ``address`` of the `runner`. Returns whether all parts ran at once. Compiled numba
    code."""
    counters = np.zeros(3, np.int64)
    if parts == 1:
        _part(0, 1, address, program, values, counters, factors)
    else:
        for part in prange(parts):
            _part(part, parts, address, program, values, counters, factors)
    return bool(counters[2] == 0)


_alone_until = -math.inf


def run(
    parts: int,
    program: NDArray[np.int64],
    values: NDArray[np.int64],
    factors: NDArray[np.float64],
    dtype: torch.dtype,
) -> None:
    """Run ``program``, int64 ``[operations, 3 + OPERANDS]``, on ``parts`` threads: each row has the operation's
    number, the indices of two of the ``factors`` (fp64), and those of its operands among the ``values``
    (int64). ``dtype``: of the elements. The results have the same bits on any number of threads."""
    global _alone_until
    if not _run(parts, runner(dtype), program, values, factors):
        _alone_until = time.monotonic() + ALONE_SECONDS


def at_once(parts: int) -> int:
    """On how many threads to run a program that is cut into at most ``parts``."""
    return 1 if time.monotonic() < _alone_until else min(parts, get_num_threads())


def scratch_bytes(rows: int, width: int, matrices: int, parts: int) -> int:
    """The bytes of scratch memory of a `MULTIPLY` of ``rows`` rows of ``width`` numbers with so many
    ``matrices``, on ``parts`` threads."""
    return matrices * 4 * rows * -(-width // RUN) * RUN * (parts if rows < 2 * parts else 1)


def attention_bytes(batch: CpuBatch, q_heads: int, dim: int) -> int:
    """The bytes of scratch memory of an `ATTEND` of a batch."""
    spans, dims = -(-batch.longest // SPAN), -(-dim // LANES) * LANES
    return 4 * batch.singles.size * q_heads * spans * (dims + 2)


_ONE = {
    operation: np.array([[operation, 0, 1, *range(OPERANDS)]])
    for operation in (NORM, GATE, ROTATE, ATTEND, MULTIPLY, ADAPT)
}


def run_one(
    parts: int,
    operation: int,
    operands: Sequence[int | str],
    dtype: torch.dtype,
    factors: tuple[float, float],
) -> None:
    """Run one operation on ``parts`` threads."""
    values = np.zeros(OPERANDS, np.int64)
    values[: len(operands)] = operands
    run(parts, _ONE[operation], values, np.array(factors), dtype)
