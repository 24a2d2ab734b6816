"""Where a sequence's KV lies: on the device, in the host tier, on the tiers below; and the keys of its
blocks.

A sequence can go on from a position if each KV group without a window has all blocks before it, and each group
with a window has the last ones: those that the token at this position sees.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby, islice, takewhile

from ...kvstore.block_table import NO_BLOCK
from ...kvstore.groups import Windows
from ...kvstore.keys import BlockHasher, in_group
from ...kvstore.pool import BlockPool
from ...kvstore.tiers import ASKED, BELOW, DEVICE, HOST, SAVING, Tiers
from ..adapters import Adapter
from ..sequence import Sequence
from ..verbs import BlockMap, KVTier, TierRun

LOOKED_AT = 64  # blocks, or partial ones, of which it is asked at once where they are

COMES = (BELOW, ASKED)
"""Where a block is that can only come up from a lower tier, or may."""

_NEARNESS = (0, ASKED, BELOW, SAVING, HOST, DEVICE)
"""Levels from the farthest tier to the nearest."""

_TIERS = {DEVICE: KVTier.DEVICE, HOST: KVTier.HOST, SAVING: KVTier.HOST, BELOW: KVTier.DISK}


@dataclass(frozen=True, slots=True)
class Located:
    """The blocks that a sequence's table lacks of the longest beginning that can be had, in the order of its
    tokens.

    ``end``: how many tokens have KV once these blocks are there: less than the sequence's computed ones if
    blocks behind a window are gone. ``shared``: how many have it in the groups without a window; if all have
    windows, ``end`` before a partial last block. Of each block,
    ``indexes``: its number in the sequence; ``groups``: its KV group; ``keys``; ``levels``: where it is, made
    of the flags of `kvstore.tiers`. The last ones may be partial. The sequence's last token is in none of them:
    its logits are wanted, so that it is always computed.
    """

    end: int
    shared: int
    block_tokens: int
    indexes: list[int]
    groups: list[int]
    keys: list[bytes]
    levels: list[int]

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def tokens(self) -> list[int]:
        """How many tokens each of these blocks holds."""
        block, part = divmod(self.end, self.block_tokens)
        full = bisect_left(self.indexes, block)
        return [self.block_tokens] * full + [part] * (len(self) - full)

    def beginning(self, count: int) -> Located:
        """The first ``count`` of these blocks. Of each number in the sequence it has the blocks of all groups,
        or none."""
        indexes, whole = self.indexes, len(self)
        while 0 < count < whole and indexes[count - 1] == indexes[count]:
            count -= 1
        if count >= whole:
            return self
        end = min(self.end, indexes[count] * self.block_tokens)
        parts = (column[:count] for column in (indexes, self.groups, self.keys, self.levels))
        return Located(end, self.shared, self.block_tokens, *parts)  # type: ignore[arg-type]

    def at_hand(self) -> Located:
        """The leading blocks that are in the host tier or on the device, up to the first that is not. The bytes
        of those in the host tier are not checked yet."""
        return self.beginning(sum(1 for _ in takewhile(lambda level: level & (HOST | DEVICE), self.levels)))

    def below(self) -> list[bytes]:
        """Keys of all blocks that can only come up from a lower tier."""
        return [key for key, level in zip(self.keys, self.levels, strict=True) if level in COMES]

    def readable(self, there: Callable[[bytes], bool]) -> Located:
        """The leading blocks that can be read to the device, up to the first that cannot: not on the device
        yet, and in the host tier or ``there``, which tells of a key whether its record can be read."""
        pairs = zip(self.keys, self.levels, strict=True)
        able = (not level & DEVICE and bool(level & HOST or there(key)) for key, level in pairs)
        return self.beginning(sum(1 for _ in takewhile(bool, able)))

    def to_restore(self) -> tuple[int, list[int], list[int]]:
        """The number in the sequence of the first full block that is not on the device; and from there on, for
        each full one, how many groups' blocks can only come up from a lower tier, and how many are not on the
        device."""
        full, numbered = self.end // self.block_tokens, zip(self.indexes, self.levels, strict=True)
        first, below, missing = 0, list[int](), list[int]()
        for index, pairs in groupby((one for one in numbered if one[0] < full), key=lambda one: one[0]):
            levels = [level for _, level in pairs if not level & DEVICE]
            if levels or missing:
                first = first if missing else index
                below.append(sum(level in COMES for level in levels))
                missing.append(len(levels))
        return first, below, missing


NOWHERE = Located(0, 0, 1, [], [], [], [])


@dataclass(eq=False)
class Residency:
    """Finds where blocks lie by the keys that ``hasher`` makes under ``namespace``: on the device, in the
    blocks of ``pool``, and on ``tiers``. ``windows``: of the KV groups."""

    _pool: BlockPool
    _hasher: BlockHasher
    _namespace: bytes
    _tiers: Tiers
    _windows: Windows

    def __post_init__(self) -> None:
        self._whole, self._narrow = self._windows.whole, self._windows.narrow
        self._nowhere = Tiers()

    def root(self, salt: bytes, adapter: Adapter | None = None) -> bytes:
        """The key that stands before the first block of the tenant with this ``salt``, computed with
        ``adapter``."""
        return self._hasher.root(self._namespace if adapter is None else adapter.namespace, salt)

    # --- what a sequence lacks ------------------------------------------------------------------------------

    def is_whole(self, sequence: Sequence) -> bool:
        """Whether the table has all blocks that the token behind the computed ones sees."""
        table, at = sequence.table.view, sequence.computed
        end = -(-at // self._hasher.block_tokens)
        return all(
            (table[self._windows.first(group, at) : end, group] != NO_BLOCK).all() for group in self._narrow
        )

    def cached(self, sequence: Sequence) -> Located:
        """The blocks that the sequence lacks of the longest beginning that the device has. O(blocks)."""
        return self._located(sequence, self._nowhere)

    def locate(self, sequence: Sequence) -> Located:
        """The blocks that the sequence lacks of the longest beginning that is on the device or on a tier,
        perhaps with a partial last block.

        `NOWHERE`, which has no blocks, if there are no lower tiers with records, while a step in flight
        computes the sequence, and if all tokens but the last are computed. O(blocks).
        """
        size, most = self._hasher.block_tokens, len(sequence.tokens) - 1
        if not self._tiers or sequence.planned != sequence.computed:
            return NOWHERE
        if sequence.computed >= most and self.is_whole(sequence):
            return NOWHERE
        found = self._located(sequence, self._tiers)
        if found.end < sequence.computed:
            return found
        block = found.end // size
        tail = self._tail_from(sequence, found.end, min(most, block * size + size - 1), HOST, BELOW)
        if tail is not None:
            end, key, levels = tail
            groups = range(len(levels))
            return replace(
                found,
                end=end,
                indexes=[*found.indexes, *(block for _ in groups)],
                groups=[*found.groups, *groups],
                keys=[*found.keys, *(in_group(key, group) for group in groups)],
                levels=[*found.levels, *levels],
            )
        return found

    def _located(self, sequence: Sequence, tiers: Tiers) -> Located:
        """The same without a partial last block, for ``tiers``."""
        size, here, table = self._hasher.block_tokens, self._pool.index.here, sequence.table.view
        own, most = sequence.computed // size, max(0, len(sequence.tokens) - 1) // size
        self.name(sequence, most)
        keys, levels = sequence.keys[own:most], dict[tuple[int, int], int]()
        if not self._narrow:  # one group, and nothing behind the computed tokens is gone
            found = tiers.levels(keys, here)
            end = (own + len(found)) * size if found else sequence.computed
            indexes = list(range(own, own + len(found)))
            return Located(end, end, size, indexes, [0] * len(found), keys[: len(found)], found)
        for group in self._whole:
            found = tiers.levels([in_group(key, group) for key in keys], here)
            del keys[len(found) :]
            levels.update(((own + at, group), level) for at, level in enumerate(found))
        end, near = self._windows_end(sequence, own + len(keys), tiers)
        shared = (own + len(keys) if self._whole else end) * size
        levels |= near
        position = sequence.computed if end == own else end * size
        firsts = [
            own if window is None else self._windows.first(group, position)
            for group, window in enumerate(self._windows.of)
        ]
        lacking = [
            (index, group)
            for index in range(min(firsts), end)
            for group, first in enumerate(firsts)
            if index >= max(first, own) or (index >= first and table[index, group] == NO_BLOCK)
        ]
        return Located(
            position,
            shared,
            size,
            [index for index, _ in lacking],
            [group for _, group in lacking],
            [in_group(sequence.keys[index], group) for index, group in lacking],
            [levels[one] for one in lacking],
        )

    def _windows_end(
        self, sequence: Sequence, end: int, tiers: Tiers
    ) -> tuple[int, dict[tuple[int, int], int]]:
        """The greatest number of blocks, at most ``end``, of which groups with windows have those that the next
        token sees, in the table or elsewhere. And where those are that the table lacks, by number and group."""
        size, here, table = self._hasher.block_tokens, self._pool.index.here, sequence.table.view
        own, levels = sequence.computed // size, dict[tuple[int, int], int]()
        asked = at = end

        def first(group: int) -> int:
            return self._windows.first(group, sequence.computed if end == own else end * size)

        while self._narrow and at > min(map(first, self._narrow)):
            at -= 1
            if at < asked:
                low = max(0, asked - LOOKED_AT)
                span = [(index, group) for index in range(low, asked) for group in self._narrow]
                asked = low
                unknown = [one for one in span if one[0] >= own or table[one] == NO_BLOCK]
                named = [in_group(sequence.keys[index], group) for index, group in unknown]
                levels.update(zip(unknown, tiers.levels(named, here, whole=True), strict=True))
            if any(at >= first(group) and not levels.get((at, group), 1) for group in self._narrow):
                end = at
        return end, levels

    def map(self, sequence: Sequence) -> BlockMap:
        """The tier of each block of all tokens of ``sequence``, and whether other sequences hold it on the
        device too. O(blocks).

        Unlike `locate` it answers at any time, and also tells of blocks behind one that lies nowhere. A copy
        that is under way to the host tier counts as there. A block is where the farthest of its groups' is, of
        those that are needed at the end. One that no group needs there counts as on the device while the
        sequence goes on from behind it, else as the next one.
        """
        size, length, pool = self._hasher.block_tokens, len(sequence.tokens), self._pool
        full, blocks = length // size, -(-length // size)
        own, table = min(-(-sequence.computed // size), blocks), sequence.table.view
        self.name(sequence, full)
        levels, shared, tail = [DEVICE] * blocks, [False] * blocks, None
        if blocks > full and own < blocks:
            tail = self._tail_from(sequence, full * size, length, HOST, SAVING, BELOW)
        for group in range(len(self._windows)):
            first = self._windows.first(group, length)
            held = table[first:own, group].tolist()
            named = [in_group(key, group) for key in sequence.keys[first:full]]
            there = self._tiers.levels(named, pool.index.here, whole=True)
            there.append(0 if tail is None else tail[2][group])
            found = [pool.index.here.get(key, NO_BLOCK) for key in named] + [NO_BLOCK]
            for at in range(blocks - first):
                has = at < len(held) and held[at] != NO_BLOCK
                if not has:
                    level = there[at] & DEVICE or there[at]
                    levels[first + at] = min(levels[first + at], level, key=_NEARNESS.index)
                shared[first + at] |= pool.references.of(held[at] if has else found[at]) > has
        # Nothing needs the blocks behind the windows of all groups.
        if behind := min(self._windows.first(group, length) for group in range(len(self._windows))):
            levels[:behind] = [levels[min(behind, blocks - 1)]] * behind
        if self.is_whole(sequence):
            levels[:own] = [DEVICE] * own
        tiers = [_TIERS.get(level, KVTier.NONE) for level in levels]
        pairs = zip(tiers, shared, strict=True)
        runs = [TierRun(tier, others, sum(1 for _ in run)) for (tier, others), run in groupby(pairs)]
        return BlockMap(length, size, runs)

    def _tail_from(
        self, sequence: Sequence, start: int, end: int, *wanted: int
    ) -> tuple[int, bytes, list[int]] | None:
        """The longest partial block that ends at a position of ``(start, end]`` and has records at the
        ``wanted`` levels: its end, its key, and the level in each group."""
        for at in range(end, start, -1):
            key = self.tail(sequence, at)
            named = [in_group(key, group) for group in range(len(self._windows))]
            levels = self._tiers.levels(named, (), whole=True)
            if all(level in wanted for level in levels):
                return at, key, levels
        return None

    # --- names ----------------------------------------------------------------------------------------------

    def names(self, sequence: Sequence) -> list[bytes]:
        """The keys of the records that the sequence may have in lower tiers, in order: of its full blocks, as
        far as the token behind its last one sees them, then of the partial last block that was saved."""
        if not self._narrow:  # one group, and nothing of it is behind a window
            return [*sequence.keys, *(sequence.tail or ())[:1]]
        return [key for _, key in self.numbered(sequence)]

    def numbered(self, sequence: Sequence) -> list[tuple[int, bytes]]:
        """The same, each with the number of its block in the sequence."""
        groups, full, size = range(len(self._windows)), len(sequence.keys), self._hasher.block_tokens
        end = min([full, *(mark // size for mark in sequence.marks[-1:])])
        firsts = [self._windows.first(group, end * size) for group in groups]
        found = [
            (index, in_group(key, group))
            for index, key in enumerate(sequence.keys)
            for group in groups
            if index >= firsts[group]
        ]
        if sequence.tail is not None:
            found += [(full, in_group(sequence.tail[0], group)) for group in groups]
        return found

    def everything(self, sequence: Sequence) -> list[bytes]:
        """The key of each record that the sequence's tokens may ever have got, in all groups: of full
        blocks, and of partial last ones that may have been saved."""
        size, total = self._hasher.block_tokens, len(sequence.tokens)
        self.name(sequence, total // size)
        last = max(0, total - 1) // size * size  # the last token is computed only if others follow
        ends = dict.fromkeys([*range(last + 1, total + 1), *sequence.marks])
        tails = [self.tail(sequence, end) for end in ends if end % size]
        own = [] if sequence.tail is None else [sequence.tail[0]]
        keys = dict.fromkeys([*sequence.keys, *own, *tails])
        return [in_group(key, group) for group in range(len(self._windows)) for key in keys]

    def earlier_tails(self, sequence: Sequence) -> Iterator[list[bytes]]:
        """Yield the keys of the records of partial blocks that end at earlier positions, of so many positions
        at a time. Where groups have windows there is one for each turn's end, also those of an engine before,
        which are not marked here: so all positions are looked at."""
        size, groups = self._hasher.block_tokens, range(len(self._windows))
        ends = (end for end in range(1, len(sequence.tokens)) if end % size)
        while some := [self.tail(sequence, end) for end in islice(ends, LOOKED_AT)]:
            named = [in_group(key, group) for key in some for group in groups]
            levels = self._tiers.levels(named, (), whole=True)
            yield [key for key, level in zip(named, levels, strict=True) if level]

    def tail(self, sequence: Sequence, end: int) -> bytes:
        """The key of the sequence's partial block that ends behind its first ``end`` tokens."""
        full = end // self._hasher.block_tokens
        self.name(sequence, full)
        parent = sequence.keys[full - 1] if full else sequence.root
        return self._hasher.tail(parent, sequence.tokens.span(full * self._hasher.block_tokens, end))

    def name(self, sequence: Sequence, blocks: int) -> None:
        """Make the keys of the sequence's first ``blocks`` blocks, which must be full, as far as they are not
        made yet, and append them to ``sequence.keys``."""
        done = len(sequence.keys)
        if done < blocks:
            parent = sequence.keys[-1] if done else sequence.root
            tokens = sequence.tokens.span(
                done * self._hasher.block_tokens, blocks * self._hasher.block_tokens
            )
            sequence.name(self._hasher.chain(parent, tokens))
