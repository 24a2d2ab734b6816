"""Who goes first: the order in which cached blocks are given up. The rule stands here and nowhere else.

Worth = chance of return, estimated by how often a block was found again and how lately it was let go:

1. Three **ranks** by hits since sealing: *one-off* (0), *returned* (1 to 3), *hot* (4 and more). A lower rank
   goes first, so a flood of one-off prefixes passes through below a hot shared prompt.
2. Inside a rank the one **let go longest ago** goes first. A sequence lets its blocks go from the end to the
   beginning, and who holds a block holds all before it; so the end of a chain always goes before its
   beginning, and no eviction cuts off blocks that are still kept.
3. **Old fame fades**: *returned* and *hot* may each fill a quarter of the pool. What overflows falls, oldest
   first, behind the rank below and forgets the hits above it.

4. What a **lease** covers (`promise`) goes after all ranks, the latest expected return first.

Rules 1 and 3 keep 2 true: every hit of a block is a hit of all before it, and ranks overflow in order. It
rests on sequences that hold every block they build on (`pool.join`), and say so when they find more
(``behind`` of `pool.share`); where they do not, a block may outlive one before it, and waste its place.
Every move is O(1). Knows no keys and no references.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain, islice

import numpy as np

from .block_table import BlockIds, as_array

MOST_HITS = (0, 3)
"""The most hits a block of rank 0 and of rank 1 has; rank 2 is open above."""

TOP = len(MOST_HITS)
"""The highest rank."""

RANK_SHARE = 4
"""A rank above 0 may fill one part in this many of the pool."""


class EvictionOrder:
    """The cached blocks of a pool of ``blocks``, the least worthy first; remembers hits of held ones too."""

    def __init__(self, blocks: int) -> None:
        self._room = max(1, blocks // RANK_SHARE)
        self._hits = np.zeros(blocks, dtype=np.int32)
        # A queue per rank, the longest let go first. OrderedDict: its first is O(1) even after deletions.
        self._ranks: tuple[OrderedDict[int, None], ...] = tuple(OrderedDict() for _ in range(TOP + 1))
        self._returns: dict[int, float] = {}  # of what leases cover, held ones too
        self._leased: OrderedDict[int, None] = OrderedDict()
        self._queues = (*self._ranks, self._leased)

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __contains__(self, block: int) -> bool:
        low, middle, high, leased = self._queues  # asked for each block of a long restore
        return block in low or block in middle or block in high or block in leased

    def lease(self, block: int, returns: float | None) -> None:
        """A lease covers ``block``, which is wanted again at ``returns``; None: no lease does any more."""
        if returns is None:
            self._returns.pop(block, None)
        else:
            self._returns[block] = returns
        if self.remove(block):
            self.add([block])

    def hit(self, blocks: BlockIds, times: int = 1) -> None:
        """Each of these was found again by its key, so many times."""
        np.add.at(self._hits, as_array(blocks), np.int32(times))

    def forget(self, blocks: Iterable[int]) -> None:
        """These lost their key: what they hold next has no past."""
        for block in blocks:
            self._hits[block] = 0
            self._returns.pop(block, None)

    def add(self, blocks: Iterable[int]) -> None:
        """These were let go in this order, the end of a chain before its beginning."""
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
        """This one goes before all others: it is kept elsewhere, too. Not what a lease covers."""
        if block in self._returns:
            return self.add([block])
        self._ranks[0][block] = None
        self._ranks[0].move_to_end(block, last=False)
        return None

    def remove(self, block: int) -> bool:
        """Take one out that is held again; whether it was in."""
        for queue in self._queues:
            if block in queue:
                del queue[block]
                return True
        return False

    def pop(self, count: int) -> list[int]:
        """Take out the ``count`` least worthy, the least worthy first."""
        taken: list[int] = []
        for rank in self._ranks:
            wanted = min(count - len(taken), len(rank))
            taken.extend(rank.popitem(last=False)[0] for _ in range(wanted))
        for block in self._last()[: count - len(taken)] if count > len(taken) else ():
            del self._leased[block]
            taken.append(block)
        return taken

    def unleased(self) -> Iterator[int]:
        """Those that no lease covers, the least worthy first."""
        return chain.from_iterable(self._ranks)

    def leased(self) -> list[int]:
        """Those that leases cover, the latest return first."""
        return self._last()

    def first(self, count: int) -> list[int]:
        """The ``count`` least worthy, the least worthy first; they stay."""
        found = list(islice(chain.from_iterable(self._ranks), max(0, count)))
        return found if len(found) >= count else found + self._last()[: count - len(found)]

    def blocks(self) -> list[int]:
        """All of them, the least worthy first."""
        return [*chain.from_iterable(self._ranks), *self._last()]

    def _last(self) -> list[int]:
        """Those that leases cover: the latest return first, of one return the longest let go."""
        return sorted(self._leased, key=self._returns.__getitem__, reverse=True)

    def _overflow(self, rank: int) -> None:
        crowded, below = self._ranks[rank], self._ranks[rank - 1]
        for _ in range(len(crowded) - self._room):
            block, _ = crowded.popitem(last=False)
            below[block] = None
            self._hits[block] = MOST_HITS[rank - 1]
