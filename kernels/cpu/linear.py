"""Matrix times a few rows: where torch's product costs more in set-up than in reading the weights.

Each weight is read once for up to four rows. Knows pointers and sizes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from .compiling import compiled, inlined
from .elements import Pointer, narrow, pointer, widen

GROUP = 4
"""Rows that share one reading of a weight."""


@inlined
def _widened(x: Pointer, rows: int, padded: int, k: int) -> Any:
    """``rows`` rows as fp32 ``[padded, k]``, zeros behind them."""
    wide = np.zeros((padded, k), np.float32)
    for row in range(rows):
        line = wide[row]
        for i in range(k):
            line[i] = widen(x[row * k + i])
    return wide


@inlined
def _one_row(x: Any, weight: Pointer, k: int, sums: Any, low: int, high: int) -> None:
    """``sums[n] = x . weight[n]`` for n in ``[low, high)``."""
    for n in range(low, high):
        line, total = n * k, np.float32(0)
        for j in range(k):
            total += x[j] * widen(weight[line + j])
        sums[n - low] = total


@inlined
def _four_rows(x: Any, at: int, weight: Pointer, k: int, sums: Any, low: int, high: int) -> None:
    """The same for the rows ``[at, at + 4)``, two outputs at a time; ``sums`` ``[4 * (high - low)]``."""
    width = high - low
    x0, x1, x2, x3 = x[at], x[at + 1], x[at + 2], x[at + 3]
    for n in range(low, high, 2):
        here, there = n * k, min(n + 1, high - 1) * k
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0)
        for j in range(k):
            a, b = widen(weight[here + j]), widen(weight[there + j])
            u0, u1, u2, u3 = x0[j], x1[j], x2[j], x3[j]
            a0 += u0 * a
            a1 += u1 * a
            a2 += u2 * a
            a3 += u3 * a
            b0 += u0 * b
            b1 += u1 * b
            b2 += u2 * b
            b3 += u3 * b
        for row, (one, two) in enumerate(((a0, b0), (a1, b1), (a2, b2), (a3, b3))):
            sums[row * width + n - low] = one
            sums[row * width + min(n + 1, high - 1) - low] = two if n + 1 < high else one


@inlined
def _columns(
    part: int, parts: int, x: Pointer, weight: Pointer, bias: Pointer, biased: bool, out: Pointer,
    rows: int, n: int, k: int, tag: Any,
) -> None:  # fmt: skip
    """The part's share of the outputs, of all rows."""
    low, high = n * part // parts, n * (part + 1) // parts
    padded = 1 if rows == 1 else (rows + GROUP - 1) // GROUP * GROUP
    wide = _widened(x, rows, padded, k)
    width = high - low
    sums = np.empty(GROUP * width, np.float32)
    for at in range(0, padded, GROUP):
        if rows == 1:
            _one_row(wide[0], weight, k, sums, low, high)
        else:
            _four_rows(wide, at, weight, k, sums, low, high)
        for row in range(min(GROUP, rows - at)):
            for i in range(width):
                total = sums[row * width + i]
                if biased:
                    total += widen(bias[low + i])
                out[(at + row) * n + low + i] = narrow(total, tag)


def _linear(
    parts: int, x_at: int, weight_at: int, bias_at: int, out_at: int, rows: int, n: int, k: int, tag: Any
) -> None:
    """``out = x @ weight.T + bias``: ``[rows, k]``, ``[n, k]``, ``[n]`` or address 0, ``[rows, n]``."""
    x, weight, out = pointer(x_at, tag), pointer(weight_at, tag), pointer(out_at, tag)
    bias = pointer(bias_at, tag)
    if parts == 1:
        _columns(0, 1, x, weight, bias, bias_at != 0, out, rows, n, k, tag)
    else:
        for part in prange(parts):
            _columns(part, parts, x, weight, bias, bias_at != 0, out, rows, n, k, tag)


linear = compiled(_linear, parallel=True)
