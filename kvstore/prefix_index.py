"""The prefix index: which block holds the KV that a key names.

One key names one block and one block has one key: of two blocks with equal tokens the first sealed is found.
The pool decides how long a block keeps its key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from .block_table import BlockArray


class PrefixIndex:
    """Which of ``blocks`` blocks each key names, and which key each block has; a look-up takes O(1)."""

    def __init__(self, blocks: int) -> None:
        self._block_of: dict[bytes, int] = {}
        self.here: Mapping[bytes, int] = self._block_of
        """The block of each key; not a copy. Call ``pool.share`` with blocks that are found before the next
        ``allocate``, which may evict them."""
        self._key_of: dict[int, bytes] = {}
        self._named = np.zeros(blocks, dtype=np.bool_)  # whether a block is in `_key_of`, for many at once

    def __len__(self) -> int:
        return len(self._block_of)

    def add(self, key: bytes, block: int) -> bool:
        """Name ``block``, which has no key yet, by ``key``. Returns False, and changes nothing, if ``key``
        names another block already."""
        assert block not in self._key_of, f"block {block} has a key already"
        if key in self._block_of:
            return False
        self._block_of[key] = block
        self._key_of[block] = key
        self._named[block] = True
        return True

    def drop(self, blocks: Iterable[int]) -> None:
        """Forget the keys of ``blocks``; those without one are passed over."""
        for block in blocks:
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[key]
                self._named[block] = False

    def holds(self, block: int) -> bool:
        """Whether the block can be found by a key."""
        return block in self._key_of

    def holds_each(self, blocks: BlockArray) -> NDArray[np.bool_]:
        """Whether each of these blocks can be found by a key, bool ``[blocks]``."""
        return self._named.take(blocks)

    def key_of(self, block: int) -> bytes | None:
        """The key by which the block is found; None if it has none."""
        return self._key_of.get(block)
