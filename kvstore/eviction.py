"""The eviction order of cached blocks. The rule stands here and nowhere else.

The chance that a block is wanted again is estimated by how often it was found, and how lately it was released:

1. Three **ranks** by hits since sealing: *one-off* (0), *returned* (1 to 3), *hot* (4 and more). A lower rank
   is evicted first, so a flood of one-off prefixes passes through below a hot shared prompt.
2. Inside a rank the block **released longest ago** is evicted first. A sequence releases its blocks from the
   end to the beginning, and holds all blocks before each one it holds. So the end of a chain is always evicted
   before its beginning, and no eviction cuts off blocks that are still kept.
3. **Old hits fade**: *returned* and *hot* may each fill a quarter of the pool. The oldest of what overflows
   moves behind the rank below, and keeps no more hits than that rank has.
4. What a **lease** covers (`lease`) is evicted after all ranks, the latest expected return first.

Rules 1 and 3 keep rule 2 true: each hit of a block is a hit of all before it, and ranks overflow in order.
Rule 2 also needs sequences that hold every block they build on (`pool.join`) and report a longer match
(``behind`` of `pool.share`). Otherwise a block may outlive one before it, and waste its place.
Every operation is O(1). Knows no keys and no references.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np

from .block_table import BlockIds, as_array

MOST_HITS = (0, 3)
"""The most hits that a block of rank 0, and of rank 1, has; rank 2 is for more."""

TOP = len(MOST_HITS)
"""The highest rank."""

RANK_SHARE = 4
"""A rank above 0 may fill one part in this many of the pool's blocks."""


class EvictionOrder:
    """The cached blocks of a pool of ``blocks`` blocks, in the order in which they are evicted. Hits and
    leases are remembered for all its blocks, cached or not."""

    def __init__(self, blocks: int) -> None:
        self._room = max(1, blocks // RANK_SHARE)
        self._hits = np.zeros(blocks, dtype=np.int32)
        # A queue per rank, the longest released first. OrderedDict: its first is O(1) even after deletions.
        self._ranks: tuple[OrderedDict[int, None], ...] = tuple(OrderedDict() for _ in range(TOP + 1))
        self._returns: dict[int, float] = {}  # of leased blocks, held ones too
        self._leased: OrderedDict[int, None] = OrderedDict()
        self._queues = (*self._ranks, self._leased)

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __contains__(self, block: int) -> bool:
        low, middle, high, leased = self._queues  # asked for each block of a long restore
        return block in low or block in middle or block in high or block in leased

    def lease(self, block: int, returns: float | None) -> None:
        """Note that a lease covers ``block``, which is expected to be wanted again at ``returns`` (seconds);
        with None, that no lease covers it any more. A cached block gets the place that follows from that."""
        if returns is None:
            self._returns.pop(block, None)
        else:
            self._returns[block] = returns
        if self.remove(block):
            self.add([block])

    def hit(self, blocks: BlockIds, times: int = 1) -> None:
        """Count a hit for each of these blocks, ``times`` times: they were found by their keys."""
        np.add.at(self._hits, as_array(blocks), np.int32(times))

    def forget(self, blocks: Iterable[int]) -> None:
        """Forget the hits and leases of these blocks, which have lost their keys; their places in the order
        stay."""
        for block in blocks:
            self._hits[block] = 0
            self._returns.pop(block, None)

    def add(self, blocks: Iterable[int]) -> None:
        """Add cached blocks: each is evicted after the others of its rank (which follows from its hits), or,
        if a lease covers it, after all ranks. ``blocks``: in the order of their release, the end of a
        sequence before its beginning."""
        for block in blocks:
            if block in self._returns:
                self._leased[block] = None
                continue
            hits = self._hits[block]
            rank = 0 if hits <= MOST_HITS[0] else 1 if hits <= MOST_HITS[1] else TOP
            self._ranks[rank][block] = None
        for rank in range(TOP, 0, -1):
            if len(self._ranks[rank]) > self._room:
                self._overflow(rank)

    def put_first(self, block: int) -> None:
        """Add a cached block so that it is evicted before all others, because it is kept elsewhere too. One
        that a lease covers gets its usual place instead."""
        if block in self._returns:
            return self.add([block])
        self._ranks[0][block] = None
        self._ranks[0].move_to_end(block, last=False)
        return None

    def remove(self, block: int) -> bool:
        """Take a block out of the order; returns whether it was in."""
        for queue in self._queues:
            if block in queue:
                del queue[block]
                return True
        return False

    def pop(self, count: int) -> list[int]:
        """Take out the first ``count`` blocks in eviction order, and return them."""
        taken: list[int] = []
        for rank in self._ranks:
            wanted = min(count - len(taken), len(rank))
            taken.extend(rank.popitem(last=False)[0] for _ in range(wanted))
        for block in self.leased()[: count - len(taken)] if count > len(taken) else ():
            del self._leased[block]
            taken.append(block)
        return taken

    def unleased(self) -> Iterator[int]:
        """The blocks that no lease covers, in eviction order."""
        return chain.from_iterable(self._ranks)

    def leased(self) -> list[int]:
        """The blocks that leases cover, in eviction order: the latest expected return first, of equal ones
        the longest released."""
        return sorted(self._leased, key=self._returns.__getitem__, reverse=True)

    def blocks(self) -> list[int]:
        """All blocks here, in eviction order."""
        return [*chain.from_iterable(self._ranks), *self.leased()]

    def _overflow(self, rank: int) -> None:
        crowded, below = self._ranks[rank], self._ranks[rank - 1]
        for _ in range(len(crowded) - self._room):
            block, _ = crowded.popitem(last=False)
            below[block] = None
            self._hits[block] = MOST_HITS[rank - 1]
