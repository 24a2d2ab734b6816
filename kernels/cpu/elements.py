"""Elements as the loops see them: typed pointers; numbers are fp32 in the loops and of the stored type in
memory.

bfloat16 is handled as ``uint16``, float16 as ``int16``, float32 as itself. The functions here write LLVM IR
for single numbers; those of `vectors` and `products` for vectors.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

TAGS: dict[torch.dtype, Any] = {
    torch.float32: np.float32(0),
    torch.bfloat16: np.uint16(0),
    torch.float16: np.int16(0),
}
"""For each dtype a zero of the numpy type that represents it in compiled code: float32, uint16 for bfloat16,
int16 for float16. Passed as an argument, it selects the compiled version."""

Pointer: TypeAlias = Any
"""In compiled code: the address of elements of one type, indexed like an array."""

_BF16_NAN = 0x7FC0


@intrinsic  # type: ignore[untyped-decorator]
def pointer(typing: Any, address: Any, tag: Any) -> Any:
    """Intrinsic, returns a pointer: ``address`` (a value, int64) as a pointer to elements of ``tag``'s type.
    ``tag``: any number of that type; its value does not count."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(tag)(types.int64, tag), codegen


@intrinsic  # type: ignore[untyped-decorator]
def offset(typing: Any, base: Any, numbers: Any) -> Any:
    """Intrinsic, returns a pointer: the one that is ``numbers`` (a value, int64) elements behind the pointer
    ``base``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.gep(args[0], [args[1]])

    return base(base, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def memory(typing: Any, array: Any) -> Any:
    """Intrinsic, returns a pointer: to the first element of ``array``, a contiguous numpy array."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.make_array(array)(context, builder, args[0]).data

    return types.CPointer(array.dtype)(array), codegen


@intrinsic  # type: ignore[untyped-decorator]
def address_of(typing: Any, begin: Any) -> Any:
    """Intrinsic, the inverse of `pointer`: returns the address of the pointer ``begin`` as a value, int64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(args[0], ir.IntType(64))

    return types.int64(begin), codegen


_CACHE_LINE = 64  # bytes


@intrinsic  # type: ignore[untyped-decorator]
def _per_line(typing: Any, begin: Any) -> Any:
    """Intrinsic, returns a value, int64: how many elements of the type that the pointer ``begin`` points to fit
    in a cache line. Reads no memory."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        size = context.get_abi_sizeof(context.get_value_type(begin.dtype))
        return ir.Constant(ir.IntType(64), _CACHE_LINE // size)

    return types.int64(begin), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _fetch_line(typing: Any, begin: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        shape = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        prefetch = cgutils.get_or_insert_function(builder.module, shape, "llvm.prefetch.p0")
        builder.call(prefetch, [builder.bitcast(args[0], byte), word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(begin), codegen


@njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def fetch(begin: Any, count: Any) -> None:
    """Prefetch ``count`` (a value) elements from the pointer ``begin`` on into the processor's cache; returns
    nothing."""
    for i in range(0, count, _per_line(begin)):
        _fetch_line(offset(begin, i))


@intrinsic  # type: ignore[untyped-decorator]
def widen(typing: Any, bits: Any) -> Any:
    """Intrinsic, returns a value: one element ``bits``, which is a value in its stored type, converted to
    fp32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if bits == types.float32:
            return args[0]
        if bits == types.int16:
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())
        word = builder.zext(args[0], ir.IntType(32))
        return builder.bitcast(builder.shl(word, ir.Constant(ir.IntType(32), 16)), ir.FloatType())

    return types.float32(bits), codegen


@intrinsic  # type: ignore[untyped-decorator]
def narrow(typing: Any, number: Any, tag: Any) -> Any:
    """Intrinsic, returns a value: the fp32 value ``number`` converted to an element of ``tag``'s type, rounded
    to nearest even; NaN stays NaN. ``tag``: any number of that type; its value does not count."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if tag == types.float32:
            return args[0]
        if tag == types.int16:
            return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))
        i16, i32 = ir.IntType(16), ir.IntType(32)
        word = builder.bitcast(args[0], i32)
        odd = builder.and_(builder.lshr(word, i32(16)), i32(1))
        rounded = builder.lshr(builder.add(word, builder.add(odd, i32(0x7FFF))), i32(16))
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        return builder.select(is_nan, i16(_BF16_NAN), builder.trunc(rounded, i16))

    return tag(types.float32, tag), codegen


@intrinsic  # type: ignore[untyped-decorator]
def bits_of(typing: Any, number: Any) -> Any:
    """Intrinsic, returns a value: the bits of the fp32 value ``number``, as int32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), codegen


@intrinsic  # type: ignore[untyped-decorator]
def float_of(typing: Any, bits: Any) -> Any:
    """Intrinsic, returns a value: the fp32 number with the bits of the int32 value ``bits``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


_SHIFT = np.float32(12582912.0)  # 1.5 * 2^23: added to a small number, its low bits are the nearest integer
_SHIFT_BITS = np.int32(0x4B400000)
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_LEAST, _MOST = np.float32(-87.0), np.float32(88.0)


@njit(nogil=True, error_model="numpy", fastmath={"contract"})  # type: ignore[untyped-decorator]
def exp(x: Any) -> Any:
    """``e^x`` in fp32 within two units in the last place; 0 below -87, e^88 above 88, NaN for NaN.

    It has no calls and branches, so that loops over it are vectorised. Its sums keep their order whatever the
    caller's settings are. Source: Cephes' ``expf``.
    """
    bounded = _MOST if x > _MOST else x
    shifted = bounded * _LOG2_E + _SHIFT
    whole = shifted - _SHIFT
    rest = bounded - whole * _LN2_HIGH - whole * _LN2_LOW
    series = np.float32(1.9875691500e-4)
    series = series * rest + np.float32(1.3981999507e-3)
    series = series * rest + np.float32(8.3334519073e-3)
    series = series * rest + np.float32(4.1665795894e-2)
    series = series * rest + np.float32(1.6666665459e-1)
    series = series * rest + np.float32(5.0000001201e-1)
    series = series * rest * rest + rest + np.float32(1.0)
    power = float_of(np.int32((bits_of(shifted) - _SHIFT_BITS + np.int32(127)) << np.int32(23)))
    return np.float32(0.0) if x < _LEAST else series * power


@njit(nogil=True, error_model="numpy", fastmath={"contract"})  # type: ignore[untyped-decorator]
def tanh(x: Any) -> Any:
    """``tanh x`` in fp32, within 1e-7."""
    return np.float32(1.0) - np.float32(2.0) / (exp(np.float32(2.0) * x) + np.float32(1.0))
