"""When KV goes to disk and when it comes back: policy between sequences and the disk tier.

Down, a few records at a time: those of a turn that ended `IDLE_SECONDS` ago, of a sequence that is closed, and
those the host tier would give up next once it is nearly full. Up: a turn whose KV is on disk stands in the
roster as *fetching*, holding no block, while others run; when its records are in the host tier, or will not
come, it waits for admission like any other. A sequence without a turn is fetched for the same way, at the
first sign of its return. Without a disk every verb does nothing. The clock is the caller's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from ..kvstore.shelf.client import DiskTier
from .paging import Paging
from .roster import Roster
from .sequence import Sequence

IDLE_SECONDS = 2.0
FETCH_SECONDS = 8.0  # a turn waits so long for the disk, then it is computed
POLL_SECONDS = 0.002
ABSENT_SECONDS = 0.1  # between two looks for a new shelf
PRESSED = 8  # the host tier is nearly full with less than one part in so many free
FETCHED_SHARE = 4  # records of one part in so many of the host tier may be on their way up for one sequence


@dataclass(frozen=True, slots=True)
class _Awaited:
    sequence: Sequence
    keys: list[bytes]
    since: float


class Shelving:
    """Moves records between ``paging``'s host tier and ``disk``."""

    def __init__(self, roster: Roster, paging: Paging, disk: DiskTier | None) -> None:
        self.disk = disk
        self.now = 0.0
        self._roster = roster
        self._paging = paging
        self._awaited: dict[int, _Awaited] = {}
        self._idle: OrderedDict[int, tuple[Sequence, float]] = OrderedDict()
        self._queue: OrderedDict[bytes, None] = OrderedDict()

    # --- up ---------------------------------------------------------------------------------------------

    def fetch(self, sequence: Sequence) -> bool:
        """Have what the disk holds of a sequence brought to the host tier; whether anything is on its way.

        Meanwhile the sequence holds no blocks.
        """
        disk, tier = self.disk, self._paging.moves.tier
        if disk is None or tier is None or not len(disk):
            return False
        most = max(1, tier.memory.slots // FETCHED_SHARE)
        keys = self._paging.on_disk(sequence, disk)[:most]
        keys = [key for key in keys if disk.fetch(key, self.now)]
        if not keys:
            return False
        sequence.from_disk.update(keys)
        began = self._awaited.get(sequence.id)
        since = began.since if began is not None and began.sequence is sequence else self.now
        self._awaited[sequence.id] = _Awaited(sequence, keys, since)
        self._paging.surrender(sequence)
        return True

    def stage(self, sequence: Sequence) -> None:
        """An idle sequence will be wanted: bring it up, or as far as the host tier first."""
        if self.fetch(sequence):
            self._roster.taken(sequence)

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

    def leave(self, sequence: Sequence) -> None:
        """Nobody holds the sequence any more, or wants it kept on disk: it goes there now."""
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
        """Let the disk go."""
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
            if now > awaited.since + FETCH_SECONDS or not any(map(self.disk.fetching, awaited.keys)):
                self._arrived(awaited)
        while self._idle:
            sequence, since = next(iter(self._idle.values()))
            if now < since + IDLE_SECONDS:
                break
            del self._idle[sequence.id]
            if sequence.turn is None:
                self._enqueue(sequence.names())
        self._send_down(self.disk)

    def due(self) -> float | None:
        """Seconds until `tick` has something to do if nothing else happens; None: never."""
        if self.disk is None:
            return None
        if not self.disk.ready:
            return ABSENT_SECONDS
        if self.disk.waiting or self._awaited or self._queue:
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

    def _arrived(self, awaited: _Awaited) -> None:
        sequence = awaited.sequence
        del self._awaited[sequence.id]
        if self._roster.sequences.get(sequence.id) is not sequence:
            return
        sequence.unmatched = True
        sequence.restore_seconds += self.now - awaited.since
        if self._roster.fetching.pop(sequence.id, None) is not None:
            self._roster.enqueue(sequence)
        elif sequence.turn is None:
            self._roster.touch(sequence)

    def _enqueue(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if self.disk is not None and not self.disk.stored(key):
                self._queue[key] = None

    def _send_down(self, disk: DiskTier) -> None:
        tier = self._paging.moves.tier
        if tier is not None and not self._queue and tier.free * PRESSED < tier.memory.slots:
            self._enqueue(tier.oldest(disk.room))
        while self._queue and disk.room > 0:
            key, _ = self._queue.popitem(last=False)
            disk.store(key, self.now)
