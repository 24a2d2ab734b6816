"""How often each block of a pool is held: an array, so that a whole table is taken or given back at once.

Knows counts only; what becomes of a block that nobody holds is the pool's affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

BlockIds: TypeAlias = Sequence[int] | NDArray[np.int32] | NDArray[np.intp]
"""Blocks, in the order of their sequence."""


PayloadOffsets: TypeAlias = NDArray[np.intp]
"""Blocks of this pool, of the type by which numpy looks up: another takes twice as long."""


def as_places(blocks: BlockIds) -> PayloadOffsets:
    """``blocks`` as places, ``[blocks]``."""
    return np.asarray(blocks, dtype=np.intp)


class References:
    """Counts of ``blocks`` blocks, all 0 at first; asking about a block of another pool is no error."""

    def __init__(self, blocks: int) -> None:
        self._counts = np.zeros(blocks, dtype=np.int32)
        self._marks = np.zeros(blocks, dtype=np.int32)  # scratch of `first_twice`
        self._held = 0

    def __len__(self) -> int:
        """Blocks that are held."""
        return self._held

    def __contains__(self, block: int) -> bool:
        return self.of(block) > 0

    def of(self, block: int) -> int:
        """References of one block."""
        return int(self._counts[block]) if 0 <= block < len(self._counts) else 0

    def each(self, ids: PayloadOffsets) -> NDArray[np.int32]:
        """References of each, int32 ``[ids]``."""
        if len(ids) and (ids.min() < 0 or ids.max() >= len(self._counts)):
            return np.array([self.of(block) for block in ids.tolist()], dtype=np.int32)
        return self._counts.take(ids)

    def first_twice(self, ids: PayloadOffsets) -> int | None:
        """A block that stands in ``ids``, all held, more than once; None: each stands there once."""
        places = np.arange(len(ids), dtype=np.int32)
        self._marks[ids] = places  # of equal ones the last stays
        twice = np.flatnonzero(self._marks[ids] != places)
        return int(ids[twice[0]]) if len(twice) else None

    def take(self, ids: PayloadOffsets, times: int = 1) -> list[int]:
        """``times`` more references on each; returns those that nobody held."""
        loose = self._counts.take(ids) == 0
        fresh: list[int] = ids[loose].tolist() if loose.any() else []
        np.add.at(self._counts, ids, np.int32(times))  # of one type: ten times as fast
        self._held += len(set(fresh))
        return fresh

    def give(self, ids: PayloadOffsets) -> list[int]:
        """One reference less on each, all held, none named twice; returns those nobody holds any more, the
        last first.
        """
        counts = self._counts.take(ids)
        self._counts[ids] = counts - 1
        retired: list[int] = ids[counts == 1][::-1].tolist()
        self._held -= len(retired)
        return retired

    def counts(self) -> dict[int, int]:
        """Held blocks and their references."""
        held = np.flatnonzero(self._counts)
        return dict(zip(held.tolist(), self._counts[held].tolist(), strict=True))
