"""When KV goes to disk and when it comes back: policy between sequences and the disk tier.

Down, a few records at a time: those of a turn that ended `IDLE_SECONDS` ago while the disk has room, of a
sequence that is closed, and those the host tier would give up next once it is nearly full, but for what the
device has as well: so that full tiers do not hold the same. Up: a turn whose KV is on disk stands in the
roster as *fetching* while others run; its records come through the host tier piece by piece, and what has come
goes to the device while the rest comes, so that a long sequence needs few slots there. When all have come, or
will not, it waits for admission like any other. A sequence without a turn is fetched for the same way, at the
first sign of its return. Where the device is this machine, what lies in its memory anyway is copied at once,
and waits for nobody. Without a disk every verb does nothing. The clock is the caller's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import islice

from ..kvstore.host import HostTier
from ..kvstore.shelf.client import DiskTier
from .costs import CostBook
from .counters import Counters
from .paging import Paging
from .pressure import Pressure
from .restoring import Held, blocks_to_compute
from .roster import Roster
from .sequence import Sequence

IDLE_SECONDS = 2.0
FETCH_SECONDS = 8.0  # a turn waits so long for the disk's next piece, then it is computed
POLL_SECONDS = 0.002
FETCH_POLL_SECONDS = 0.0003  # while a sequence waits for its records
ABSENT_SECONDS = 0.1  # between two looks for a new shelf
PRESSED = 8  # the host tier is nearly full with less than one part in so many free
LEAVING_SHARE = 4  # of the host tier's records so many are on disk before their turn to go comes
MOST_LEAVING = 1024
WINDOW_SHARE = 8  # of the host tier's slots one in so many may be on its way up for one sequence
AT_ONCE_BYTES = 64 << 20  # copied to the device between two steps: some 10 ms
FETCHED_SHARE = 0.75  # of the slots may hold what has come for one and finds no room on the device


@dataclass(slots=True)
class _Awaited:
    """Records of a sequence on their way up, in order.

    ::

        [0, moved)        on the device
        [moved, arrived)  in the host tier
        [arrived, asked)  on their way there
        [asked, end)      on disk

    ``since``: when it began; ``stirred``: when the last piece came. ``meets``: computed up to there meanwhile.
    ``tokens``: the sequence's when its records were looked for.
    """

    sequence: Sequence
    tokens: int
    keys: list[bytes]
    since: float
    stirred: float
    meets: int = 0
    moved: int = 0
    arrived: int = 0
    asked: int = 0
    broken: bool = False

    def goes_on(self, sequence: Sequence) -> bool:
        """Whether all that could be looked for is on its way."""
        same = self.sequence is sequence and self.tokens == len(sequence.tokens)
        return same and not self.broken and not self.meets

    def cut(self) -> None:
        """One of them will not come: what follows it is of no use."""
        self.broken = True
        del self.keys[self.asked :]


class Shelving:
    """Moves records between ``paging``'s host tier and ``disk``."""

    def __init__(
        self,
        roster: Roster,
        paging: Paging,
        pressure: Pressure,
        counters: Counters,
        disk: DiskTier | None,
        costs: CostBook | None = None,
    ) -> None:
        self.disk = disk
        self.costs = costs or CostBook(None)
        self.now = 0.0
        self._roster = roster
        self._paging = paging
        self._pressure = pressure
        self._counters = counters
        self._awaited: dict[int, _Awaited] = {}
        self._idle: OrderedDict[int, tuple[Sequence, float]] = OrderedDict()
        self._queue: OrderedDict[bytes, None] = OrderedDict()
        self._next: dict[bytes, None] = {}  # what the host tier gives up next, when last looked
        self._looked = -1  # how often the host tier had been used then, and nothing was to be stored
        if disk is not None and paging.moves.tier is not None:
            paging.moves.tier.gives_up = self._left

    # --- up ---------------------------------------------------------------------------------------------

    def fetch(self, sequence: Sequence) -> bool:
        """Have what the disk holds of a sequence brought up; whether it has to wait for that.

        A turn need not wait where it is computed instead, by measured costs, or computed from its beginning to
        where it meets what is on its way.
        """
        disk, tier = self.disk, self._paging.moves.tier
        if disk is None or tier is None or not len(disk):
            return False
        began = self._awaited.get(sequence.id)
        if disk.reaches and (began is None or began.sequence is not sequence):
            self._read_up(sequence, disk, tier)
        meets, skipped = self._meeting(sequence, disk)
        if began is not None and began.goes_on(sequence) and not skipped and not meets:
            return True
        keys = self._paging.on_disk(sequence, disk)[skipped:]
        if keys:  # what comes up must not take the places of its own beginning
            self._paging.moves.touch(sequence.keys)
        since = began.since if began is not None and began.sequence is sequence else self.now
        awaited = _Awaited(sequence, len(sequence.tokens), keys, since, self.now, meets)
        self._ask(awaited, disk, tier)
        if not awaited.asked:
            return False
        sequence.from_disk.update(keys)
        self._awaited[sequence.id] = awaited
        if meets:
            sequence.meets = meets
        return not meets

    def line_up(self, sequence: Sequence) -> None:
        """A turn takes its place among the others, or does so when its KV has come up."""
        self._roster.taken(sequence)
        self._roster.fetching[sequence.id] = sequence
        if not self.fetch(sequence):
            del self._roster.fetching[sequence.id]
            self._roster.enqueue(sequence)

    def _read_up(self, sequence: Sequence, disk: DiskTier, tier: HostTier) -> None:
        """What lies in this machine's memory anyway goes to a device that is this machine, at once.

        Nothing is sooner computed than that. So much at a time as nobody else notices; what is left comes by
        way of the shelf.
        """
        adopted = self._paging.adopt(sequence)
        self._counters.adopted += adopted
        sequence.found(adopted)
        keys = self._paging.at_hand(sequence, disk)
        if not keys:
            return
        del keys[max(1, AT_ONCE_BYTES // tier.memory.block_bytes) :]
        if len(keys) > self._paging.pool.available:
            self._pressure.relieve(len(keys), sequence)
        sequence.from_disk.update(key for key in keys if key not in tier)
        before = disk.reading_seconds
        self._counters.restored += self._paging.read_up(sequence, keys, disk)
        sequence.restore_seconds += disk.reading_seconds - before

    def _meeting(self, sequence: Sequence, disk: DiskTier) -> tuple[int, int]:
        """Up to which position a turn is computed meanwhile, 0 for none; and records on disk before it."""
        costs, tier = self.costs.costs(), self._paging.moves.tier
        if costs is None or sequence.turn is None or tier is None or sequence.planned != sequence.computed:
            return 0, 0
        first, on_disk = self._paging.to_restore(sequence, disk)
        size = self._paging.block_tokens
        held = Held(first * size, tuple(on_disk), size, tier.memory.block_bytes)
        count = blocks_to_compute(held, costs)
        sequence.chosen = count * size
        if any(on_disk[:count]) and not (costs.beside and any(on_disk[count:])):
            self.costs.passed_over()
        if count == len(
            on_disk
        ):  # all of it is computed; or nothing full is there, and a tail is not worth it
            return 0, len(sequence.keys) + 1 if count else 0
        return (first + count) * size if count else 0, sum(on_disk[:count])

    def stage(self, sequence: Sequence) -> None:
        """An idle sequence will be wanted: bring it up, or as far as the host tier first."""
        if self.fetch(sequence):
            self._roster.prefill.pop(sequence.id, None)
            self._roster.staged[sequence.id] = sequence

    def awaits(self, sequence: Sequence) -> bool:
        """Whether anything is on its way up for it."""
        awaited = self._awaited.get(sequence.id)
        return awaited is not None and awaited.sequence is sequence

    # --- down -------------------------------------------------------------------------------------------

    def rest(self, sequence: Sequence) -> None:
        """A turn is over: in a while it goes to disk."""
        if self.disk is not None:
            self._idle[sequence.id] = sequence, self.now
            self._idle.move_to_end(sequence.id)

    def retire(self, sequence: Sequence) -> None:
        """Nobody holds the sequence any more: to disk while there is room; it is the first to give way."""
        if self.disk is None or not self.disk.full:
            self.leave(sequence)
        self._idle.pop(sequence.id, None)
        self._paging.retire(sequence)

    def leave(self, sequence: Sequence) -> None:
        """It is wanted on disk: it goes there now."""
        self._idle.pop(sequence.id, None)
        if self.disk is not None:
            self._enqueue(sequence.names())

    def send(self, keys: Iterable[bytes]) -> None:
        """These go to disk now, those that wait already in their order."""
        self._enqueue(keys)

    def flush(self) -> None:
        """All that the host tier has goes to disk, the longest unused last."""
        tier = self._paging.moves.tier
        if self.disk is not None and tier is not None:
            self._enqueue(reversed(tier.oldest(len(tier))))

    def close(self) -> None:
        """Let the disk go, and keep what was learned of it."""
        self.costs.save()
        if self.disk is not None:
            self.disk.close()

    # --- time -------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Take the disk's answers, let go on who waited for them, send down what is due."""
        self.now = now
        if self.disk is None:
            return
        self.disk.poll(now)
        for awaited in list(self._awaited.values()):
            self._advance(awaited, self.disk)
        while self._idle:
            sequence, since = next(iter(self._idle.values()))
            if now < since + IDLE_SECONDS:
                break
            del self._idle[sequence.id]
            if sequence.turn is None and not self.disk.full:
                self._enqueue(sequence.names())
        self._send_down(self.disk)

    def due(self) -> float | None:
        """Seconds until `tick` has something to do if nothing else happens; None: never."""
        if self.disk is None:
            return None
        if not self.disk.ready:
            return ABSENT_SECONDS
        if self._awaited:
            return FETCH_POLL_SECONDS
        if self.disk.waiting or self._queue:
            return POLL_SECONDS
        if self._idle:
            _, since = next(iter(self._idle.values()))
            return max(POLL_SECONDS, since + IDLE_SECONDS - self.now)
        return None

    @property
    def busy(self) -> bool:
        """Whether records are on their way down, or wait for it."""
        return self.disk is not None and self.disk.ready and (self.disk.waiting or bool(self._queue))

    def statistics(self) -> dict[str, float]:
        """The disk's gauges and counters, and what waits; empty without a disk."""
        if self.disk is None:
            return {}
        disk = {f"disk_{name}": value for name, value in asdict(self.disk.statistics()).items()}
        return {**disk, "disk_queue": len(self._queue), "fetching": len(self._awaited)}

    # --- inside -----------------------------------------------------------------------------------------

    def _ask(self, awaited: _Awaited, disk: DiskTier, tier: HostTier) -> None:
        """Ask for the next records: as many as may give up their slots for these."""
        window = awaited.arrived + max(tier.free, tier.memory.slots // WINDOW_SHARE, 1)
        most = awaited.moved + max(1, int(tier.memory.slots * FETCHED_SHARE))
        for key in awaited.keys[awaited.asked : min(window, most)]:
            if not self._is_above(key, tier) and not disk.fetch(key, self.now, awaited.sequence.tenant):
                if key not in disk:
                    awaited.cut()
                return
            awaited.asked += 1

    def _advance(self, awaited: _Awaited, disk: DiskTier) -> None:
        """See what has come; have it taken to the device, and ask for more, or be done."""
        tier = self._paging.moves.tier
        assert tier is not None
        before = awaited.arrived
        self._count(awaited, disk, tier)
        if awaited.arrived > before:
            awaited.stirred = self.now
        if not self._wanted(awaited.sequence):
            awaited.cut()
            awaited.sequence.meets = None
        if not awaited.broken and self.now <= awaited.stirred + FETCH_SECONDS:
            self._ask(awaited, disk, tier)
        met = self._met(awaited)
        if met and awaited.arrived > awaited.moved:
            awaited.sequence.unmatched = True
        over = awaited.arrived == len(awaited.keys) and met
        if over or self.now > awaited.stirred + FETCH_SECONDS:
            self._arrived(awaited, tier)

    def _count(self, awaited: _Awaited, disk: DiskTier, tier: HostTier) -> None:
        keys, on_device = awaited.keys, self._paging.pool.index.block_of
        while awaited.arrived < awaited.asked and not disk.fetching(keys[awaited.arrived]):
            key = keys[awaited.arrived]
            if not awaited.broken and not self._is_above(key, tier):
                awaited.cut()
            awaited.arrived += 1
        while awaited.moved < awaited.arrived and on_device(keys[awaited.moved]) is not None:
            awaited.moved += 1

    def _is_above(self, key: bytes, tier: HostTier) -> bool:
        return key in tier or self._paging.pool.index.block_of(key) is not None

    def _wanted(self, sequence: Sequence) -> bool:
        """Whether it still waits: it was not stopped, closed, or taken for another."""
        roster = self._roster
        waits = roster.fetching.get(sequence.id) is sequence or roster.staged.get(sequence.id) is sequence
        meets = sequence.meets is not None and roster.sequences.get(sequence.id) is sequence
        return waits or meets

    def _met(self, awaited: _Awaited) -> bool:
        """Whether the turn has been computed up to what was fetched, or never will be."""
        sequence = awaited.sequence
        return sequence.meets is None or sequence.computed >= sequence.meets

    def _arrived(self, awaited: _Awaited, tier: HostTier) -> None:
        sequence = awaited.sequence
        del self._awaited[sequence.id]
        sequence.meets = None
        whole = awaited.arrived == len(awaited.keys) and not awaited.broken
        if whole and (self.costs.beside or not awaited.meets):
            self.costs.fetched(len(awaited.keys) * tier.memory.block_bytes, awaited.stirred - awaited.since)
        if self._roster.sequences.get(sequence.id) is not sequence:
            return
        sequence.unmatched = True
        sequence.restore_seconds += self.now - awaited.since
        if self._roster.fetching.pop(sequence.id, None) is not None:
            self._roster.enqueue(sequence)
        elif sequence.turn is None:
            self._roster.staged.pop(sequence.id, None)
            self._roster.touch(sequence)

    def _enqueue(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if self.disk is not None and not self.disk.stored(key):
                self._queue[key] = None

    def _leaving(self, tier: HostTier, disk: DiskTier) -> list[bytes]:
        """What the host tier would give up next and nobody else has: a share of it, ahead of the need."""
        on_device = self._paging.pool.index.block_of
        most = min(MOST_LEAVING, max(disk.room, tier.memory.slots // LEAVING_SHARE))
        alone = (key for key in tier.in_order() if on_device(key) is None and not tier.yields(key))
        before, leaving = self._next, dict.fromkeys(islice(alone, most))
        for key in before:
            if key not in leaving and self._is_above(key, tier):
                disk.give_way(key)
        for key in leaving:
            if key not in before:
                disk.touch(key)
        self._next = leaving
        return [key for key in leaving if not disk.stored(key)][: disk.room]

    def _left(self, key: bytes) -> None:
        """The host tier gives it up: on disk it counts as used when that was foreseen, else now."""
        if self.disk is not None and key not in self._next:
            self.disk.touch(key)

    def _send_down(self, disk: DiskTier) -> None:
        tier = self._paging.moves.tier
        if tier is not None and not self._queue and tier.free * PRESSED < tier.memory.slots:
            if self._looked != tier.uses:
                self._enqueue(self._leaving(tier, disk))
            if not self._queue:
                self._looked = tier.uses
        unsaved: list[bytes] = []
        while self._queue and disk.room > 0:
            key, _ = self._queue.popitem(last=False)
            if not disk.store(key, self.now) and self._paging.moves.saving(key):
                unsaved.append(key)
        self._queue.update(dict.fromkeys(unsaved))
