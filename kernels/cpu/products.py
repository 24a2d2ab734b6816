"""Dot products and weighted sums of lines, by tiles where lines have the length for it.

Every number depends on its own two lines alone, not on how many stand beside it. Knows pointers and sizes.
"""

from __future__ import annotations

import numpy as np

from .compiling import inlined
from .elements import Pointer, offset, widen
from .tiles import CHUNK, DEPTH, dot_tile, weigh_tile
from .vectors import LANES

GROUP = 8
"""Columns that are worked on together; with fewer there are no tiles."""

_dot1, _dot2, _dot3, _dot4 = (dot_tile(rows) for rows in (1, 2, 3, 4))
_weigh1, _weigh2, _weigh3, _weigh4 = (weigh_tile(rows, CHUNK // LANES) for rows in (1, 2, 3, 4))
_weigh1_narrow, _weigh2_narrow, _weigh3_narrow, _weigh4_narrow = (
    weigh_tile(rows, 1) for rows in (1, 2, 3, 4)
)


@inlined
def dots(rows: int, x: Pointer, count: int, w: Pointer, depth: int, sums: Pointer, sums_line: int) -> None:
    """``sums[r, c] = x[r] . w[c]``: lines of ``depth`` numbers, one behind the other; ``sums`` fp32."""
    if depth % DEPTH or count < GROUP:
        for row in range(rows):
            for column in range(count):
                total = np.float32(0)
                for i in range(depth):
                    total += widen(x[row * depth + i]) * widen(w[column * depth + i])
                sums[row * sums_line + column] = total
        return
    for start in range(0, count, GROUP):
        column = min(start, count - GROUP)
        lines, other = offset(w, column * depth), offset(w, (column + 4) * depth)
        for row in range(0, rows, 4):
            left, line = rows - row, offset(x, row * depth)
            into = offset(sums, row * sums_line + column)
            if left >= 4:
                _dot4(line, depth, lines, depth, depth, into, sums_line)
                _dot4(line, depth, other, depth, depth, offset(into, 4), sums_line)
            elif left == 3:
                _dot3(line, depth, lines, depth, depth, into, sums_line)
                _dot3(line, depth, other, depth, depth, offset(into, 4), sums_line)
            elif left == 2:
                _dot2(line, depth, lines, depth, depth, into, sums_line)
            else:
                _dot1(line, depth, lines, depth, depth, into, sums_line)


@inlined
def weigh(rows: int, shares: Pointer, shares_line: int, count: int, values: Pointer, width: int,
          into: Pointer, into_line: int) -> None:  # fmt: skip
    """``into[r, :width] += shares[r, :count] @ values``: ``count`` lines of ``width`` numbers, at least one;
    ``shares`` and ``into`` fp32."""
    if width % LANES:
        for row in range(rows):
            for line in range(count):
                share = shares[row * shares_line + line]
                for i in range(width):
                    into[row * into_line + i] += share * widen(values[line * width + i])
        return
    for row in range(0, rows, 4):
        left, share = rows - row, offset(shares, row * shares_line)
        column = 0
        while column < width:
            wide = column + CHUNK <= width
            lines, to = offset(values, column), offset(into, row * into_line + column)
            if left >= 4:
                if wide:
                    _weigh4(share, shares_line, lines, width, count, to, into_line)
                else:
                    _weigh4_narrow(share, shares_line, lines, width, count, to, into_line)
            elif left == 3:
                if wide:
                    _weigh3(share, shares_line, lines, width, count, to, into_line)
                else:
                    _weigh3_narrow(share, shares_line, lines, width, count, to, into_line)
            elif left == 2:
                if wide:
                    _weigh2(share, shares_line, lines, width, count, to, into_line)
                else:
                    _weigh2_narrow(share, shares_line, lines, width, count, to, into_line)
            elif wide:
                _weigh1(share, shares_line, lines, width, count, to, into_line)
            else:
                _weigh1_narrow(share, shares_line, lines, width, count, to, into_line)
            column += CHUNK if wide else LANES
