"""Restores KV from disk: for turns that wait for it, and for idle sequences that are expected back.

A turn with KV on disk waits (`Status.RESTORING`) while others run. Its records come up in pieces, and those
that have come go to the device while the rest comes. There are two ways for the bytes. Through host slots: the
disk process fills them, and a plan loads them to the device; so a long sequence needs few slots. *Directly*,
where the device is this machine's memory: the disk process brings records into the page cache only, and one
copy takes them from there to the device. What is in the page cache already is read at once.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field

from ...kvstore.disk.client import DiskTier
from ...kvstore.host.tier import HostTier
from ..order.queues import Queues
from ..sequence import Sequence, Status
from .block_manager import BlockManager
from .costs import CostBook, blocks_to_compute

FETCH_SECONDS = 8.0  # a turn waits so long for the disk's next piece; then it is computed
FETCH_POLL_SECONDS = 0.0003  # between two looks at the disk while a sequence waits for its records
WINDOW_SHARE = 8  # one in so many of the host tier's slots may be on its way up for one sequence
AT_ONCE_BYTES = 64 << 20  # copied to the device between two steps: some 10 ms; and direct on its way at most
FETCHED_SHARE = 0.75  # of the slots may hold what has come for one and finds no room on the device


@dataclass(slots=True)
class _PendingRestore:
    """A restore from disk that is going on: records of a sequence on their way up, in order.

    ::

        [0, moved)        on the device
        [moved, arrived)  in the host tier, or in the page cache
        [arrived, asked)  on their way to the host tier or the page cache
        [asked, end)      on disk

    ``keys``: of the records, in the order of the drawing. ``tokens``: the sequence's number of tokens when its
    records were located. ``since``: when it began; ``last_arrival``: when the last piece came.
    ``compute_until``: the position up to which tokens are computed meanwhile, 0 for none. ``direct``: through
    the page cache, past the host tier. ``broken``: a record will not come.
    """

    sequence: Sequence
    tokens: int
    keys: list[bytes]
    since: float
    last_arrival: float
    compute_until: int = 0
    direct: bool = False
    moved: int = 0
    arrived: int = 0
    asked: int = 0
    broken: bool = False

    def goes_on(self, sequence: Sequence) -> bool:
        """Whether this restore can go on for ``sequence`` as it is now: for the same tokens, not broken, and
        with nothing computed meanwhile."""
        same = self.sequence is sequence and self.tokens == len(sequence.tokens)
        return same and not self.broken and not self.compute_until

    def stop(self) -> None:
        """Mark the restore as broken, because a record will not come, and forget the records that were not
        asked for yet, which are useless without it."""
        self.broken = True
        del self.keys[self.asked :]


@dataclass(eq=False)
class Restore:
    """Restores records of ``disk`` for the sequences of ``queues``.

    ``relieve``: given a number of blocks, a sequence and the time, makes that many blocks available for it by
    evicting idle KV. ``costs``: decide what is computed instead.
    """

    _queues: Queues
    _block_manager: BlockManager
    _relieve: Callable[[int, Sequence, float], None]
    _disk: DiskTier | None
    costs: CostBook
    _pending: dict[int, _PendingRestore] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._pending)

    def finds(self, sequence: Sequence) -> bool:
        """Whether the host tier or the disk holds KV that continues the sequence's computed tokens."""
        located = self._block_manager.residency.locate(sequence)
        return bool(located.in_host() or located.on_disk())

    def fetch(self, sequence: Sequence, now: float, *, direct: bool = True) -> bool:
        """Begin to restore a sequence's records from disk; returns whether it has to wait for them.

        A turn does not wait if computing is cheaper by the measured costs, nor if it is computed from its
        beginning up to the restored part while that comes. ``direct``: read directly from the page cache
        where that is possible.
        """
        disk, tier = self._disk, self._block_manager.transfers.tier
        if disk is None or tier is None or not len(disk):
            return False
        began = self._pending.get(sequence.id)
        if disk.reads_directly and (began is None or began.sequence is not sequence):
            before = disk.reading_seconds
            self._read(sequence, disk, tier, disk.readable, now)
            sequence.from_tiers.seconds += disk.reading_seconds - before
        meets, skipped = self._meeting(sequence)
        direct &= disk.reads_directly and not meets
        whole = not skipped and not meets
        if began is not None and began.goes_on(sequence) and began.direct <= direct and whole:
            return True
        keys = self._block_manager.residency.locate(sequence).on_disk()[skipped:]
        if keys:  # its own beginning must not be evicted for the rest
            self._block_manager.transfers.touch(sequence.keys)
        same = began is not None and began.sequence is sequence and began.direct == direct
        since = began.since if same and began is not None else now
        pending = _PendingRestore(sequence, len(sequence.tokens), keys, since, now, meets, direct)
        self._ask(pending, disk, tier, now)
        if not pending.asked:
            return False
        sequence.from_tiers.from_disk.update(keys)
        self._pending[sequence.id] = pending
        if meets:
            sequence.from_tiers.compute_until = meets
        return not meets

    def line_up(self, sequence: Sequence, now: float) -> None:
        """Put a sequence with a new turn into the queue for admission; or among the restoring ones, if it has
        to wait for KV on disk."""
        self._queues.restore(sequence)
        scores = sequence.turn is not None and sequence.turn.to_score  # all of its prompt is computed
        if scores or not self.fetch(sequence, now):
            self._queues.enqueue(sequence)

    def _meeting(self, sequence: Sequence) -> tuple[int, int]:
        """What of a turn's KV to compute rather than restore, by the measured costs. Returns the position up
        to which it is computed while the disk brings the rest, 0 for none; and how many of its records on
        disk lie before that, which are not fetched."""
        costs, tier = self.costs.costs(), self._block_manager.transfers.tier
        if costs is None or sequence.turn is None or tier is None or sequence.planned != sequence.computed:
            return 0, 0
        first, on_disk = self._block_manager.residency.locate(sequence).to_restore()
        size, beside = self._block_manager.block_tokens, self.costs.beside
        block_bytes = tier.memory.block_bytes
        count = blocks_to_compute(costs, first * size, on_disk, size, block_bytes, beside=beside)
        sequence.from_tiers.chosen = count * size
        if any(on_disk[:count]) and not (beside and any(on_disk[count:])):
            self.costs.passed_over()
        if count == len(on_disk):  # all is computed; or nothing full is there, and a tail is not worth it
            return 0, len(sequence.keys) + 1 if count else 0
        return (first + count) * size if count else 0, sum(on_disk[:count])

    def stage(self, sequence: Sequence, now: float) -> None:
        """Restore an idle sequence that is expected back. If its records are on disk, it is
        ``Status.STAGED`` meanwhile."""
        if self.fetch(sequence, now):
            self._queues.stage(sequence)

    def due(self) -> float | None:
        """Seconds until `tick` may have something to do; None: never."""
        waits = self._pending and self._disk is not None and self._disk.ready
        return FETCH_POLL_SECONDS if waits else None

    def statistics(self) -> dict[str, float]:
        """How many sequences are being restored from disk now; empty without a disk."""
        return {} if self._disk is None else {"fetching": len(self)}

    def tick(self, now: float) -> None:
        """Count the records that the disk has brought, have them copied to the device, ask for more, and
        queue the turns that need not wait any longer."""
        if self._disk is not None:
            for pending in list(self._pending.values()):
                self._advance(pending, self._disk, now)

    def awaits(self, sequence: Sequence) -> bool:
        """Whether a restore from disk is going on for the sequence."""
        pending = self._pending.get(sequence.id)
        return pending is not None and pending.sequence is sequence

    def _read(
        self, sequence: Sequence, disk: DiskTier, tier: HostTier, there: Callable[[bytes], bool], now: float
    ) -> list[bytes]:
        """Read records that lie in this machine's memory to the device, now, which requires that no step is
        in flight. Returns the keys of those that are on the device now.

        It reads the records that follow the computed tokens: in the host tier, or on disk and ``there``
        (tells of a key whether its record can be read). At most `AT_ONCE_BYTES`, and as many as find blocks.
        If none of them is on disk, it does nothing: a plan loads what is in the host tier.
        """
        sequence.count_found(self._block_manager.adopt(sequence))
        keys = self._block_manager.residency.locate(sequence).readable(there)
        first = next((key for key in keys if key not in tier), None)
        if first is None or not disk.in_page_cache(first):
            return []
        del keys[max(1, AT_ONCE_BYTES // tier.memory.block_bytes) :]
        if len(keys) > self._block_manager.pool.available:
            self._relieve(len(keys), sequence, now)
        sequence.from_tiers.from_disk.update(key for key in keys if key not in tier)
        own = sequence.computed // self._block_manager.block_tokens
        restored = self._block_manager.read_up(sequence, keys, disk)
        return keys[: len(sequence.table) - own] if restored else []

    def _ask(self, pending: _PendingRestore, disk: DiskTier, tier: HostTier, now: float) -> None:
        """Ask the disk for the next records of a restore: as many as its share of the host slots, or one
        direct copy, holds."""
        window = pending.arrived + max(tier.free, tier.memory.slots // WINDOW_SHARE, 1)
        most = pending.moved + max(1, int(tier.memory.slots * FETCHED_SHARE))
        if pending.direct:
            window = most = pending.moved + max(1, AT_ONCE_BYTES // tier.memory.block_bytes)
        tenant, fetch = pending.sequence.tenant, self._block_manager.transfers.fetch
        for key in pending.keys[pending.asked : min(window, most)]:
            above = self._is_above(key, tier)
            if not above and not fetch(key, now, tenant, direct=pending.direct):
                if key not in disk:
                    pending.stop()
                return
            pending.asked += 1

    def _advance(self, pending: _PendingRestore, disk: DiskTier, now: float) -> None:
        """Take a restore further: count the records that have come, have them copied to the device, and ask
        for more or finish."""
        tier = self._block_manager.transfers.tier
        assert tier is not None
        before = pending.arrived
        self._count_arrived(pending, disk, tier)
        if pending.arrived > before:
            pending.last_arrival = now
        to_read = pending.direct and pending.arrived > pending.moved
        if not self._wanted(pending.sequence):
            pending.stop()
            pending.sequence.from_tiers.compute_until = None
        elif to_read and not self._read_arrived(pending, disk, tier, now):
            return self._fetch_into_slots(pending, now)
        if not pending.broken and now <= pending.last_arrival + FETCH_SECONDS:
            self._ask(pending, disk, tier, now)
        until = pending.sequence.from_tiers.compute_until
        met = until is None or pending.sequence.computed >= until  # computed up to what is restored
        if met and pending.arrived > pending.moved:
            pending.sequence.look_up()
        over = pending.arrived == len(pending.keys) and met
        if over or now > pending.last_arrival + FETCH_SECONDS:
            self._arrived(pending, tier, now)
        return None

    def _read_arrived(self, pending: _PendingRestore, disk: DiskTier, tier: HostTier, now: float) -> bool:
        """Read the records of a direct restore that have come to the page cache to the device; returns
        whether all of them are there.

        They are not where blocks are short, or where a record has left the page cache again or is damaged.
        """
        sequence, came = pending.sequence, set(pending.keys[pending.moved : pending.arrived])
        went: set[bytes] = set()
        while came - went:
            read = self._read(sequence, disk, tier, came.__contains__, now)
            if not read:
                break
            went.update(read)
        if sequence.turn is None:
            self._queues.idle.put(sequence)
        self._pass_moved(pending, went)
        return pending.moved == pending.arrived

    def _fetch_into_slots(self, began: _PendingRestore, now: float) -> None:
        """Begin a direct restore again through host slots, for what could not be read directly."""
        sequence = began.sequence
        sequence.from_tiers.seconds += now - began.since
        if not self.fetch(sequence, now, direct=False):
            if self._pending[sequence.id] is began:
                del self._pending[sequence.id]
            self._finish(sequence, now)

    def _count_arrived(self, pending: _PendingRestore, disk: DiskTier, tier: HostTier) -> None:
        keys = pending.keys
        while pending.arrived < pending.asked and not disk.fetching(keys[pending.arrived]):
            key = keys[pending.arrived]
            if not pending.broken and not pending.direct and not self._is_above(key, tier):
                pending.stop()
            pending.arrived += 1
        self._pass_moved(pending)

    def _pass_moved(self, pending: _PendingRestore, went: Container[bytes] = ()) -> None:
        """Raise the restore's ``moved`` past the records that are on the device. ``went``: keys that were
        brought there; they count even if they were evicted since."""
        on_device, keys = self._block_manager.pool.index.block_of, pending.keys
        while pending.moved < pending.arrived:
            key = keys[pending.moved]
            if key not in went and on_device(key) is None:
                break
            pending.moved += 1

    def _is_above(self, key: bytes, tier: HostTier) -> bool:
        return key in tier or self._block_manager.pool.index.block_of(key) is not None

    def _wanted(self, sequence: Sequence) -> bool:
        """Whether a restore of the sequence is still of use: the sequence waits for it, or is computed up to
        the restored part.

        It waits no more once it is stopped or closed, or its KV is taken for another.
        """
        if sequence.status in (Status.RESTORING, Status.STAGED):
            return True
        return sequence.status is not Status.CLOSED and sequence.from_tiers.compute_until is not None

    def _arrived(self, pending: _PendingRestore, tier: HostTier, now: float) -> None:
        sequence = pending.sequence
        del self._pending[sequence.id]
        sequence.from_tiers.compute_until = None
        whole = pending.arrived == len(pending.keys) and not pending.broken
        if whole and (self.costs.beside or not pending.compute_until):
            self.costs.fetched(
                len(pending.keys) * tier.memory.block_bytes, pending.last_arrival - pending.since
            )
        if sequence.status is not Status.CLOSED:
            sequence.from_tiers.seconds += now - pending.since
            self._finish(sequence, now)

    def _finish(self, sequence: Sequence, now: float) -> None:
        """End the sequence's wait for the disk: put its turn into the queue for admission, or an idle one
        back among the idle sequences. What has come up is looked up before its next step."""
        sequence.look_up()
        if sequence.status is Status.RESTORING:
            self._queues.enqueue(sequence)
        elif sequence.turn is None:
            self._queues.arrived(sequence, now)
