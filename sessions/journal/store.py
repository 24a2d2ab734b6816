"""The store of one model's sessions: changes go to the logs, an index in memory says which records count.

Blocking, for one thread. A group of changes is one write and one sync. What is read is checked again each
time: a damaged record affects only the sessions that need it. Knows keys and places, not what an
operation means.
"""

from __future__ import annotations

import logging
import os
import struct
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np

from ..errors import RecordDamaged, StorageUnavailable, StoreUnusable
from ..settings import JournalSettings
from . import segment
from .compaction import Compaction, dispensable
from .folder import FOLDER, IDENTITY, Disk, Identity, mismatch, write_identity
from .logs import Log, LogFolder, named
from .records import (
    AnyOperation,
    Append,
    Change,
    Condensed,
    Drop,
    HandleRecord,
    Keyring,
    Put,
    SessionRecord,
    Table,
    session_extra,
)
from .retention import Born, TenantShares, surplus
from .segment import HIT, LOG_START, MISSING, SLOT_SHIFT, Fresh, Kind, all_bytes_at, slot_of
from .state import Sessions, SessionState

log = logging.getLogger(__name__)

SWEEP_SESSIONS = 64  # forgotten in one group
AGAIN = 1.25  # times as many operations as a session had when it could not be made shorter
SMALL_SHARE = 0.25  # of a full log: smaller ones are merged
DEAD_SHARE = 0.5  # of a log's bytes: it is rewritten
MOST_SMALL = 8
REST_SECONDS = 30.0  # after a compaction that failed
MICROSECONDS = 1_000_000
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredSession:
    """A session as it stands in the store."""

    number: int
    record: SessionRecord
    keyring: Keyring
    operations: tuple[AnyOperation, ...]
    """Those that are kept, of the sessions it was forked from too: the first may be a snapshot of many."""
    written: int = 0
    """How many it has had of its own: the index of the next."""


Condense: TypeAlias = Callable[[Sequence[AnyOperation]], tuple[int, AnyOperation] | None]
"""How many of a session's operations one stands for, and that one; None where it is not worth it."""


class JournalStore:
    """The logs below ``folder``. ``open`` it on the thread that uses it."""

    def __init__(self, folder: Path, settings: JournalSettings, logs: LogFolder) -> None:
        self.folder = folder
        self.logs = logs
        self.sessions = Sessions(logs.size, self._died)
        self.long: set[int] = set()
        """Sessions that `condense` would make shorter."""
        self.full = False
        """Whether the last write failed because the journal may grow no further."""
        self.shares = TenantShares(settings.tenants)
        self.mismatches: list[str] = []
        """What differs from the last start: the journal, or the second place that tells of it."""
        self.fresh = logs.made
        """Whether there was no journal before."""
        self._settings = settings
        self._writes = True
        self._declined: dict[int, int] = {}  # operations of those that it did not, as while a reply runs
        self._damaged: set[int] = set()
        self._compaction: Compaction | None = None
        self._resting = 0.0  # no compaction before: the last one failed

    @classmethod
    def open(
        cls,
        folder: Path,
        model: bytes,
        settings: JournalSettings,
        *,
        disk: Disk | None = None,
        known: segment.SegmentHeader | None = None,
        write: bool = True,
        whole: bool = False,
    ) -> JournalStore:
        """Open or make the store of ``model``; b"" opens that of any. Hold its lock, unless only to look:
        ``write`` is false. ``whole``: every log is read, also those whose indexes say all.

        Raises ``StoreUnusable`` or one of its kinds.
        """
        size = settings.log_bytes
        try:
            logs, parts = LogFolder.open(
                folder / FOLDER, model, size, disk or Disk(), known, write=write, whole=whole
            )
        except StorageUnavailable as fault:
            raise StoreUnusable(f"the store {folder} cannot be opened: {fault.message}") from None
        store = cls(folder, settings, logs)
        store._writes = write
        with store.closed_on_failure():
            store._load(parts)
            if write and logs.made:
                logs.active = logs.begin()
        return store

    @contextmanager
    def closed_on_failure(self) -> Iterator[None]:
        """Close the store if the block raises. Turns ``StorageUnavailable`` into ``StoreUnusable``."""
        try:
            yield
        except StorageUnavailable as fault:
            self.close()
            raise StoreUnusable(f"the store {self.folder} cannot be opened: {fault.message}") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the files."""
        if self.generation and self._writes:
            self.note()
        if self._compaction is not None:
            self._compaction.abandon()
            self._compaction = None
        self.logs.close()

    # --- writing --------------------------------------------------------------------------------------------

    def write(self, changes: Iterable[Change]) -> None:
        """All changes in one group that is on the disk, or none. Raises ``StorageUnavailable``."""
        changes = list(changes)
        self.full = False
        records = self._encoded(changes)
        if not records:
            return
        if not all(isinstance(change, Drop) for change in changes):
            self._check_room(sum(segment.padded(len(one.payload)) for one in records))
        try:
            written = self.logs.append(records)
        except StorageUnavailable:
            if not self.remove_dead():
                raise
            written = self.logs.append(records)
        self._apply(records, *written)
        if self.logs.unnoted and self.generation:
            self.note()

    def begin(self, generation: int) -> None:
        """A server begins with this generation of the store. Raises ``StorageUnavailable``."""
        self.logs.append([Fresh(0, generation, Kind.START, b"")])
        self.logs.generation = generation
        self.note()

    def note(self, without: Sequence[Log] = ()) -> None:
        """Tell the second place how far the journal is, and which logs it has but for those ``without`` which
        it goes on; where that cannot be written it is told later."""
        found = self.identity()
        gone = {one.number for one in without}
        found = msgspec.structs.replace(found, logs=tuple(one for one in found.logs if one not in gone))
        try:
            write_identity(self.folder, found, self.logs.disk)
        except OSError as fault:
            log.warning("%s cannot be written: %s", self.folder / IDENTITY, fault.strerror)
        else:
            self.logs.unnoted = False

    def identity(self) -> Identity:
        """What this store is, and how far."""
        numbers = [one.number for one in self.logs.logs.values()]
        return Identity.of(self.logs.header, self.generation, self.logs.next_sequence, numbers)

    def mismatch(self, known: Identity | None) -> str:
        """How the journal differs from what the second place says; "" where it does not."""
        return mismatch(known, self.identity(), fresh=self.fresh, absent=self.logs.explained)

    @property
    def generation(self) -> int:
        """How many servers have begun with this store."""
        return self.logs.generation

    def erase(self, numbers: Sequence[int]) -> None:
        """Forget these sessions. Raises ``StorageUnavailable``."""
        for at in range(0, len(numbers), SWEEP_SESSIONS):
            self.write([Drop(number) for number in numbers[at : at + SWEEP_SESSIONS]])

    def _encoded(self, changes: Sequence[Change]) -> list[Fresh]:
        """The changes as records; raises what encoding raises."""
        records: list[Fresh] = []
        for change in changes:
            match change:
                case Append(number=number, index=index, operation=operation):
                    records.append(Fresh(number, index, Kind.OPERATION, msgspec.msgpack.encode(operation)))
                case Condensed(number=number, index=index, snapshot=snapshot):
                    records.append(Fresh(number, index, Kind.SNAPSHOT, msgspec.msgpack.encode(snapshot)))
                case Drop(number=number):
                    records.append(Fresh(number, 0, Kind.DROP, b""))
                case Put(table=Table.HANDLES):
                    pass  # the keyring has it
                case Put(key=key, record=SessionRecord() as record):
                    payload, extra = msgspec.msgpack.encode(record), session_extra(record)
                    records.append(Fresh(_number(key), 0, Kind.SESSION, payload, extra))
                case Put(key=key, record=Keyring() as ring):
                    payload, extra = msgspec.msgpack.encode(ring), b"".join(ring.digests())
                    records.append(Fresh(_number(key), 0, Kind.KEYRING, payload, extra))
                case _:
                    raise TypeError(f"the journal keeps no such record: {change!r}")
        return records

    def _apply(self, records: Sequence[Fresh], places: Sequence[int], first: int, moment: int) -> None:
        """The index follows what was written."""
        sessions, logs = self.sessions, self.logs.logs
        forgotten: dict[int, list[int]] = {}
        born: list[Born] = []
        written: dict[int, None] = {}
        for at, (one, place) in enumerate(zip(records, places, strict=True)):
            number = one.session
            if one.kind == Kind.DROP:
                forgotten[number] = sessions.apply(one.kind, number, 0, place, b"")
                written.pop(number, None)
                self._damaged.discard(number)
                continue
            logs[slot_of(place)].live += segment.padded(len(one.payload))
            sessions.apply(one.kind, number, one.index, place, one.extra)
            if one.kind == Kind.KEYRING:
                continue  # to come back is no use yet
            sessions.touched(number, first + at, moment)
            written[number] = None
            if one.kind == Kind.SESSION:
                state = sessions.states[number]
                born.append(Born(number, state.salt, segment.padded(len(one.payload))))
        states = [sessions.states[number] for number in written]
        self.long.update(state.number for state in states if self._is_long(state))
        self.long.difference_update(number for number in forgotten if number not in written)
        self.shares.enter(born)
        self.shares.used({state.number: state.base + state.grown for state in states})
        for number, erased in forgotten.items():
            self.shares.forgotten(number, erased)
            self._declined.pop(number, None)

    def _died(self, place: int) -> None:
        """A record that was needed is not."""
        one = self.logs.logs.get(slot_of(place))
        if one is not None:
            one.live -= self.logs.size(place)

    def _is_long(self, state: SessionState) -> bool:
        """A snapshot costs its bytes, and trying in vain the reading of it all: there must be more first."""
        behind = len(state.operations)
        least = max(self._settings.snapshot_operations, AGAIN * self._declined.get(state.number, 0))
        return behind >= least and state.grown >= state.base

    def condense(self, number: int, how: Condense) -> bool:
        """Put one operation in the place of a session's first ones, unless forks follow on these; if it was.

        Raises ``StorageUnavailable``, ``RecordDamaged``.
        """
        self.long.discard(number)
        state = self.sessions.states.get(number)
        if state is None:
            return False
        self._declined[number] = len(state.operations)
        if state.record == MISSING or self.sessions.forked(number):
            return False
        operations = self._operations(state)
        inherited = len(operations) - len(state.operations)
        count, snapshot = how(operations) or (0, None)
        if snapshot is None or count <= inherited:
            return False
        del self._declined[number]
        self.write([Condensed(number, state.first + count - inherited - 1, snapshot)])
        return True

    def free_bytes(self) -> int | None:
        """What the disk has left for us; None where the folder is gone."""
        try:
            found = os.statvfs(self.logs.folder)
        except OSError:
            return None
        return found.f_bavail * found.f_frsize

    def sweep(self, keep: frozenset[int], *, aged: bool = True) -> int:
        """Forget what retention lets go, but for those in ``keep``; how many. Not ``aged``: for no age."""
        gone = self._past(keep, aged=aged)
        self.erase(gone)
        return len(gone)

    def make_room(self, keep: frozenset[int]) -> bool:
        """Forget some sessions of the tenants that hold the most bytes; False where there is none to forget."""
        states = self.sessions.states.values()
        closed = [state for state in states if state.kept and state.number not in keep]
        gone = surplus(closed, SWEEP_SESSIONS, lambda state: max(1, state.base + state.grown))
        if gone:
            self.write([Drop(number) for number in gone])
        return bool(gone)

    def keep_shares(self, live: Container[int]) -> frozenset[bytes]:
        """Forget what tenants have beyond their shares, but for sessions that are open; whose shares are
        full.

        Raises ``StorageUnavailable``.
        """
        while gone := self.shares.surplus(live, SWEEP_SESSIONS):
            self.write([Drop(number) for number in gone])
        return self.shares.full()

    # --- room -----------------------------------------------------------------------------------------------

    def _check_room(self, size: int) -> None:
        """Raises ``StorageUnavailable`` where the journal would grow beyond what it may have."""
        most = self._settings.max_bytes
        if self.logs.bytes + size <= most:
            return
        self._reclaim(size)
        if self.logs.bytes + size > most:
            self.full = True
            raise StorageUnavailable(f"the journal has {self.logs.bytes} bytes, and may have no more")

    def _reclaim(self, size: int) -> None:
        """Make room for so many bytes among what is dead: whole logs first, which needs no room itself."""
        self.remove_dead()
        most = self._settings.max_bytes
        while self.logs.bytes + size > most:
            if self.logs.active is not None and self.logs.active.dead > self.logs.active.live:
                self.logs.roll()
                self.remove_dead()
            before = self.logs.bytes
            victims = self._victims(least=0.1)
            if not victims or not self._compact_whole(victims) or self.logs.bytes >= before:
                return

    def remove_dead(self) -> int:
        """Remove the logs that hold nothing anybody needs; how many. No record is written for it."""
        if self._compaction is not None:
            self._compaction.abandon()
            self._compaction = None
        removed = 0
        while (one := next(dispensable(self.logs, self.sessions), None)) is not None:
            if not self._remove([one]):
                break
            removed += 1
        return removed

    def _remove(self, gone: Sequence[Log]) -> bool:
        """Remove these logs; whether all could be. The second place is told first: a log that it tells of and
        that is not there counts as lost."""
        if self.generation:
            self.note(without=gone)
        removed = True
        for one in gone:
            try:
                self.logs.remove(one)
            except OSError:
                removed = False
        return removed

    def _compact_whole(self, victims: list[Log]) -> bool:
        if self._begin_compaction(victims):
            while self.compact():
                pass
        return self._resting == 0.0

    @property
    def wants_compaction(self) -> bool:
        """Whether `compact` has something to do."""
        if self._compaction is not None:
            return True
        return time.monotonic() >= self._resting and bool(self._victims())

    def compact(self) -> bool:
        """One slice of rewriting logs of which most is dead; whether there is more to do."""
        if self._compaction is None and not self._begin_compaction(self._victims()):
            return False
        assert self._compaction is not None
        try:
            if not self._compaction.step():
                return True
            self._remove(self._compaction.victims)
        except (OSError, StorageUnavailable) as fault:
            log.warning("the journal's logs were not compacted: %s", fault)
            self._compaction.abandon()
            self._resting = time.monotonic() + REST_SECONDS
        self._compaction = None
        return False

    def _begin_compaction(self, victims: list[Log]) -> bool:
        self._resting = 0.0
        if not victims:
            return False
        try:
            self._compaction = Compaction(self.logs, self.sessions, victims)
        except (StorageUnavailable, ValueError) as fault:
            log.warning("the journal's logs were not compacted: %s", fault)
            self._resting = time.monotonic() + REST_SECONDS
            return False
        return True

    def _victims(self, least: float = DEAD_SHARE) -> list[Log]:
        """Logs to rewrite into one: those of which most is dead, or many that are small."""
        full = self.logs.segment_bytes
        sealed = [one for one in self.logs.logs.values() if one is not self.logs.active]
        worn = [one for one in sealed if one.dead - one.marks > least * (one.end - LOG_START)]
        small = [one for one in sealed if one.end < SMALL_SHARE * full]
        if not worn and len(small) < MOST_SMALL:
            return []
        chosen: list[Log] = []
        size = 0
        wanted = {id(one): one for one in [*worn, *(small if len(small) >= MOST_SMALL else [])]}
        for one in sorted(wanted.values(), key=lambda one: one.live):
            if (chosen and size + one.live > full) or len(chosen) == 64:
                break
            chosen.append(one)
            size += one.live
        return chosen

    def rewrite(self) -> None:
        """Write every log anew, with what is needed and no more. Raises ``StorageUnavailable``."""
        self.logs.roll()
        self.remove_dead()
        waiting = list(self.logs.logs.values())
        while waiting:
            batch = [waiting.pop()]
            while waiting and sum(one.live for one in batch) + waiting[-1].live <= self.logs.segment_bytes:
                batch.append(waiting.pop())
            work = Compaction(self.logs, self.sessions, batch)
            try:
                while not work.step():
                    pass
            except OSError as fault:
                work.abandon()
                raise StorageUnavailable(f"{fault}") from None
            self._remove(batch)
        self.remove_dead()
        self.note()

    # --- reading --------------------------------------------------------------------------------------------

    def next_number(self) -> int:
        """A number no session has had."""
        return self.logs.next_session

    def handle(self, digest: bytes) -> HandleRecord | None:
        """The session that a handle opens; None for an unknown handle. Raises ``RecordDamaged``,
        ``StorageUnavailable``."""
        number = self.sessions.handles.get(digest)
        if number is None:
            return None
        return HandleRecord(session=number, owner=self._record(number).owner)

    def session(self, number: int) -> StoredSession:
        """A session with all its operations. Raises ``RecordDamaged``, ``StorageUnavailable``."""
        state = self.sessions.states.get(number)
        if state is None or MISSING in (state.record, state.ring):
            raise RecordDamaged(f"a record of session {number} is missing")
        record = self._record(number)
        ring: Keyring = self._read(number, Kind.KEYRING, 0, state.ring, Keyring, number)
        return StoredSession(number, record, ring, self._operations(state), state.count)

    def fork_tree(self, number: int) -> list[tuple[int, SessionRecord]]:
        """The sessions that this one was forked from, and all that were forked from those, but for such as
        were forgotten, and relatives whose record is damaged. Raises ``RecordDamaged``, ``StorageUnavailable``.
        """
        found = [(number, self._record(number))]
        for one in self.sessions.fork_tree(number):
            if one != number:
                with suppress(RecordDamaged):
                    found.append((one, self._record(one)))
        return sorted(found, key=lambda pair: pair[0])

    def damaged(self) -> list[int]:
        """Numbers of the sessions that are known to be damaged."""
        states = self.sessions.states
        return sorted(number for number in self._damaged if number in states and states[number].kept)

    def statistics(self) -> dict[str, float]:
        """Sessions and bytes."""
        return {
            "journal_sessions": float(len(self.sessions.states)),
            "journal_bytes": float(self.logs.bytes),
            "journal_live_bytes": float(sum(one.live for one in self.logs.logs.values())),
            "journal_logs": float(len(self.logs.logs)),
            "journal_damaged": float(len(self.damaged())),
            "journal_lost_records": float(self.logs.findings.lost),
            "journal_mismatch": float(len(self.mismatches)),
        }

    def name_of(self, number: int) -> str:
        """A session's id, or its number if its record is damaged."""
        with suppress(RecordDamaged, StorageUnavailable):
            state = self.sessions.states[number]
            found: SessionRecord = self._decoded(state.record, Kind.SESSION, number, 0, SessionRecord)
            return found.id
        return f"number {number}"

    # --- inside ---------------------------------------------------------------------------------------------

    def _load(self, parts: list[Any]) -> None:
        """The index from the records, and what damage there is."""
        generation = self.sessions.load(parts)
        self.logs.generation = max(self.logs.generation, generation)
        for one in self.logs.logs.values():
            one.live = 0
        for places in self.sessions.live():
            slots = (places >> np.uint64(SLOT_SHIFT)).astype(np.int64)
            sizes = np.bincount(slots, weights=all_bytes_at(places).astype(float))
            for slot in np.flatnonzero(sizes).tolist():
                if slot in self.logs.logs:
                    self.logs.logs[slot].live += int(sizes[slot])
        self._damaged = set(self.sessions.damaged())
        for line in self.logs.findings.lines:
            log.error("%s", line)
        if self._damaged:
            names = [self.name_of(number) for number in sorted(self._damaged)]
            log.error(
                "the journal %s is damaged: these sessions are lost: %s", self.logs.folder, named(names)
            )
        self._count()

    def _record(self, number: int) -> SessionRecord:
        state = self.sessions.states.get(number)
        if state is None or state.record == MISSING:
            raise RecordDamaged(f"the record of session {number} is missing")
        found: SessionRecord = self._read(number, Kind.SESSION, 0, state.record, SessionRecord, number)
        return found

    def _operations(self, state: SessionState) -> tuple[AnyOperation, ...]:
        """All that a session is made of. Raises ``RecordDamaged``, ``StorageUnavailable``."""
        found: list[AnyOperation] = []
        for number, index, place in self.sessions.needed(state.number):
            owner = self.sessions.states[number]
            kind = Kind.SNAPSHOT if owner.snapshot and index == owner.first else Kind.OPERATION
            found.append(self._read(number, kind, index, place, AnyOperation, state.number))
        return tuple(found)

    def _read(self, number: int, kind: Kind, index: int, place: int, form: Any, needed_by: int) -> Any:
        """A record. If it is damaged, its session and the one that needed it are remembered as damaged."""
        try:
            return self._decoded(place, kind, number, index, form)
        except RecordDamaged as fault:
            if place not in (HIT, MISSING):
                self.logs.soil(place)
            self.sessions.strike(number, kind, index)
            states = self.sessions.states
            hit = {one for one in (number, needed_by) if one in states and states[one].kept}
            fresh = hit - self._damaged
            self._damaged |= hit
            if fresh:
                names = [self.name_of(one) for one in sorted(fresh)]
                log.error("the journal is damaged: session %s is lost: %s", named(names), fault.message)
            raise

    def _decoded(self, place: int, kind: Kind, number: int, index: int, form: Any) -> Any:
        if place in (HIT, MISSING):
            what = f"operation {index}" if kind in (Kind.OPERATION, Kind.SNAPSHOT) else kind.name.lower()
            raise RecordDamaged(f"session {number}: its {what} is {'damaged' if place else 'missing'}")
        found = self.logs.read(place)
        if (found.session, found.kind, found.index) != (number, kind, index):
            raise RecordDamaged(
                f"session {number}: another record stands in the place of its {kind.name.lower()}"
            )
        try:
            return msgspec.msgpack.decode(found.payload, type=form)
        except (msgspec.MsgspecError, RecursionError) as fault:
            raise RecordDamaged(f"a record of session {number} cannot be read: {fault}") from None

    def _count(self) -> None:
        """What tenants have that have a share: of sessions that were forgotten, too, where forks need it."""
        if not self.shares:
            return
        states = sorted(self.sessions.states.values(), key=lambda state: state.last if state.kept else 0)
        self.shares.enter(
            Born(state.number, state.salt, self.logs.size(state.record)) for state in states if state.record
        )
        for state in states:
            self.shares.used({state.number: state.base + state.grown})
            if not state.kept:
                self.shares.forgotten(state.number, [])

    def _past(self, keep: frozenset[int], *, aged: bool) -> list[int]:
        """Sessions that are older than retention keeps, and those beyond the number that it keeps."""
        kept = [state for state in self.sessions.states.values() if state.kept]
        oldest = (time.time() - self._settings.max_age_seconds) * MICROSECONDS if aged else 0.0
        past = [state.number for state in kept if state.used < oldest]
        left = [state for state in kept if state.used >= oldest]
        past += surplus(left, len(left) - self._settings.max_sessions, lambda state: 1)
        return [number for number in past if number not in keep]


def _number(key: bytes) -> int:
    found: int = struct.unpack(">Q", key)[0]
    return found
