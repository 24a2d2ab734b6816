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
5. What is kept **elsewhere** too (`put_first`) is evicted before all ranks.

Rules 1 and 3 keep rule 2 true: each hit of a block is a hit of all before it, and ranks overflow in order.
Rule 2 also needs sequences that hold every block they build on (`pool.join`) and report a longer match
(``behind`` of `pool.share`). Otherwise a block may outlive one before it, and waste its memory.

::

     evicted first                                     evicted last
    [ elsewhere | one-off | returned | hot | leased              ]
                [ foreseen ................ )         `foresee` moves the end

No operation depends on how many blocks there are; those on leased blocks take O(log n). Knows no keys and no
references.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain, count, islice

import numpy as np

from .block_table import BlockIds, as_array
from .priorities import Priorities

MOST_HITS = (0, 3)
"""The most hits that a block of rank 0, and of rank 1, has; rank 2 is for more."""

TOP = len(MOST_HITS)
"""The highest rank."""

RANK_SHARE = 4
"""A rank above 0 may fill one part in this many of the pool's blocks."""


class _Rank:
    """The blocks of one rank, the longest released first: those that are ``foreseen``, then the ``others``."""

    def __init__(self) -> None:
        # OrderedDict: its first is O(1) even after deletions.
        self.foreseen: OrderedDict[int, None] = OrderedDict()
        self.others: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.foreseen) + len(self.others)

    def __contains__(self, block: int) -> bool:
        return block in self.others or block in self.foreseen

    def __iter__(self) -> Iterator[int]:
        return chain(self.foreseen, self.others)

    def remove(self, block: int) -> bool:
        """Remove a block, which is here. Returns whether it was foreseen."""
        foreseen = block in self.foreseen
        del (self.foreseen if foreseen else self.others)[block]
        return foreseen

    def advance(self) -> int:
        """Make the first of the others the last foreseen one. Returns it."""
        block, _ = self.others.popitem(last=False)
        self.foreseen[block] = None
        return block

    def retreat(self) -> int:
        """Make the last foreseen one the first of the others. Returns it."""
        block, _ = self.foreseen.popitem()
        self.others[block] = None
        self.others.move_to_end(block, last=False)
        return block


class _Leased:
    """The blocks that leases cover: the latest expected return first, of equal ones the longest released."""

    def __init__(self) -> None:
        self._all = Priorities[int]()
        self.foreseen = Priorities[int]()  # from the last one to the first
        self.others = Priorities[int]()
        self._count = count()

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, block: int) -> bool:
        return block in self._all

    def __iter__(self) -> Iterator[int]:
        return iter(self._all)

    def add(self, block: int, returns: float) -> None:
        """Add a block that is wanted again at ``returns``; it is not foreseen."""
        order = -returns, next(self._count)
        self._all.put(block, order)
        self.others.put(block, order)

    def remove(self, block: int) -> bool:
        """Remove a block, which is here. Returns whether it was foreseen."""
        self._all.discard(block)
        self.others.discard(block)
        return self.foreseen.discard(block)

    def advance(self) -> int:
        """Make the first of the others a foreseen one. Returns it."""
        block = self._first(self.others)
        returns, number = self._all[block]
        self.foreseen.put(block, (-returns, -number))
        return block

    def retreat(self) -> int:
        """Make the last foreseen one one of the others. Returns it."""
        block = self._first(self.foreseen)
        self.others.put(block, self._all[block])
        return block

    @property
    def passed(self) -> bool:
        """Whether one of the others is evicted before one that is foreseen."""
        first, last = self.others.first, self.foreseen.first
        return first is not None and last is not None and bool(self._all[first] < self._all[last])

    @staticmethod
    def _first(blocks: Priorities[int]) -> int:
        block = blocks.first
        assert block is not None, "there is one"
        blocks.discard(block)
        return block


class EvictionOrder:
    """The cached blocks of a pool of ``blocks`` blocks, in the order in which they are evicted. Hits and
    leases are remembered for all its blocks, cached or not. ``withdrawn`` gets each block that was foreseen
    and is so no longer, for whatever reason; the caller of `foresee` takes them out."""

    def __init__(self, blocks: int, withdrawn: list[int] | None = None) -> None:
        self._room = max(1, blocks // RANK_SHARE)
        self._hits = np.zeros(blocks, dtype=np.int32)
        self._returns: dict[int, float] = {}  # of leased blocks, held ones too
        self._elsewhere: OrderedDict[int, None] = OrderedDict()
        self._ranks = tuple(_Rank() for _ in range(TOP + 1))
        self._leased = _Leased()
        self._lines: tuple[_Rank | _Leased, ...] = (*self._ranks, self._leased)
        self._withdrawn: list[int] = [] if withdrawn is None else withdrawn

    def __len__(self) -> int:
        return len(self._elsewhere) + self.alone

    def __iter__(self) -> Iterator[int]:
        """All blocks here, in eviction order."""
        return chain(self.unleased(), self.leased())

    @property
    def alone(self) -> int:
        """How many of the blocks are not kept elsewhere, as far as `put_first` was told."""
        return sum(map(len, self._lines))

    def __contains__(self, block: int) -> bool:
        low, middle, high, leased = self._lines  # asked for each block of a long restore
        return block in low or block in self._elsewhere or block in middle or block in high or block in leased

    def lease(self, block: int, returns: float | None) -> None:
        """Note that a lease covers ``block``, which is expected to be wanted again at ``returns`` (seconds);
        with None, that no lease covers it any more. A cached block gets the position that follows from that."""
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
        """Forget the hits and leases of these blocks, which have lost their keys; their positions in the order
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
                self._leased.add(block, self._returns[block])
                continue
            self._ranks[bisect_left(MOST_HITS, self._hits.item(block))].others[block] = None
        for rank in range(TOP, 0, -1):
            crowded, below = self._ranks[rank], self._ranks[rank - 1]
            while len(crowded) > self._room:
                block = next(iter(crowded))
                if crowded.remove(block):
                    self._withdrawn.append(block)
                below.others[block] = None
                self._hits[block] = MOST_HITS[rank - 1]

    def put_first(self, block: int) -> None:
        """Add a cached block so that it is evicted before all others, because it is kept elsewhere too. One
        that a lease covers gets its usual position instead."""
        if block in self._returns:
            self.add([block])
        else:
            self._elsewhere[block] = None
            self._elsewhere.move_to_end(block, last=False)

    def is_elsewhere(self, block: int) -> bool:
        """Whether the block stands among those that `put_first` has put before all ranks."""
        return block in self._elsewhere

    def remove(self, block: int) -> bool:
        """Take a block out of the order; returns whether it was in."""
        if block in self._elsewhere:
            del self._elsewhere[block]
            return True
        for line in self._lines:
            if block in line:
                if line.remove(block):
                    self._withdrawn.append(block)
                return True
        return False

    def pop(self, most: int) -> list[int]:
        """Take out the first ``most`` blocks in eviction order, and return them."""
        taken = list(islice(self, most))
        for block in taken:
            self.remove(block)
        return taken

    def unleased(self) -> Iterator[int]:
        """The blocks that no lease covers, in eviction order."""
        return chain(self._elsewhere, *self._ranks)

    def leased(self) -> Iterator[int]:
        """The blocks that leases cover, in eviction order: the latest expected return first, of equal ones
        the longest released."""
        return iter(self._leased)

    def foresee(self, most: int, at_once: int) -> list[int]:
        """Let the first ``most`` blocks that are not kept elsewhere be the foreseen ones: those that are
        evicted next, once what is kept elsewhere is gone. Returns those that were not foreseen before, but at
        most ``at_once``: the others come with the next calls.

        O(changes of the order since the last call).
        """
        fresh: list[int] = []
        lines, leased = self._lines, self._leased
        while True:
            first = next((at for at, line in enumerate(lines) if line.others), len(lines))
            last = next((at for at in range(len(lines) - 1, -1, -1) if lines[at].foreseen), -1)
            foreseen = sum(len(line.foreseen) for line in lines)
            passed = first < last or (lines[last] is leased and leased.passed)
            if foreseen > most:
                self._withdrawn.append(lines[last].retreat())
            elif first < len(lines) and (foreseen < most or passed) and len(fresh) < at_once:
                fresh.append(lines[first].advance())
            else:
                return fresh
