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


NO_BLOCK = -1
"""In a table: the group has no block there, as it has given it back or has not got it yet."""


class BlockTable:
    """The block ids of one sequence, a growable int32 array: block ``i`` of each KV group holds its tokens ``[i
    * block_tokens, (i + 1) * block_tokens)``. A group with a window has `NO_BLOCK` where it needs none.

    Growing is amortised O(1). A view taken earlier keeps its length; ids below that may be replaced under it.
    It knows what changed since `take_changes`.
    """

    __slots__ = ("_gaps", "_ids", "_length", "_same")

    def __init__(self, blocks: Sequence[int] = (), groups: int = 1) -> None:
        self._ids: NDArray[np.int32] = np.empty((0, groups), dtype=np.int32)  # by block: the groups' ids
        self._length = 0
        self._same = 0  # so many first ids are as `take_changes` returned them
        self._gaps = False  # whether one may be `NO_BLOCK`
        self.extend(blocks)

    def __len__(self) -> int:
        """How many blocks a group has, with those that it has given back."""
        return self._length

    @property
    def groups(self) -> int:
        """The number of KV groups."""
        return int(self._ids.shape[1])

    @property
    def view(self) -> NDArray[np.int32]:
        """The ids, int32 ``[len(self), groups]``, read-only, not copied."""
        view = self._ids[: self._length]
        view.flags.writeable = False
        return view

    @property
    def blocks(self) -> int:
        """How many blocks it has, of all groups together."""
        return len(self.held)

    @property
    def held(self) -> NDArray[np.int32]:
        """The ids of all blocks that it has, in the order of the tokens, int32 ``[blocks]``."""
        return self._there(self.view)

    def extend(self, blocks: Sequence[int]) -> None:
        """Append blocks in the order of the sequence's tokens, of each group one after the other."""
        first = self._length
        self._grow(first + len(blocks) // self.groups)
        self._ids[first : self._length].reshape(-1)[:] = blocks

    def put(self, indexes: Sequence[int], groups: Sequence[int], blocks: Sequence[int]) -> None:
        """Set the block ``indexes[i]`` of ``groups[i]``, where there is none, to ``blocks[i]``; the table
        becomes as long as that needs."""
        end, before = max(indexes) + 1, self._length
        if end > before:
            self._grow(end)
            self._ids[before:end] = NO_BLOCK
            self._gaps |= len(blocks) < (end - before) * self.groups
        assert (self._ids[indexes, groups] == NO_BLOCK).all(), "a block is there"
        self._ids[indexes, groups] = blocks
        self._same = min(self._same, *indexes)

    def replace(self, index: int, block: int, group: int = 0) -> int:
        """Replace the block at ``index`` by ``block``, for copy on write. Returns the id of the block
        that was there."""
        before = int(self.view[index, group])
        self._ids[: self._length][index, group] = block
        self._same = min(self._same, index)
        return before

    def truncate(self, length: int) -> NDArray[np.int32]:
        """Keep the first ``length`` blocks. Returns the ids of the others in order, as a copy, for
        `BlockPool.release`."""
        assert 0 <= length <= self._length, f"cannot keep {length} of {self._length} blocks"
        dropped = self._there(self._ids[length : self._length]).copy()
        self._length = length
        self._same = min(self._same, length)
        return dropped

    def give_back(self, group: int, end: int) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
        """Take a group's blocks before ``end`` out. Returns their indexes, and their ids."""
        ids = self._ids[: min(end, self._length), group]
        (indexes,) = np.nonzero(ids != NO_BLOCK)
        given = ids[indexes]
        ids[indexes] = NO_BLOCK
        self._gaps |= len(given) > 0
        return indexes, given

    def take_changes(self) -> list[tuple[int, int, int]]:
        """The blocks that were appended or replaced since the last call, and others behind the first of them,
        in order: group, index, id. A table that became shorter has none."""
        first, self._same = self._same, self._length
        changed = enumerate(self._ids[first : self._length].tolist(), first)
        return [
            (group, index, block)
            for index, blocks in changed
            for group, block in enumerate(blocks)
            if block != NO_BLOCK
        ]

    def copy(self, length: int | None = None) -> BlockTable:
        """A table of its own with the first ``length`` blocks (all by default), for a fork."""
        twin = BlockTable.__new__(BlockTable)
        twin._ids = self._ids[: self._length][:length].copy()
        twin._length, twin._same, twin._gaps = len(twin._ids), 0, self._gaps
        return twin

    def _grow(self, end: int) -> None:
        if end > len(self._ids):
            grown = np.empty((max(end, 2 * len(self._ids), 8), self.groups), dtype=np.int32)
            grown[: self._length] = self._ids[: self._length]
            self._ids = grown
        self._length = end

    def _there(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        flat = ids.reshape(-1)
        return flat[flat != NO_BLOCK] if self._gaps else flat
