"""Copies pieces of memory with several threads."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from .compiling import compiled, inlined


@intrinsic  # type: ignore[untyped-decorator]
def _memcpy(typing: Any, target: Any, source: Any, size: Any) -> Any:
    """Intrinsic: a call of the C library's memcpy of ``size`` bytes between two addresses. It writes without
    reading first where the processor can; a compiled loop does not."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        cells = ir.IntType(8).as_pointer()
        there, here = builder.inttoptr(args[0], cells), builder.inttoptr(args[1], cells)
        cgutils.raw_memcpy(builder, there, here, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@inlined
def _copy_some(low: int, high: int, source: int, target: int, pieces: Any, size: int) -> None:
    for piece in range(low, high):
        _memcpy(target + pieces[piece, 1], source + pieces[piece, 0], size)


@compiled
def copy(parts: int, source: int, target: int, pieces: Any, size: int) -> None:
    """Copy ``size`` bytes from each address ``source + pieces[:, 0]`` to ``target + pieces[:, 1]``, on
    ``parts`` threads. Compiled numba code. ``source``, ``target``: addresses; ``pieces``: int64 ``[count,
    2]``, offsets in bytes."""
    count = len(pieces)
    if parts == 1:
        _copy_some(0, count, source, target, pieces, size)
    else:
        for part in prange(parts):
            _copy_some(count * part // parts, count * (part + 1) // parts, source, target, pieces, size)
