"""The block pool: counts the references to each device block, and decides when a block may be used again.

Keeps the step fence, and evicts cached blocks when free ones run out. Owns the `PrefixIndex`, because a block
can be found by its key exactly as long as the pool keeps its content. Knows ids only: no tensors, tokens,
sequences. One thread uses it.

::

                   allocate                   last release, unsealed
        FREE ───────────────────▶ HELD ────────────────────────────────▶ FREE
          ▲                       ▲  │   last release, sealed
          │ allocate (evicts)     │  └─────────────────────────────────▶ CACHED
          └────────── CACHED ─────┘ share (found again)

    A block released while steps are in flight is FENCED on its way to FREE or CACHED until the last of them has
    finished: it is not allocated, but if it is sealed it is still found and shared.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import islice, product, takewhile
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .block_table import BlockArray, BlockIds, as_array
from .errors import BlockMisused, LeakFound, PoolExhausted, StepOutOfOrder
from .eviction import EvictionOrder
from .prefix_index import PrefixIndex
from .slices import SLICE, sliced

Owner: TypeAlias = int | str | None
"""What holds a reference: a sequence's number, or any other name; None for callers that give none."""


SHOWN = 8
"""The most blocks that each complaint of an audit names."""


class OwnerTags(Counter[tuple[int, Owner]]):
    """How many references each owner has to each held block; kept in debug and in tests only.

    So an error about a block that is released by mistake, or leaked, names its owners.
    """

    def give(self, blocks: Sequence[int], owner: Owner) -> None:
        """Note one reference of ``owner`` less to each of these blocks. Raises `BlockMisused`: it has none to
        one of them."""
        for block in blocks:
            if not self[block, owner]:
                raise BlockMisused(block, f"held by {self.of(block)}", f"released by {owner!r}")
        self.subtract((block, owner) for block in blocks)
        for block in blocks:
            if not self[block, owner]:
                del self[block, owner]

    def of(self, block: int) -> list[Owner]:
        """The block's owners, one entry per reference. O(references)."""
        return [owner for held, owner in self.elements() if held == block]


class References:
    """The number of references to each of ``blocks`` blocks, as an array, so that a whole block table is
    counted at once.

    All are 0 at first. A block id outside the pool has 0 references.
    """

    def __init__(self, blocks: int) -> None:
        self._counts = np.zeros(blocks, dtype=np.int32)
        self._marks = np.zeros(blocks, dtype=np.int32)  # scratch of `first_twice`
        self.total = 0
        """All references together: a block that is shared counts for each of its holders."""

    def __contains__(self, block: int) -> bool:
        return self.of(block) > 0

    def of(self, block: int) -> int:
        """The number of references to one block; 0 for free, cached and fenced ones."""
        return int(self._counts[block]) if 0 <= block < len(self._counts) else 0

    def each(self, ids: BlockArray) -> NDArray[np.int32]:
        """The numbers of references to each block of ``ids``, int32 ``[ids]``. Raises `BlockMisused`: one is
        no block of the pool."""
        if len(ids) and (ids.min() < 0 or ids.max() >= len(self._counts)):
            strange = ids[(ids < 0) | (ids >= len(self._counts))]
            raise BlockMisused(int(strange[0]), BlockState.UNKNOWN, "used")
        return self._counts.take(ids)

    def first_twice(self, ids: BlockArray) -> int | None:
        """A block that appears in ``ids`` more than once; None if each appears once. All must be ids of the
        pool."""
        positions = np.arange(len(ids), dtype=np.int32)
        self._marks[ids] = positions  # of equal ones the last stays
        twice = np.flatnonzero(self._marks[ids] != positions)
        return int(ids[twice[0]]) if len(twice) else None

    def take(self, ids: BlockArray, times: int = 1) -> list[int]:
        """Add ``times`` references to each block of ``ids``. Returns the blocks that had no reference
        before."""
        loose = self._counts.take(ids) == 0
        fresh: list[int] = ids[loose].tolist() if loose.any() else []
        np.add.at(self._counts, ids, np.int32(times))  # of one type: ten times as fast
        self.total += len(ids) * times
        return fresh

    def give(self, ids: BlockArray) -> list[int]:
        """Remove one reference from each block of ``ids``; none may appear twice. Returns the blocks that
        have no reference now, in reverse order."""
        counts = self._counts.take(ids)
        self._counts[ids] = counts - 1
        retired: list[int] = ids[counts == 1][::-1].tolist()
        self.total -= len(ids)
        return retired

    def counts(self, first: int = 0, end: int | None = None) -> dict[int, int]:
        """The number of references by block, for those of the blocks ``[first, end)`` that have any; by
        default, of all."""
        held = first + np.flatnonzero(self._counts[first:end])
        return dict(zip(held.tolist(), self._counts[held].tolist(), strict=True))


class BlockState(StrEnum):
    """Where a block is; every block is in exactly one state. FREE: it holds nothing. HELD: it has references.
    CACHED: it has none, and is found by its key until it is evicted. FENCED: it was released while a step in
    flight may use it, so it cannot be allocated yet. UNKNOWN: it is no block of this pool."""

    FREE = "free"
    HELD = "held"
    CACHED = "cached"
    FENCED = "fenced"
    UNKNOWN = "not of this pool"


class EvictedBlock(NamedTuple):
    """A cached block that was evicted for an allocation, and the key under which it was found.

    Its content stands in the block until the new holder writes it. ``wanted``: False if
    `BlockPool.evict_first` had said of it that it is unlikely to be looked for again.
    """

    block: int
    key: bytes
    wanted: bool


class Allocation(NamedTuple):
    """Allocated blocks. ``blocks``: their ids, with one reference each and unknown content. ``evicted``:
    those of them that were cached until now, with the keys that they had."""

    blocks: list[int]
    evicted: list[EvictedBlock]


class BlockPool:
    """The references and states of ``blocks`` device blocks, all free at first.

    Each method does all it is asked, or raises and changes nothing. ``debug``: owners are remembered, and
    ``release`` raises for an owner that does not hold the block. ``references``: others only read them.
    """

    def __init__(self, blocks: int, *, debug: bool = False) -> None:
        assert blocks > 0, "a pool has blocks"
        self.blocks = blocks
        self.index = PrefixIndex(blocks)
        self.owners = OwnerTags() if debug else None
        # Each block is in exactly one of these four.
        self._free = list(range(blocks - 1, -1, -1))  # last in, first out
        self.references = References(blocks)
        # By block: the step that must finish, which rise, and whether the block is wanted.
        self._fenced: OrderedDict[int, tuple[int, bool]] = OrderedDict()
        self._cached = EvictionOrder(blocks)
        self._in_flight: deque[int] = deque()
        self.in_flight: Collection[int] = self._in_flight
        """The numbers of the steps in flight."""
        self._last_step: int | None = None
        self._allocated = self._evicted = self._found = 0

    @property
    def available(self) -> int:
        """How many blocks `allocate` could hand out now: free and cached ones, not fenced ones."""
        return len(self._free) + len(self._cached)

    @property
    def version(self) -> tuple[int, ...]:
        """Numbers of which one is another after blocks were allocated, found, released, named or freed, or a
        step was launched or finished."""
        counted = self._allocated, self._found, self.references.total, len(self.index), len(self._free)
        return *counted, len(self._fenced), len(self._in_flight)

    @property
    def fenced(self) -> int:
        """How many released blocks wait for the steps in flight to finish before they can be allocated."""
        return len(self._fenced)

    def allocate(self, count: int, *owners: Owner) -> Allocation:
        """Take ``count`` blocks: free ones, then cached ones in eviction order, which lose their keys.
        ``owners``: the sequence that gets the references, or that of each block; kept in debug only.

        Raises `PoolExhausted`: fewer are available.
        """
        assert count >= 0, f"cannot allocate {count} blocks"
        if count > self.available:
            raise PoolExhausted(f"{count} blocks needed, {self.available} available")
        split = max(0, len(self._free) - count)
        taken = self._free[split:][::-1]
        del self._free[split:]
        evicted = self._evict(count - len(taken)) if len(taken) < count else []
        taken += [block for block, _, _ in evicted]
        self.references.take(as_array(taken))
        self._allocated += count
        if self.owners is not None:
            each = owners if len(owners) == count else (owners or (None,)) * count
            self.owners.update(zip(taken, each, strict=True))
        return Allocation(taken, evicted)

    def share(self, blocks: BlockIds, *owners: Owner, behind: BlockIds = ()) -> None:
        """Add one reference to each block for each of ``owners`` (one, if none is named): to held blocks (a
        fork; the owners are its children), or to sealed ones that are cached or fenced (a prefix hit).
        O(blocks) in arrays.

        ``behind``: blocks of the same sequence before these, which it holds already; the hit counts for them
        too.

        Raises `BlockMisused`: one is neither held nor sealed.
        """
        ids, owners = as_array(blocks), owners or (None,)
        loose = self.references.each(ids) == 0
        sealed = self.index.holds_each(ids)
        self._refuse(ids[loose & ~sealed], "shared")
        self._hold(ids, owners)
        found = ids if sealed.all() else ids[sealed]
        self._found += len(owners) * len(found)
        self._cached.hit(found, len(owners))
        if len(behind):
            before = as_array(behind)
            self._cached.hit(before[self.index.holds_each(before)], len(owners))

    def release(
        self, blocks: BlockIds, owner: Owner = None, *, keep: bool = True, wanted: bool = True
    ) -> None:
        """Remove one reference from each of ``blocks``, which are in the order of the sequence. ``owner``:
        what held them; checked in debug only.

        A block without references is cached if it is sealed and ``keep`` is set, else free; while steps are
        in flight it is fenced before. Not ``wanted``: it is evicted before all others, as by `evict_first`.
        Raises `BlockMisused`: one is not held, or comes twice.
        """
        ids = as_array(blocks)
        self._refuse(ids[self.references.each(ids) == 0], "released")
        twice = self.references.first_twice(ids)
        if twice is not None:
            raise BlockMisused(twice, "named twice", "released")
        if self.owners is not None:
            self.owners.give(ids.tolist(), owner)
        retired = self.references.give(ids)
        if not keep:
            self._unseal(retired)
        if self._in_flight:
            self._fenced.update(dict.fromkeys(retired, (self._in_flight[-1], wanted)))
        else:
            self._make_available(retired, wanted=wanted)

    def join(self, block: int, key: bytes, owner: Owner = None) -> int:
        """Name a held block by ``key``: it is full and computed, read-only from now on, and can be found. But
        where ``key`` already names another block, take a reference to that one and release this one.

        So two sequences that computed the same prompt side by side end up with one copy. A sequence that
        holds a sealed block then holds those that the keys before it name; the eviction order relies on that.

        Returns:
            The block that now belongs in the sequence's table: ``block``, or the other one.

        Raises `BlockMisused`: the block is not held.
        """
        if block not in self.references:
            raise BlockMisused(block, self.state(block), "sealed")
        if self.index.key_of(block) == key or self.index.add(key, block):
            return block
        first = self.index.here[key]
        self.release([block], owner)
        self._hold(as_array([first]), (owner,))
        return first

    def seal(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """Name many held, full blocks that have no keys yet, each by its own key; none of these names a block
        already. Raises `BlockMisused`: one is not held."""
        ids = as_array(blocks)
        self._refuse(ids[self.references.each(ids) == 0], "sealed")
        for block, key in zip(blocks, keys, strict=True):
            added = self.index.add(key, block)
            assert added, "the key names a block already"

    def evict_first(self, blocks: Iterable[int]) -> None:
        """Let those of ``blocks`` that are cached be evicted before all others, the last of them first: they
        are unlikely to be wanted again. Blocks in another state are left alone."""
        for block in blocks:
            if self._cached.remove(block):
                self._cached.put_first(block)

    def distrust(self, blocks: Iterable[int]) -> None:
        """Forget the keys of these blocks, as their content is unknown or not wanted here: they are found no
        longer, and are free once they are released. Cached ones are free at once."""
        for block in blocks:
            self._unseal([block])
            if self._cached.remove(block):
                self._free.append(block)

    def launched(self, step: int) -> None:
        """Note that step ``step`` is in flight: the device may read and write any held block until
        `finished`.

        Raises `StepOutOfOrder`: a step of this number or a higher one was launched before.
        """
        if self._last_step is not None and step <= self._last_step:
            raise StepOutOfOrder(f"step {step} launched after step {self._last_step}")
        self._last_step = step
        self._in_flight.append(step)

    def finished(self, step: int) -> None:
        """Note that the device is done with ``step`` and all before it: blocks released while these were in
        flight can be used again.

        Raises `StepOutOfOrder`: the step is not in flight.
        """
        if step not in self._in_flight:
            raise StepOutOfOrder(f"step {step} finished, in flight are {list(self._in_flight)}")
        while self._in_flight and self._in_flight[0] <= step:
            self._in_flight.popleft()
        passed = list(takewhile(lambda block: self._fenced[block][0] <= step, self._fenced))
        unwanted = {block for block in passed if not self._fenced.pop(block)[1]}
        self._make_available([block for block in passed if block not in unwanted])
        if unwanted:
            self._make_available([block for block in passed if block in unwanted], wanted=False)

    def state(self, block: int) -> BlockState:
        """The state of the block."""
        if block in self.references:
            return BlockState.HELD
        if block in self._fenced:
            return BlockState.FENCED
        if block in self._cached:
            return BlockState.CACHED
        return BlockState.FREE if 0 <= block < self.blocks else BlockState.UNKNOWN

    def statistics(self) -> dict[str, int]:
        """Blocks by state (``free + held + cached + fenced == blocks``), and other figures; the last three
        count since the start.

        ``available``: could be allocated now. ``sealed``: can be found by a key. ``in_flight``: unfinished
        steps. ``allocated``: blocks handed out. ``evicted``: cached blocks evicted. ``found``: references that
        ``share`` took on sealed blocks.
        """
        return {
            "blocks": self.blocks,
            "free": len(self._free),
            "held": self.blocks - self.available - self.fenced,
            "cached": len(self._cached),
            "fenced": self.fenced,
            "available": self.available,
            "sealed": len(self.index),
            "in_flight": len(self._in_flight),
            "allocated": self._allocated,
            "evicted": self._evicted,
            "found": self._found,
        }

    def audit_in_slices(self, tables: Iterable[BlockIds] | None) -> Iterator[None]:
        """Check that every block is in one state, and that references are those of ``tables``, the block
        tables that should hold all; None: that is not known. A slice of bounded size at a time: yields between
        two slices, and is to be dropped if `version` is another one by then. O(blocks): for idle moments.

        Raises `LeakFound`: its text lists all that is wrong.
        """
        expected: Counter[int] = Counter()
        for table in tables or ():
            for part in sliced(as_array(table).tolist()):
                expected.update(part)
                yield
        references: dict[int, int] = {}
        for first in range(0, self.blocks, SLICE):
            references.update(self.references.counts(first, first + SLICE))
            yield
        seen: Counter[int] = Counter()
        wrong: dict[str, list[int]] = defaultdict(list)
        sealed = self.index.holds
        groups: tuple[tuple[Iterable[int], str, Callable[[int], bool]], ...] = (
            (self._free, "free with a key", sealed),
            (references, "held without a reference", lambda block: references[block] < 1),
            (self._fenced, "fenced with no step in flight", lambda _: not self._in_flight),
            (self._cached, "cached without a key", lambda block: not sealed(block)),
        )
        for blocks, fault, is_faulty in groups:
            for part in sliced(blocks):
                seen.update(part)
                wrong[fault] += filter(is_faulty, part)
                yield
        for part in sliced(seen):
            wrong["in two states"] += (block for block in part if seen[block] > 1)
            wrong["not of this pool"] += (block for block in part if not 0 <= block < self.blocks)
            yield
        for part in sliced(range(self.blocks)):
            wrong["in no state"] += (block for block in part if block not in seen)
            yield
        complaints = [f"{what}: {_some(found)}" for what, found in wrong.items() if found]
        for part in sliced(range(self.blocks)) if tables is not None else ():
            differ = (block for block in part if references.get(block, 0) != expected[block])
            complaints += (self._miscount(block, references, expected) for block in differ)
            yield
        if complaints:
            raise LeakFound("; ".join(complaints))

    def _miscount(self, block: int, references: Mapping[int, int], expected: Mapping[int, int]) -> str:
        tags = f" by {self.owners.of(block)}" if self.owners is not None else ""
        ours, theirs = references.get(block, 0), expected.get(block, 0)
        return f"block {block} is held {ours} times{tags}, {theirs} accounted for"

    def _refuse(self, blocks: BlockArray, act: str) -> None:
        """Raise `BlockMisused` for the first of these blocks, if there is one."""
        if len(blocks):
            block = int(blocks[0])
            raise BlockMisused(block, self.state(block), act)

    def _hold(self, ids: BlockArray, owners: Sequence[Owner]) -> None:
        """Add a reference of each of ``owners`` to each block."""
        if self.owners is not None:
            self.owners.update(product(ids.tolist(), owners))
        for block in self.references.take(ids, len(owners)):
            if self._fenced.pop(block, None) is None:
                self._cached.remove(block)

    def _evict(self, count: int) -> list[EvictedBlock]:
        unwanted = set(islice(takewhile(self._cached.is_elsewhere, self._cached), count))
        blocks = self._cached.pop(count)
        evicted = []
        for block in blocks:
            key = self.index.key_of(block)
            assert key is not None, "a cached block is sealed"
            evicted.append(EvictedBlock(block, key, block not in unwanted))
        self._unseal(blocks)
        self._evicted += count
        return evicted

    def _unseal(self, blocks: Sequence[int]) -> None:
        self.index.drop(blocks)
        self._cached.forget(blocks)

    def _make_available(self, blocks: Sequence[int], *, wanted: bool = True) -> None:
        """Cache those of these released blocks that are sealed, and free the others. ``blocks``: in the order
        of eviction, the end of a sequence before its beginning. Not ``wanted``: they go before all others."""
        sealed = self.index.holds
        self._free.extend(block for block in blocks if not sealed(block))
        if wanted:
            self._cached.add(filter(sealed, blocks))
        else:
            for block in filter(sealed, blocks):
                self._cached.put_first(block)


def _some(blocks: Iterable[int]) -> str:
    listed = sorted(blocks)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(map(str, listed[:SHOWN])) + more
