"""Decides when KV goes to disk. `restore` brings it back.

Records go down a few at a time: those of a turn that ended `IDLE_SECONDS` ago, while the disk has room; those
of a closed sequence; and those that a nearly full host tier evicts next and the device does not have, so that
full tiers do not hold the same. Without a disk every method does nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...kvstore.disk.client import DiskTier
from ..sequence import Sequence
from .block_manager import BlockManager
from .costs import CostBook

IDLE_SECONDS = 2.0
POLL_SECONDS = 0.002
ABSENT_SECONDS = 0.1  # between two looks for a new disk process
PRESSED = 8  # the host tier is nearly full with less than one slot in so many free
LEAVING_SHARE = 4  # one in so many of a tenant's records in the host tier is on disk before it is evicted
MOST_LEAVING = 1024
FORESEEN_AT_ONCE = 64  # records that one tick looks at


@dataclass(eq=False)
class Offload:
    """Sends records from the host tier to ``disk`` (None: there is no disk tier). Writes ``costs`` to their
    file when the engine ends."""

    _block_manager: BlockManager
    disk: DiskTier | None
    _costs: CostBook | None
    _idle: OrderedDict[int, tuple[Sequence, float]] = field(default_factory=OrderedDict)
    _queue: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    _leaving: OrderedDict[bytes, None] = field(
        default_factory=OrderedDict
    )  # to store before they are evicted

    def rest(self, sequence: Sequence, now: float) -> None:
        """Note that a turn of the sequence ended: `tick` queues its records for the disk after
        `IDLE_SECONDS`, if no other turn has begun by then."""
        if self.disk is not None:
            self._idle[sequence.id] = sequence, now
            self._idle.move_to_end(sequence.id)

    def retire(self, sequence: Sequence) -> None:
        """Note that the sequence is closed: queue its records for the disk, unless the disk is full, and let
        all tiers evict its KV first."""
        if self.disk is None or not self.disk.full:
            self.leave(sequence)
        self._idle.pop(sequence.id, None)
        self._block_manager.retire(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Queue the records of the sequence's KV for the disk now, without waiting `IDLE_SECONDS`."""
        self._idle.pop(sequence.id, None)
        self.send(sequence.names())

    def send(self, keys: Iterable[bytes]) -> None:
        """Queue the records with these keys for the disk; `tick` sends them. Those that are on disk are left
        out; those that are queued already keep their place."""
        for key in keys:
            if self.disk is not None and not self.disk.stored(key):
                self._queue[key] = None

    def flush(self) -> None:
        """Queue all records of the host tier for the disk, those first that the host tier would evict last."""
        tier = self._block_manager.transfers.tier
        if self.disk is not None and tier is not None:
            self.send(reversed(list(tier.in_order())))

    def close(self) -> None:
        """Write the measured costs to their file, and close the connection to the disk process."""
        if self._costs is not None:
            self._costs.save()
        if self.disk is not None:
            self.disk.close()

    def poll(self, now: float) -> None:
        """Take in what the disk process has answered since the last call."""
        if self.disk is not None:
            self.disk.poll(now)

    def tick(self, now: float) -> None:
        """Send queued records from the host tier to the disk process, as many as it takes now. Before that,
        queue those of sequences that have been idle for `IDLE_SECONDS`, and, if the host tier is nearly full,
        those that it evicts next."""
        if self.disk is None:
            return
        while self._idle:
            sequence, since = next(iter(self._idle.values()))
            if now < since + IDLE_SECONDS:
                break
            del self._idle[sequence.id]
            if sequence.turn is None and not self.disk.full:
                self.send(sequence.names())
        self._send_down(self.disk, now)

    def due(self, now: float) -> float | None:
        """Seconds until `tick` has something to do if nothing else happens; None: never."""
        if self.disk is None:
            return None
        if not self.disk.ready:
            return ABSENT_SECONDS
        if self.disk.waiting or self._queue or self._leaving:
            return POLL_SECONDS
        if self._idle:
            _, since = next(iter(self._idle.values()))
            return max(POLL_SECONDS, since + IDLE_SECONDS - now)
        return None

    @property
    def busy(self) -> bool:
        """Whether there is a disk process, and either it owes answers or records wait to be sent to it."""
        waits = bool(self._queue or self._leaving)
        return self.disk is not None and self.disk.ready and (self.disk.waiting or waits)

    def statistics(self) -> dict[str, float]:
        """The statistics of the disk tier (`DiskTier.statistics`), and how many records wait to be sent to it;
        empty without a disk."""
        if self.disk is None:
            return {}
        disk = {f"disk_{name}": value for name, value in self.disk.statistics().items()}
        return {**disk, "disk_queue": len(self._queue) + len(self._leaving)}

    def _send_down(self, disk: DiskTier, now: float) -> None:
        transfers = self._block_manager.transfers
        tier, refused = transfers.tier, disk.take_refused()
        if tier is not None and tier.free * PRESSED < tier.memory.slots:
            came, gone = transfers.foresee_evictions(LEAVING_SHARE, MOST_LEAVING, FORESEEN_AT_ONCE)
            for key in gone:
                self._leaving.pop(key, None)
            coming = (*filter(transfers.foresees, refused), *came)
            self._leaving.update(dict.fromkeys(key for key in coming if not disk.stored(key)))
        unsaved: list[bytes] = []
        while self._queue and disk.room > 0:
            key, _ = self._queue.popitem(last=False)
            if not disk.store(key, now) and transfers.saving(key):
                unsaved.append(key)
        self._queue.update(dict.fromkeys(unsaved))
        while self._leaving and disk.room > 0:
            disk.store(self._leaving.popitem(last=False)[0], now)
