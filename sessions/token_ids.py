"""Token ids as the sessions keep them: read-only int32 arrays, ``[tokens]``, joined without a Python loop."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ids: TypeAlias = NDArray[np.int32]


def ids_of(tokens: Iterable[int]) -> Ids:
    """The tokens as a read-only array of their own."""
    return frozen(np.fromiter(tokens, dtype=np.int32))


def frozen(ids: Ids) -> Ids:
    """The same array, made read-only."""
    ids.flags.writeable = False
    return ids


def bytes_of(ids: Ids) -> bytes:
    """The ids as bytes, little-endian int32, as the journal keeps them."""
    return ids.astype("<i4").tobytes()


def packed(tokens: Sequence[int]) -> bytes:
    """The tokens as `bytes_of` gives them, without an array on the way: faster for a few."""
    return struct.pack(f"<{len(tokens)}i", *tokens)


def ids_from(data: bytes) -> Ids:
    """The ids in ``data``, little-endian int32, as a read-only array of their own."""
    return frozen(np.frombuffer(data, dtype="<i4").astype(np.int32))


def common_prefix(one: Ids, other: Ids) -> int:
    """How many of their first tokens are the same."""
    shared = min(len(one), len(other))
    different = np.flatnonzero(one[:shared] != other[:shared])
    return int(different[0]) if different.size else shared


NONE: Ids = ids_of(())
"""The empty array: no tokens."""
