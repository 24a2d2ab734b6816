"""Where a sequence's KV lies: on the device, in the host tier, on the tiers below; and the keys of its
blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby, takewhile

from ...kvstore.keys import BlockHasher
from ...kvstore.pool import BlockPool
from ...kvstore.tiers import ASKED, BELOW, DEVICE, HOST, SAVING, Tiers
from ..adapters import Adapter
from ..sequence import Sequence
from ..verbs import BlockMap, KVTier, TierRun

COMES = (BELOW, ASKED)
"""Where a block is that can only come up from a lower tier, or may."""

_TIERS = {DEVICE: KVTier.DEVICE, HOST: KVTier.HOST, SAVING: KVTier.HOST, BELOW: KVTier.DISK}


@dataclass(frozen=True, slots=True)
class Located:
    """Where the blocks behind a sequence's computed tokens lie, up to the first that lies nowhere.

    ``first``: the number of the first of these blocks in the sequence. ``keys``, ``levels``: of each, in
    order; a level is made of the flags of `kvstore.tiers`. ``full``: how many of them are full;
    the one behind, if there is one, is a partial last block. The sequence's last token is in none of them:
    its logits are wanted, so that it is always computed.
    """

    first: int
    keys: list[bytes]
    levels: list[int]
    full: int

    def in_host(self) -> list[bytes]:
        """Keys of the leading blocks that are in the host tier, up to the first that is not. Their bytes are
        not checked yet."""
        count = sum(1 for _ in takewhile(lambda level: level & HOST, self.levels))
        return self.keys[:count]

    def below(self) -> list[bytes]:
        """Keys of all blocks that can only come up from a lower tier."""
        return [key for key, level in zip(self.keys, self.levels, strict=True) if level in COMES]

    def readable(self, there: Callable[[bytes], bool]) -> list[bytes]:
        """Keys of the leading blocks that can be read to the device, up to the first that cannot: not on the
        device yet, and in the host tier or ``there``, which tells of a key whether its record can be read."""
        found = []
        for key, level in zip(self.keys, self.levels, strict=True):
            if level & DEVICE or not (level & HOST or there(key)):
                break
            found.append(key)
        return found

    def to_restore(self) -> tuple[int, list[bool]]:
        """The number in the sequence of the first full block that is not on the device, and for each full one
        from there on whether it can only come up from a lower tier."""
        above = sum(1 for _ in takewhile(lambda level: level & DEVICE, self.levels[: self.full]))
        return self.first + above, [level in COMES for level in self.levels[above : self.full]]


NOWHERE = Located(0, [], [], 0)


@dataclass(eq=False)
class Residency:
    """Finds where blocks lie by the keys that ``hasher`` makes under ``namespace``: on the device, in the
    blocks of ``pool``, and on ``tiers``."""

    _pool: BlockPool
    _hasher: BlockHasher
    _namespace: bytes
    _tiers: Tiers

    def root(self, salt: bytes, adapter: Adapter | None = None) -> bytes:
        """The key that stands before the first block of the tenant with this ``salt``, computed with
        ``adapter``."""
        return self._hasher.root(self._namespace if adapter is None else adapter.namespace, salt)

    def locate(self, sequence: Sequence) -> Located:
        """Where the blocks behind the sequence's computed tokens lie, up to the first that lies nowhere.
        Makes those of the sequence's keys that are not made yet.

        `NOWHERE`, which has no blocks, if there are no lower tiers with records, while a step in flight
        computes the sequence, and if all tokens but the last are computed. O(blocks).
        """
        size, most = self._hasher.block_tokens, len(sequence.tokens) - 1
        if not self._tiers or sequence.planned != sequence.computed or sequence.computed >= most:
            return NOWHERE
        first, end = sequence.computed // size, most // size
        self.name(sequence, end)
        keys = sequence.keys[first:end]
        levels = self._tiers.levels(keys, self._pool.index.here)
        full = len(levels)
        del keys[full:]
        at, most = (first + full) * size, min(most, (first + full + 1) * size - 1)
        key, level = self._last(sequence, max(at, sequence.computed), most, HOST, BELOW)
        if level:
            keys.append(key)
            levels.append(level)
        return Located(first, keys, levels, full)

    def map(self, sequence: Sequence) -> BlockMap:
        """The tier of each block of all tokens of ``sequence``, and whether other sequences hold it on the
        device too. O(blocks).

        Unlike `locate` it answers at any time, and also tells of blocks behind one that lies nowhere. A copy
        that is under way to the host tier counts as there.
        """
        size, length, pool = self._hasher.block_tokens, len(sequence.tokens), self._pool
        own, full, blocks = sequence.table.view.tolist(), length // size, -(-length // size)
        held = min(-(-sequence.computed // size), blocks)
        self.name(sequence, full)
        levels = [DEVICE] * held + self._tiers.levels(sequence.keys[held:full], pool.index.here, whole=True)
        levels += [0] * (blocks - len(levels))
        if blocks and not levels[-1]:
            start = (blocks - 1) * size
            _, levels[-1] = self._last(sequence, start, min(length, start + size - 1), HOST, SAVING, BELOW)
        found = [pool.index.block_of(key) for key in sequence.keys[len(own) :]]
        shared = [pool.references(block) > 1 for block in own]
        shared += [block is not None and pool.references(block) > 0 for block in found]
        tiers = [_TIERS.get(level & DEVICE or level, KVTier.NONE) for level in levels]
        pairs = zip(tiers, [*shared, False], strict=False)
        runs = [TierRun(tier, others, sum(1 for _ in run)) for (tier, others), run in groupby(pairs)]
        return BlockMap(length, size, runs)

    def _last(self, sequence: Sequence, start: int, end: int, *wanted: int) -> tuple[bytes, int]:
        """The key and the level of the longest partial block that ends at a position of ``(start, end]`` and
        has a record at one of the ``wanted`` levels; level 0: there is none."""
        for tail in (self.tail(sequence, at) for at in range(end, start, -1)):
            (level,) = self._tiers.levels((tail,), (), whole=True)
            if level in wanted:
                return tail, level
        return b"", 0

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
