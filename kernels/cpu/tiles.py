"""Tiles of K and V as attention reads them: where their lines lie in the arena, and how they are packed into
words of 32 bits (see `lanes`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from .compiling import in_order, inlined
from .elements import Pointer, address_of, fetch, memory, offset, pointer, tanh
from .lanes import TILE, pack_line, per_word
from .vectors import LANES


@inlined
def sizes(dim: int, tag: Any) -> Any:
    """Sizes of the packed form of a head of ``dim`` numbers in the type of ``tag``: the words of 32 bits of a
    packed key; the numbers of a query's weighted sum of values; and the words that the positions of a tile
    take (`TILE`, or half of it if a word holds two bfloat16)."""
    pair = per_word(tag)
    words = (dim + pair * LANES - 1) // (pair * LANES) * LANES
    return words, (dim + LANES - 1) // LANES * LANES, TILE // pair


@inlined
def pack(line: Pointer, dim: int, rest: Pointer, into: Pointer, apart: int) -> None:
    """Pack a key or query of ``dim`` elements at ``line`` into words of 32 bits at ``into``: `LANES` of them
    every ``apart`` words, padded with zeros. ``rest``: zeroed scratch for the elements that fill no whole
    vector."""
    unit = LANES * per_word(line[0])
    whole = dim // unit * unit
    for i in range(0, whole, unit):
        pack_line(offset(line, i), offset(into, i // unit * apart))
    if whole < dim:
        for i in range(dim - whole):
            rest[i] = line[whole + i]
        pack_line(rest, offset(into, whole // unit * apart))


@inlined
def locate(
    low: int, high: int, arena: Pointer, table: Pointer, head_at: int, shape: Any, addresses: Any
) -> None:
    """Write to ``addresses`` ``[TILE]`` the addresses of the keys at the positions ``[low, high)`` of one tile,
    and 0 for the tile's other positions.

    ``table``: the row's block table. ``head_at``: the offset of layer and KV head in a block. ``shape``:
    (query heads per KV head, kv_heads, head_dim, block_tokens, numbers of a block).
    """
    _, _, dim, slots, block_size = shape
    addresses[:] = 0
    position = low
    while position < high:
        block = position // slots
        at = table[block] * block_size + head_at - block * slots * dim
        end = min(high, (block + 1) * slots)
        for each in range(position, end):
            addresses[each % TILE] = address_of(offset(arena, at + each * dim))
        position = end


@inlined
def line_of(lines: Any, at: int, tag: Any) -> Pointer:
    return pointer(address_of(memory(lines[at])), tag)


@inlined
def fetch_rows(row: int, rows: int, dim: int, side: int, addresses: Any, tag: Any) -> None:
    """Prefetch into the processor's cache the keys of ``dim`` elements at the addresses ``addresses[row : row +
    rows]`` or, if ``side`` is not 0, their values, which lie ``side`` numbers behind them. An address of 0 is
    passed over."""
    for at in range(row, row + rows):
        if addresses[at]:
            fetch(offset(pointer(addresses[at], tag), side), dim)


@in_order
def cap(scores: Pointer, count: int, scale: float, most: float) -> None:
    """Multiply ``count`` scores by ``scale`` and cap them: ``most * tanh(score / most)``, in place."""
    limit = np.float32(most)
    for i in range(count):
        scores[i] = limit * tanh(scores[i] * np.float32(scale) / limit)
