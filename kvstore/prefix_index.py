"""The prefix index: which block holds the KV that a key names.

One key names one block and one block has one key: of two blocks with equal tokens the first sealed is found.
The pool decides how long a block keeps its key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from .block_table import BlockArray, BlockIds, as_array


class PrefixIndex:
    """Which block each key names, and which key each block has; a look-up takes O(1)."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._named = np.zeros(1024, dtype=np.bool_)  # whether a block is in `_key_of`, for many at once

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest beginning of ``keys`` in which each key names a block.

        Call ``pool.share`` with them before the next ``allocate``, which may evict them.
        """
        held = takewhile(self._block_of.__contains__, keys)
        return [self._block_of[key] for key in held]

    def add(self, key: bytes, block: int) -> bool:
        """Name ``block``, which has no key yet, by ``key``. Returns False, and changes nothing, if ``key``
        names another block already."""
        assert block not in self._key_of, f"block {block} has a key already"
        if key in self._block_of:
            return False
        self._block_of[key] = block
        self._key_of[block] = key
        self._reserve(block)
        self._named[block] = True
        return True

    def add_each(self, keys: Sequence[bytes], blocks: BlockIds) -> list[int]:
        """Name many blocks that have no keys yet, each by its own key. A key that names another block already
        stays there: returns the positions of the blocks that stay without a key because of that."""
        ids = as_array(blocks)
        assert not self.holds_each(ids).any(), "one has a key already"
        refused = [at for at, key in enumerate(keys) if key in self._block_of]
        if refused:
            staying = np.delete(np.arange(len(keys)), refused).tolist()
            keys, ids = [keys[at] for at in staying], ids[staying]
        named = ids.tolist()
        self._block_of.update(zip(keys, named, strict=True))
        self._key_of.update(zip(named, keys, strict=True))
        self._named[ids] = True
        return refused

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
        if not len(blocks):
            return np.zeros(0, dtype=np.bool_)
        self._reserve(int(blocks.max()))
        return self._named.take(blocks)

    def block_of(self, key: bytes) -> int | None:
        """The block that the key names; None if there is none."""
        return self._block_of.get(key)

    @property
    def here(self) -> Mapping[bytes, int]:
        """The block of each key, as a mapping that may be read for many keys; not a copy."""
        return self._block_of

    def key_of(self, block: int) -> bytes | None:
        """The key by which the block is found; None if it has none."""
        return self._key_of.get(block)

    def blocks(self) -> frozenset[int]:
        """All blocks that can be found by a key."""
        return frozenset(self._key_of)

    def _reserve(self, block: int) -> None:
        if block >= len(self._named):
            grown = np.zeros(max(block + 1, 2 * len(self._named)), dtype=np.bool_)
            grown[: len(self._named)] = self._named
            self._named = grown
