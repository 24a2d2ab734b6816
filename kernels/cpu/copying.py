"""Pieces of memory copied, shared out over the threads. Knows addresses and sizes; not what lies there."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from .compiling import compiled, inlined
from .elements import Pointer, pointer

WORD = 8
"""Bytes copied at a time: pieces, and where they begin, are multiples of it."""

TAG = np.uint64(0)
"""A number of a word's type."""


@inlined
def _copy_some(low: int, high: int, source: Pointer, target: Pointer, pieces: Any, words: int) -> None:
    for piece in range(low, high):
        here, there = pieces[piece, 0], pieces[piece, 1]
        for word in range(words):
            target[there + word] = source[here + word]


def _copy(parts: int, source_at: int, target_at: int, pieces: Any, words: int, tag: Any) -> None:
    """``words`` words from each ``pieces[:, 0]`` on to ``pieces[:, 1]``, in words from the addresses."""
    source, target, count = pointer(source_at, tag), pointer(target_at, tag), len(pieces)
    if parts == 1:
        _copy_some(0, count, source, target, pieces, words)
    else:
        for part in prange(parts):
            _copy_some(count * part // parts, count * (part + 1) // parts, source, target, pieces, words)


copy = compiled(_copy, parallel=True)
