"""Where a sequence's KV lies: on the device, in the host tier, on disk. Looks, and changes nothing but what
blocks are called. Knows keys; no references, no moves, and not what is done with what is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import filterfalse, takewhile

from ...kvstore.disk.client import DiskTier
from ...kvstore.keys import BlockHasher
from ...kvstore.prefix_index import PrefixIndex
from ..sequence import Sequence
from .transfers import Transfers


class Residency:
    """Finds blocks by keys of ``hasher`` under ``namespace``: in ``index`` on the device, below in ``moves``'
    tier and a disk.
    """

    def __init__(self, index: PrefixIndex, hasher: BlockHasher, namespace: bytes, moves: Transfers) -> None:
        self._index = index
        self._hasher = hasher
        self._namespace = namespace
        self._transfers = moves
        self._block_tokens = hasher.block_tokens

    def root(self, salt: bytes) -> bytes:
        """The key before a tenant's first block."""
        return self._hasher.root(self._namespace, salt)

    def below(self, sequence: Sequence) -> list[bytes]:
        """Keys of the records in the host tier that go on where the computed tokens end, a tail the last.

        As with `BlockManager.adopt` never up to the last token. Their bytes are not checked yet.
        """
        tier, size = self._transfers.tier, self._block_tokens
        most = len(sequence.tokens) - 1
        if (
            tier is None
            or not len(tier)
            or sequence.planned != sequence.computed
            or sequence.computed >= most
        ):
            return []
        own = sequence.computed // size
        self.name(sequence, most // size)
        keys = sequence.keys[own : most // size]
        found = keys[: len(self._transfers.found(keys))]
        if len(found) < len(keys) and self._transfers.fetching(keys[len(found)]):
            return found
        tail = next((key for key in self._tails(sequence, own + len(found)) if key in tier), None)
        return found if tail is None else [*found, tail]

    def on_disk(self, sequence: Sequence, disk: DiskTier) -> list[bytes]:
        """Keys of the records that go on where tokens are computed, and are neither on the device nor in the
        host tier, but on disk or on their way from it.
        """
        tier, size, most = self._transfers.tier, self._block_tokens, len(sequence.tokens) - 1
        if tier is None or sequence.planned != sequence.computed or sequence.computed >= most:
            return []
        found: list[bytes] = []
        at = sequence.computed // size
        self.name(sequence, most // size)
        here, on_device = tier.here, self._index.here
        for key in sequence.keys[at : most // size]:
            if key not in here and key not in on_device:
                if key in disk or disk.fetching(key):
                    found.append(key)
                elif not tier.sought(key):
                    break
            at += 1
        for tail in self._tails(sequence, at):
            if tail in tier:
                break
            if tail in disk or disk.fetching(tail):
                return [*found, tail]
        return found

    def to_restore(self, sequence: Sequence, disk: DiskTier) -> tuple[int, list[bool]]:
        """The first full block that the device lacks, and of each from there on that a tier below has whether
        it is only on disk.
        """
        size, most = self._block_tokens, (len(sequence.tokens) - 1) // self._block_tokens
        self.name(sequence, most)
        first = sequence.computed // size
        on_device, here = self._index.here, {} if self._transfers.tier is None else self._transfers.tier.here
        first += len(list(takewhile(on_device.__contains__, sequence.keys[first:most])))
        found: list[bool] = []
        for key in sequence.keys[first:most]:
            above = key in here
            if not above and key not in disk and not disk.fetching(key):
                break
            found.append(not above)
        return first, found

    def at_hand(self, sequence: Sequence, disk: DiskTier) -> list[bytes]:
        """Keys of the records that go on where the computed tokens end and can be copied to the device now,
        a tail the last; none where not one of them is on disk, so that `BlockManager.restore` does as well.
        """
        tier, size, most = self._transfers.tier, self._block_tokens, len(sequence.tokens) - 1
        if tier is None or sequence.planned != sequence.computed:
            return []
        own, full = sequence.computed // size, most // size
        self.name(sequence, full)
        lacking = next(filterfalse(tier.here.__contains__, sequence.keys[own:full]), None)
        if lacking is not None and lacking in disk and not disk.at_hand(lacking):
            return []  # the disk is to begin with it: no look at all that follows comes before that
        found = self.going_on(sequence, disk, disk.placed)
        first = next(filterfalse(tier.here.__contains__, found), None)
        return found if first is not None and (first == lacking or disk.at_hand(first)) else []

    def going_on(self, sequence: Sequence, disk: DiskTier, there: Callable[[bytes], bool]) -> list[bytes]:
        """Keys of the records that go on where the computed tokens end, not on the device, but in the host tier
        or ``there``; a tail the last.
        """
        tier, size, most = self._transfers.tier, self._block_tokens, len(sequence.tokens) - 1
        if tier is None or sequence.planned != sequence.computed or sequence.computed >= most:
            return []

        here, on_device = tier.here, self._index.here

        def within(key: bytes) -> bool:
            return (key in here or there(key)) and key not in on_device

        own, full = sequence.computed // size, most // size
        self.name(sequence, full)
        found = list(takewhile(within, sequence.keys[own:full]))
        at = own + len(found)
        if at == full or sequence.keys[at] not in disk:
            tail = next(filter(within, self._tails(sequence, at)), None)
            found += [] if tail is None else [tail]
        return found

    def _tails(self, sequence: Sequence, at: int) -> Iterator[bytes]:
        """Keys under which a partial block ``at`` of the sequence could be kept, the longest first."""
        size, most = self._block_tokens, len(sequence.tokens) - 1
        parent = sequence.keys[at - 1] if at else sequence.root
        for end in range(min(most, (at + 1) * size - 1), max(at * size, sequence.computed), -1):
            yield self._hasher.tail(parent, sequence.tokens.span(at * size, end))

    def tail(self, sequence: Sequence, end: int) -> bytes:
        """The key of the partial block of its tokens that ends at position ``end``."""
        full = end // self._block_tokens
        self.name(sequence, full)
        parent = sequence.keys[full - 1] if full else sequence.root
        return self._hasher.tail(parent, sequence.tokens.span(full * self._block_tokens, end))

    def name(self, sequence: Sequence, blocks: int) -> None:
        """Make the keys of the first ``blocks`` blocks, those that are not made yet."""
        done = len(sequence.keys)
        if done < blocks:
            parent = sequence.keys[-1] if done else sequence.root
            tokens = sequence.tokens.span(done * self._block_tokens, blocks * self._block_tokens)
            sequence.keys.extend(self._hasher.chain(parent, tokens))
