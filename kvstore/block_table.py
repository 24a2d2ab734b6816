"""A block table: the blocks of one sequence, in the order of its tokens. The pool counts references."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

BlockIds: TypeAlias = Sequence[int] | NDArray[np.int32] | NDArray[np.intp]
"""Block ids; those of a sequence in the order of its tokens."""

BlockArray: TypeAlias = NDArray[np.intp]
"""Block ids ``[blocks]``, of the integer type by which numpy indexes: with another, look-ups take twice as
long."""


def as_array(blocks: BlockIds) -> BlockArray:
    """The block ids as one numpy array; no copy if it is one of that type already."""
    return np.asarray(blocks, dtype=np.intp)


class BlockTable:
    """The block ids of one sequence, a growable int32 array: block ``i`` holds its tokens ``[i *
    block_tokens, (i + 1) * block_tokens)``.

    Growing is amortised O(1). A view taken earlier keeps its length; ids below that may be replaced under it.
    It knows what changed since `take_changes`.
    """

    __slots__ = ("_ids", "_length", "_same")

    def __init__(self, blocks: Sequence[int] = ()) -> None:
        self._ids: NDArray[np.int32] = np.array(blocks, dtype=np.int32)
        self._length = len(blocks)
        self._same = 0  # so many first ids are as `take_changes` returned them

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return int(self.view[index])

    @property
    def view(self) -> NDArray[np.int32]:
        """The ids, int32 ``[len(self)]``, read-only, not copied."""
        view = self._ids[: self._length]
        view.flags.writeable = False
        return view

    def extend(self, blocks: Sequence[int]) -> None:
        """Append blocks in the order of the sequence's tokens."""
        end = self._length + len(blocks)
        if end > len(self._ids):
            grown = np.empty(max(end, 2 * len(self._ids), 8), dtype=np.int32)
            grown[: self._length] = self._ids[: self._length]
            self._ids = grown
        self._ids[self._length : end] = blocks
        self._length = end

    def replace(self, index: int, block: int) -> int:
        """Replace the block at ``index`` by ``block``, for copy on write. Returns the id of the block
        that was there."""
        before = self[index]
        self._ids[: self._length][index] = block
        self._same = min(self._same, index)
        return before

    def truncate(self, length: int) -> NDArray[np.int32]:
        """Keep the first ``length`` blocks. Returns the ids of the others in order, as a copy, for
        `BlockPool.release`."""
        assert 0 <= length <= self._length, f"cannot keep {length} of {self._length} blocks"
        dropped = self._ids[length : self._length].copy()
        self._length = length
        self._same = min(self._same, length)
        return dropped

    def take_changes(self) -> tuple[int, NDArray[np.int32]]:
        """The ids that were appended or replaced since the last call: the index of the first, and a copy of
        all from there on. A table that became shorter has none."""
        first, self._same = self._same, self._length
        return first, self._ids[first : self._length].copy()

    def copy(self, length: int | None = None) -> BlockTable:
        """A table of its own with the first ``length`` blocks (all by default), for a fork."""
        twin = BlockTable()
        kept = self._ids[: self._length][:length]
        twin._ids, twin._length = kept.copy(), len(kept)
        return twin
