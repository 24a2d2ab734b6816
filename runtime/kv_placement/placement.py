"""Where KV goes: down when it is idle, closed or about to be evicted, up before it is used.

A turn with KV on a lower tier waits (`Status.RESTORING`) while others run; an idle sequence that is expected
back is `Status.STAGED` meanwhile. For each there is one plan, made from measured costs::

    compute instead    nothing is asked for: the device is faster than the tiers
    compute meanwhile  the beginning is computed while the rest comes up
    direct             records come to where they can be read, and one copy takes them to the device, past the
                       slots: where the device is this machine's memory; what is there already is read at once
    through slots      the tier fills slots of the host, and step plans load these to the device, piece by
    piece,
                       so that a long sequence needs few slots

Records go down a few at a time: those of a turn that ended `IDLE_SECONDS` ago, while the lower tiers have room;
those of a closed sequence; and those that a nearly full host tier evicts next and the device does not have, so
that full tiers do not hold the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container
from dataclasses import dataclass, field

from ...kvstore.tier import Presence
from ..order.queues import Queues
from ..sequence import Sequence, Status
from .block_manager import BlockManager
from .costs import CostBook

IDLE_SECONDS = 2.0
POLL_SECONDS = 0.002
ABSENT_SECONDS = 0.1  # between two looks for tiers that do not answer
FETCH_POLL_SECONDS = 0.0003  # between two looks at the tiers while a sequence waits for its records
WINDOW_SHARE = 8  # one in so many of the host tier's slots may be on its way up for one sequence
AT_ONCE_BYTES = 64 << 20  # copied to the device between two steps: some 10 ms; and direct on its way at most
FETCHED_SHARE = 0.75  # of the slots may hold what has come for one and finds no room on the device


@dataclass(slots=True)
class _Restore:
    """A restore that is going on: records of a sequence on their way up, in order.

    ::

        [0, moved)        on the device
        [moved, arrived)  in the host tier, or where they can be read
        [arrived, asked)  on their way there
        [asked, end)      on a lower tier

    ``keys``: of the records, in the order of the drawing. ``tokens``: the sequence's number of tokens when its
    records were located. ``since``: when it began; ``last_arrival``: when a record came last.
    ``compute_until``: the position up to which tokens are computed meanwhile, 0 for none. ``direct``: past the
    slots. ``broken``: a record will not come.
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

    @property
    def goes_on(self) -> bool:
        """Whether this restore can go on for the sequence as it is now: for the same tokens, not broken, and
        with nothing computed meanwhile."""
        return self.tokens == len(self.sequence.tokens) and not self.broken and not self.compute_until

    def stop(self) -> None:
        """Mark the restore as broken, because a record will not come, and forget the records that were not
        asked for yet, which are useless without it."""
        self.broken = True
        del self.keys[self.asked :]


@dataclass(eq=False)
class KVPlacement:
    """Moves KV of the sequences of ``queues`` between the device and the tiers.

    ``relieve``: given a number of blocks, a sequence and the time, makes that many blocks available for it by
    evicting idle KV. ``costs``: decide what is computed instead; written to their file when the engine ends.
    """

    _queues: Queues
    _block_manager: BlockManager
    _relieve: Callable[[int, Sequence, float], None]
    costs: CostBook
    _restores: dict[Sequence, _Restore] = field(default_factory=dict)
    _idle: OrderedDict[Sequence, float] = field(default_factory=OrderedDict)  # since when

    def __post_init__(self) -> None:
        self._tiers = self._block_manager.tiers

    # --- down -----------------------------------------------------------------------------------------------

    def rest(self, sequence: Sequence, now: float) -> None:
        """Note that a turn of the sequence ended: `tick` queues its records to go down after `IDLE_SECONDS`, if
        no other turn has begun by then."""
        if self._tiers.below:
            self._idle[sequence] = now
            self._idle.move_to_end(sequence)

    def retire(self, sequence: Sequence) -> None:
        """Note that the sequence is closed: queue its records to go down, unless the lower tiers are full, and
        let all tiers evict its KV first."""
        if not self._tiers.full:
            self.leave(sequence)
        self._idle.pop(sequence, None)
        self._block_manager.retire(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Queue the records of the sequence's KV to go down now, without waiting `IDLE_SECONDS`."""
        self._idle.pop(sequence, None)
        self._tiers.send(self._block_manager.residency.names(sequence))

    def _send_down(self, now: float) -> None:
        while self._idle:
            sequence, since = next(iter(self._idle.items()))
            if now < since + IDLE_SECONDS:
                break
            del self._idle[sequence]
            if sequence.turn is None and not self._tiers.full:
                self.leave(sequence)
        manager = self._block_manager
        self._tiers.send_down(manager.pool.index.here, manager.transfers.saving, now)

    # --- between two steps ----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Take in what the tiers have told, take restores further, and send records down."""
        self._tiers.poll(now)
        self._block_manager.erase_on()
        for restore in list(self._restores.values()):
            self._advance(restore, now)
        self._send_down(now)

    def flush(self) -> None:
        """Erase what is left to erase, and queue all records of the host tier to go down, as an engine that
        ends does."""
        while self._block_manager.erasing:
            self._block_manager.erase_on()
        self._tiers.flush()

    def close(self) -> None:
        """Write the measured costs to their file, and close the lower tiers."""
        self.costs.save()
        self._tiers.close()

    def due(self, now: float) -> float | None:
        """Seconds until `tick` has something to do if nothing else happens; None: never."""
        tiers = self._tiers
        if self._block_manager.erasing:
            return POLL_SECONDS
        if not tiers.below:
            return None
        if not tiers.ready:
            return ABSENT_SECONDS
        if self._restores:
            return FETCH_POLL_SECONDS
        if tiers.busy:
            return POLL_SECONDS
        if self._idle:
            return max(POLL_SECONDS, next(iter(self._idle.values())) + IDLE_SECONDS - now)
        return None

    def statistics(self) -> dict[str, float]:
        """How many sequences are being restored from lower tiers now; empty without any."""
        return {"fetching": len(self._restores)} if self._tiers.below else {}

    # --- up -------------------------------------------------------------------------------------------------

    def line_up(self, sequence: Sequence, now: float) -> None:
        """Put a sequence with a new turn into the queue for admission; or among the restoring ones, if it has
        to wait for KV."""
        self._queues.move(sequence, Status.RESTORING)
        scores = sequence.turn is not None and sequence.turn.to_score  # all of its prompt is computed
        if scores or not self._fetch(sequence, now):
            self._queues.enqueue(sequence)

    def stage(self, sequence: Sequence, now: float) -> None:
        """Restore an idle sequence that is expected back. If its records are on a lower tier, it is
        ``Status.STAGED`` meanwhile."""
        if self._fetch(sequence, now):
            self._queues.stage(sequence)

    def finds(self, sequence: Sequence) -> bool:
        """Whether a tier holds KV that continues the sequence's computed tokens."""
        located = self._block_manager.residency.locate(sequence)
        return bool(located.at_hand().keys or located.below())

    def awaits(self, sequence: Sequence) -> bool:
        """Whether a restore is going on for the sequence."""
        return sequence in self._restores

    def _fetch(self, sequence: Sequence, now: float, *, direct: bool = True) -> bool:
        """Begin to restore a sequence's records from lower tiers; returns whether it has to wait for them.

        A turn does not wait if computing is cheaper by the measured costs, nor if it is computed from its
        beginning up to the restored part while that comes. ``direct``: past the slots where that is possible.
        """
        tiers, began = self._tiers, self._restores.get(sequence)
        self._block_manager.fall_back(sequence, wait=True)
        if not tiers.stocked:
            return False
        if tiers.reads and began is None:
            before = tiers.reading_seconds
            self._read(sequence, tiers.readable, now)
            sequence.from_tiers.seconds += tiers.reading_seconds - before
        meets, skipped = self._meeting(sequence)
        direct &= tiers.reads and not meets
        whole = not skipped and not meets
        if began is not None and began.goes_on and began.direct <= direct and whole:
            return True
        keys = self._block_manager.locate(sequence).below()[skipped:]
        if keys:  # its own beginning must not be evicted for the rest
            tiers.host.touch(self._block_manager.residency.names(sequence))
        since = now if began is None or began.direct != direct else began.since
        restore = _Restore(sequence, len(sequence.tokens), keys, since, now, meets, direct)
        unsure = self._ask(restore, now)
        if not restore.asked and not unsure:
            return False
        sequence.from_tiers.from_disk.update(keys)
        self._restores[sequence] = restore
        if meets:
            sequence.from_tiers.compute_until = meets
        return not meets

    def _meeting(self, sequence: Sequence) -> tuple[int, int]:
        """What of a turn's KV to compute rather than restore, by the measured costs. Returns the position up
        to which it is computed while the rest comes up, 0 for none; and how many of its records on lower tiers
        lie before that, which are not fetched."""
        costs = self.costs.costs()
        if costs is None or sequence.turn is None or sequence.planned != sequence.computed:
            return 0, 0
        first, below, missing = self._block_manager.residency.locate(sequence).to_restore()
        size, beside = self._block_manager.block_tokens, self.costs.beside
        count = costs.blocks_to_compute(
            first * size, below, missing, size, self._tiers.record_bytes, beside=beside
        )
        sequence.from_tiers.chosen = count * size
        if any(below[:count]) and not (beside and any(below[count:])):
            self.costs.passed_over()
        if count == len(below):  # all is computed; or nothing full is there, and a tail is not worth it
            return 0, sum(below) + self._block_manager.groups if count else 0
        return (first + count) * size if count else 0, sum(below[:count])

    def _ask(self, restore: _Restore, now: float) -> bool:
        """Ask for the next records of a restore: as many as its share of the host's slots, or one direct copy,
        holds. Returns whether a tier does not know yet if it has the next one."""
        tiers = self._tiers
        window = restore.arrived + max(tiers.host.room, tiers.slots // WINDOW_SHARE, 1)
        most = restore.moved + max(1, int(tiers.slots * FETCHED_SHARE))
        if restore.direct:
            window = most = restore.moved + max(1, AT_ONCE_BYTES // tiers.record_bytes)
        for key in restore.keys[restore.asked : min(window, most)]:
            if not self._is_above(key):
                presence = tiers.fetch(key, now, restore.sequence.tenant, direct=restore.direct)
                if presence is Presence.ABSENT:
                    restore.stop()
                if presence is not Presence.FOUND:
                    return presence is Presence.PENDING and tiers.unsure(key)
            restore.asked += 1
        return False

    def _advance(self, restore: _Restore, now: float) -> None:
        """Take a restore further: count the records that have come, have them copied to the device, and ask
        for more or finish."""
        before = restore.arrived
        self._count_arrived(restore)
        if restore.arrived > before:
            restore.last_arrival = now
        to_read = restore.direct and restore.arrived > restore.moved
        if not self._wanted(restore.sequence):
            restore.stop()
            restore.sequence.from_tiers.compute_until = None
        elif to_read and not self._read_arrived(restore, now):
            return self._fetch_into_slots(restore, now)
        late = now > restore.last_arrival + self._tiers.deadline
        if not restore.broken and not late:
            self._ask(restore, now)
        until = restore.sequence.from_tiers.compute_until
        met = until is None or restore.sequence.computed >= until  # computed up to what is restored
        if met and restore.arrived > restore.moved:
            restore.sequence.look_up()
        if late and restore.arrived < len(restore.keys):
            self._tiers.give_up(restore.keys[restore.arrived], now)
        if late or (restore.arrived == len(restore.keys) and met):
            self._end(restore, now)
        return None

    def _read(self, sequence: Sequence, there: Callable[[bytes], bool], now: float) -> list[bytes]:
        """Read records that lie in this machine's memory to the device, now, which requires that no step is
        in flight. Returns the keys of those that are on the device now.

        It reads the records that follow the computed tokens: in the host tier, or below and ``there`` (tells of
        a key whether its record can be read). At most `AT_ONCE_BYTES`, and as many as find blocks. If none of
        them is below, it does nothing: a step's plan loads what is in the host tier.
        """
        manager, host = self._block_manager, self._tiers.host
        sequence.count_found(manager.adopt(sequence))
        found = manager.locate(sequence).readable(there)
        first = next((key for key in found.keys if key not in host), None)
        if first is None or not self._tiers.near(first):
            return []
        found = found.beginning(max(manager.groups, AT_ONCE_BYTES // self._tiers.record_bytes))
        if len(found) > manager.pool.available:
            self._relieve(len(found), sequence, now)
        sequence.from_tiers.from_disk.update(key for key in found.keys if key not in host)
        return found.keys[: manager.read_up(sequence, found)]

    def _read_arrived(self, restore: _Restore, now: float) -> bool:
        """Read the records of a direct restore that have come to where they can be read; returns whether all of
        them are on the device.

        They are not where blocks are short, or where a record has gone again or is damaged.
        """
        sequence, came = restore.sequence, set(restore.keys[restore.moved : restore.arrived])
        went: set[bytes] = set()
        while came - went and (read := self._read(sequence, came.__contains__, now)):
            went.update(read)
        if sequence.turn is None:
            self._queues.idle.put(sequence)
        self._pass_moved(restore, went)
        return restore.moved == restore.arrived

    def _fetch_into_slots(self, began: _Restore, now: float) -> None:
        """Begin a direct restore again through host slots, for what could not be read directly."""
        sequence = began.sequence
        sequence.from_tiers.seconds += now - began.since
        if not self._fetch(sequence, now, direct=False):
            if self._restores[sequence] is began:
                del self._restores[sequence]
            self._finish(sequence, now)

    def _count_arrived(self, restore: _Restore) -> None:
        keys = restore.keys
        while restore.arrived < restore.asked and not self._tiers.fetching(keys[restore.arrived]):
            if not restore.broken and not restore.direct and not self._is_above(keys[restore.arrived]):
                restore.stop()
            restore.arrived += 1
        self._pass_moved(restore)

    def _pass_moved(self, restore: _Restore, went: Container[bytes] = ()) -> None:
        """Raise the restore's ``moved`` past the records that are on the device. ``went``: keys that were
        brought there; they count even if they were evicted since."""
        on_device, keys = self._block_manager.pool.index.here, restore.keys
        while restore.moved < restore.arrived and (
            keys[restore.moved] in went or keys[restore.moved] in on_device
        ):
            restore.moved += 1

    def _is_above(self, key: bytes) -> bool:
        return key in self._tiers.host or key in self._block_manager.pool.index.here

    def _wanted(self, sequence: Sequence) -> bool:
        """Whether a restore of the sequence is still of use: the sequence waits for it, or is computed up to
        the restored part.

        It waits no more once it is stopped or closed, or its KV is taken for another.
        """
        if sequence.status in (Status.RESTORING, Status.STAGED):
            return True
        return sequence.status is not Status.CLOSED and sequence.from_tiers.compute_until is not None

    def _end(self, restore: _Restore, now: float) -> None:
        """End a restore: learn what it took, if all came, and let its sequence wait no longer."""
        sequence = restore.sequence
        del self._restores[sequence]
        sequence.from_tiers.compute_until = None
        whole = restore.arrived == len(restore.keys) and not restore.broken
        if whole and (self.costs.beside or not restore.compute_until):
            size = len(restore.keys) * self._tiers.record_bytes
            self.costs.fetched(size, restore.last_arrival - restore.since)
        if sequence.status is not Status.CLOSED:
            sequence.from_tiers.seconds += now - restore.since
            self._finish(sequence, now)

    def _finish(self, sequence: Sequence, now: float) -> None:
        """End the sequence's wait: put its turn into the queue for admission, or an idle one back among the
        idle sequences. What has come up is looked up before its next step."""
        sequence.look_up()
        if sequence.status is Status.RESTORING:
            self._queues.enqueue(sequence)
        elif sequence.turn is None:
            self._queues.arrived(sequence, now)
