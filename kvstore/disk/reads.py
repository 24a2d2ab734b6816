"""Records on their way up from the shelf, asked for a piece at a time: each into a slot of the host tier, or
*bare*, into this machine's memory alone, where the engine reads them. Knows keys and slots; no sockets.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..host.tier import HostTier
from .messages import Fetch

PIECE_BYTES = 1 << 20  # of records that are asked for at once: while one comes the one before is taken up
MOST_IN_PIECE = 64


class PendingReads:
    """What is on its way into ``host``'s slots, or into memory."""

    def __init__(self, host: HostTier) -> None:
        self._host = host
        self._slots: dict[bytes, int] = {}
        self._bare: set[bytes] = set()
        self._unasked: tuple[list[bytes], list[bytes]] = [], []  # for slots, and bare
        self._most = max(1, min(MOST_IN_PIECE, PIECE_BYTES // host.memory.block_bytes))

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots or key in self._bare

    def has(self, key: bytes, *, bare: bool) -> bool:
        """Whether it comes in that way."""
        return key in self._bare if bare else key in self._slots

    @property
    def waiting(self) -> bool:
        """Whether some are not asked for yet."""
        return any(self._unasked)

    def add(self, key: bytes, tenant: int, *, bare: bool) -> bool:
        """Have it asked for with the next piece; False: there is no slot for it."""
        if bare:
            self._bare.add(key)
        else:
            slot = self._host.reserve(key, 0, tenant)
            if slot is None:
                return False
            self._slots[key] = slot
        self._unasked[bare].append(key)
        return True

    def pieces(self, *, full: bool) -> Iterator[tuple[list[int], list[bytes]]]:
        """What is to be asked for now, slots and keys; only ``full`` ones, or whatever there is."""
        for unasked in self._unasked:
            if len(unasked) >= self._most or (unasked and not full):
                keys = list(unasked)
                unasked.clear()
                yield ([] if unasked is self._unasked[True] else [self._slots[key] for key in keys]), keys

    def came(self, key: bytes, slot: int | None) -> None:
        """It is in its slot, or in memory; or will not be."""
        if slot is None:
            self._bare.discard(key)
        else:
            del self._slots[key]

    def give_up(self, request: Fetch) -> None:
        """Nobody will answer it: its slots are free again."""
        for key in request.keys if not request.slots else ():
            self._bare.discard(key)
        for key, slot in zip(request.keys, request.slots, strict=False):
            del self._slots[key]
            self._host.abandon(slot)

    def give_up_unasked(self) -> None:
        """What was not asked for will not be."""
        for slots, keys in self.pieces(full=False):
            self.give_up(Fetch(0, slots, keys))
