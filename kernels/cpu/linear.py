"""Matrix times a few rows: where torch's product costs more in set-up than in reading the weights.

Knows pointers and sizes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from .compiling import compiled, inlined
from .elements import Pointer, memory, narrow, offset, pointer, widen
from .products import dots

WIDTH = 64
"""Outputs of all rows that are kept in fp32 before they are narrowed; a part has whole groups of them."""


@inlined
def _columns(
    part: int, parts: int, x: Pointer, weight: Pointer, bias: Pointer, biased: bool, out: Pointer,
    rows: int, n: int, k: int, tag: Any,
) -> None:  # fmt: skip
    """The part's share of the outputs, of all rows."""
    groups = (n + WIDTH - 1) // WIDTH
    low, high = groups * part // parts * WIDTH, min(n, groups * (part + 1) // parts * WIDTH)
    sums = np.empty((rows, WIDTH), np.float32)
    for at in range(low, high, WIDTH):
        width = min(WIDTH, high - at)
        dots(rows, x, width, offset(weight, at * k), k, memory(sums), WIDTH)
        for row in range(rows):
            line, to = sums[row], offset(out, row * n + at)
            if biased:
                for i in range(width):
                    line[i] += widen(bias[at + i])
            for i in range(width):
                to[i] = narrow(line[i], tag)


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
