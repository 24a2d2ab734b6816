"""Adds to the rows of a product what their adapters make of the input (`kernels.low_rank`).

Rows of one adapter that follow one another are computed together, so that its matrices are read once for them.
A row's sums have one order, whatever stands beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from ..low_rank import STRIP
from .compiling import compiled, inlined
from .elements import Pointer, fetch, memory, narrow, offset, pointer, widen
from .products import dots, weigh

ROWS = 16
"""The most rows that are computed together."""


@inlined
def _rows(
    low: int, high: int, x: Pointer, out: Pointer, a: Pointer, b: Pointer, ranks: Pointer, starts: Pointer,
    slots: Pointer, k: int, n: int, parts: int, room: int, strips: int, tag: Any,
) -> None:  # fmt: skip
    """Compute the rows ``[low, high)`` of ``out`` ``[rows, n]``: see `add`."""
    thin, wide = np.empty((ROWS, room), np.float32), np.empty((ROWS, STRIP), np.float32)
    at = low
    while at < high:
        slot, end = slots[at], at + 1
        while end < high and end - at < ROWS and slots[end] == slot:
            end += 1
        strip = slot * strips
        for part in range(parts):
            if slot < 0:
                continue
            first, last, rank = starts[part], starts[part + 1], ranks[slot * parts + part]
            if rank > 0:
                fetch(offset(b, strip * room * STRIP), rank * STRIP)
                down = offset(a, (slot * parts + part) * room * k)
                dots(end - at, offset(x, at * k), rank, down, k, memory(thin), room)
            for column in range(first, last, STRIP):
                width, up = min(STRIP, last - column), offset(b, strip * room * STRIP)
                strip += 1
                if rank == 0:
                    continue
                for row in range(end - at):
                    line, to = wide[row], offset(out, (at + row) * n + column)
                    for i in range(width):
                        line[i] = widen(to[i])
                    for i in range(width, STRIP):
                        line[i] = np.float32(0)
                weigh(end - at, memory(thin), room, rank, up, STRIP, memory(wide), STRIP)
                for row in range(end - at):
                    line, to = wide[row], offset(out, (at + row) * n + column)
                    for i in range(width):
                        to[i] = narrow(line[i], tag)
        at = end


@compiled
def add(
    threads: int, x_at: int, out_at: int, a_at: int, b_at: int, ranks_at: int, starts_at: int, slots_at: int,
    rows: int, k: int, n: int, parts: int, room: int, strips: int, tag: Any,
) -> None:  # fmt: skip
    """Add to each of the ``rows`` of ``out`` ``[rows, n]`` what the pairs in its slot make of its row of ``x``
    ``[rows, k]``, on ``threads`` threads; slot -1: nothing. Arrays as in `LowRank`; ``slots``: int64
    ``[rows]``; ``room``: the rank that a slot has room for; ``strips``: of ``b`` in a slot. Compiled numba
    code; names with ``_at`` are addresses, ``tag`` is a number of the element type (`elements.TAGS`)."""
    x, out, a, b = pointer(x_at, tag), pointer(out_at, tag), pointer(a_at, tag), pointer(b_at, tag)
    number = np.int64(0)
    ranks, starts, slots = pointer(ranks_at, number), pointer(starts_at, number), pointer(slots_at, number)
    if threads == 1:
        _rows(0, rows, x, out, a, b, ranks, starts, slots, k, n, parts, room, strips, tag)
    else:
        for part in prange(threads):
            low, high = rows * part // threads, rows * (part + 1) // threads
            _rows(low, high, x, out, a, b, ranks, starts, slots, k, n, parts, room, strips, tag)
