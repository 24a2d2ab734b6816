"""Where a sequence's KV lies: on the device, in the host tier, on disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

from ...kvstore.disk.client import DiskTier
from ...kvstore.host.tier import HostTier
from ...kvstore.keys import BlockHasher
from ...kvstore.prefix_index import PrefixIndex
from ..adapters import Adapter
from ..sequence import Sequence

DEVICE, HOST, DISK, SAVING = 1, 2, 4, 8
"""Flags for where a block's KV lies; one may lie on the device and in the host tier. DISK: on disk alone, or
being read from there. SAVING: its copy to the host tier is under way. Plain numbers: a long sequence asks for
thousands."""


@dataclass(frozen=True, slots=True)
class Located:
    """Where the blocks behind a sequence's computed tokens lie, up to the first that lies nowhere.

    ``first``: the number of the first of these blocks in the sequence. ``keys``, ``places``: of each, in
    order; a place is made of the flags DEVICE, HOST, DISK and SAVING. ``full``: how many of them are full;
    the one behind, if there is one, is a partial last block. The sequence's last token is in none of them:
    its logits are wanted, so that it is always computed.
    """

    first: int
    keys: list[bytes]
    places: list[int]
    full: int

    def in_host(self) -> list[bytes]:
        """Keys of the leading blocks that are in the host tier, up to the first that is not. Their bytes are
        not checked yet."""
        count = sum(1 for _ in takewhile(lambda place: place & HOST, self.places))
        return self.keys[:count]

    def on_disk(self) -> list[bytes]:
        """Keys of all blocks that are only on disk."""
        return [key for key, place in zip(self.keys, self.places, strict=True) if place == DISK]

    def readable(self, there: Callable[[bytes], bool]) -> list[bytes]:
        """Keys of the leading blocks that can be read to the device, up to the first that cannot: not on the
        device yet, and in the host tier or ``there``, which tells of a key whether its record can be read."""
        found = []
        for key, place in zip(self.keys, self.places, strict=True):
            if place & DEVICE or not (place & HOST or there(key)):
                break
            found.append(key)
        return found

    def to_restore(self) -> tuple[int, list[bool]]:
        """The number in the sequence of the first full block that is not on the device, and for each full one
        from there on whether it is only on disk."""
        above = sum(1 for _ in takewhile(lambda place: place & DEVICE, self.places[: self.full]))
        return self.first + above, [place == DISK for place in self.places[above : self.full]]


NOWHERE = Located(0, [], [], 0)


@dataclass(eq=False)
class Residency:
    """Finds where blocks lie by the keys that ``hasher`` makes under ``namespace``: on the device
    (``index``), in the host tier (``tier``) and on disk."""

    _index: PrefixIndex
    _hasher: BlockHasher
    _namespace: bytes
    _tier: HostTier | None
    _disk: DiskTier | None

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
        tier, size, most = self._tier, self._hasher.block_tokens, len(sequence.tokens) - 1
        if tier is None or not (len(tier) or self._disk):
            return NOWHERE
        if sequence.planned != sequence.computed or sequence.computed >= most:
            return NOWHERE
        first, end = sequence.computed // size, most // size
        self.name(sequence, end)
        on_device, in_host = self._index.here, tier.here
        keys = sequence.keys[first:end]
        places: list[int] = []
        for key in keys:
            place = (DEVICE if key in on_device else 0) | (HOST if key in in_host else 0)
            place = place or self._below_host(key) or (SAVING if tier.has_slot(key) else 0)
            if not place:
                break
            places.append(place)
        full = len(places)
        del keys[full:]
        at, most = (first + full) * size, min(most, (first + full + 1) * size - 1)
        for tail in (self.tail(sequence, end) for end in range(most, max(at, sequence.computed), -1)):
            place = HOST if tail in in_host else self._below_host(tail)
            if place:
                keys.append(tail)
                places.append(place)
                break
        return Located(first, keys, places, full)

    def places(self, sequence: Sequence) -> list[int]:
        """Where each block of the sequence's tokens lies: DEVICE, else HOST, else DISK; 0: nowhere. O(blocks).

        Unlike `locate` it answers at any time, and also tells of blocks behind one that lies nowhere. A copy
        that is under way to the host tier counts as HOST.
        """
        size, length = self._hasher.block_tokens, len(sequence.tokens)
        held, blocks = -(-sequence.computed // size), -(-length // size)
        self.name(sequence, length // size)
        places = [DEVICE] * min(held, blocks) + [
            self._place(key) for key in sequence.keys[held : length // size]
        ]
        places += [0] * (blocks - len(places))
        if blocks and not places[-1]:
            start = (blocks - 1) * size
            ends = range(min(length, start + size - 1), start, -1)
            places[-1] = next(filter(None, (self._place(self.tail(sequence, end)) for end in ends)), 0)
        return places

    def _place(self, key: bytes) -> int:
        """The fastest tier that has the record ``key``: DEVICE, HOST or DISK; 0: none."""
        if key in self._index.here:
            return DEVICE
        return HOST if self._tier is not None and self._tier.has_slot(key) else self._below_host(key)

    def _below_host(self, key: bytes) -> int:
        disk = self._disk
        return DISK if disk is not None and (key in disk or disk.fetching(key)) else 0

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
