"""The store of one model's sessions: changes become records in the logs, and an index in memory finds them.

Its calls block; one thread uses it. A group of changes is one write and one sync. Every record is checked
each time it is read, and a damaged one affects only the sessions that need it. Does not know what an
operation means.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
from msgspec.structs import replace

from ...kvstore.reserve import NAME, DiskReserve
from ..errors import RecordDamaged, StorageFull, StorageUnavailable, StoreLost, StoreUnusable
from ..settings import JournalSettings
from . import segment
from .clock import MICROSECONDS, ServedClock
from .folder import FOLDER, IDENTITY, Disk, Identity, named, write_identity
from .logs import NO_ROOM, Log, LogFolder
from .merge import Merge, dispensable, has_replaced
from .records import AnyOperation, Keyring, SessionRecord, append, drop
from .retention import Retention
from .segment import HIT, LOG_START, MISSING, SLOT_SHIFT, Fresh, Kind, slot_of
from .session_states import SessionState
from .state import Sessions

log = logging.getLogger(__name__)

SWEEP_SESSIONS = 64  # sessions forgotten in one group
AGAIN = 1.25  # after a vain try a session is condensed again when it has so many times the operations
SMALL_SHARE = 0.25  # of a full log: smaller ones are merged
DEAD_SHARE = 0.5  # of a log's bytes: it is rewritten
BESIDE_BYTES = 64 << 10  # that a group or a merge takes beside its records: headers, indexes, `identity`
SHORT_SHARE = 0.05  # the same, while the disk is full
ROLLED_BYTES = 64 << 10  # dead bytes for which the log that is being written is sealed while the disk is full
MOST_SMALL = 8
MOST_VICTIMS = 64  # of one merge: their numbers stand in a header
REST_SECONDS = 30.0  # after a merge that failed
FULL_SECONDS = 1.0  # after one that found the disk full
FORGOTTEN = {
    "age": "they were not used for as long as retention keeps them",
    "number": "the journal has more than it may",
    "size": "the journal has no room for more",
    "share": "their tenants have more than their shares",
}
"""Why sessions are forgotten, for the server's log and for metrics."""


@dataclass(slots=True)
class _Removal:
    """Items were removed from a session, the last time by the operation with this ``index``; -1: it is deleted,
    or a fork of one with removed text, which stays until the fork has a snapshot. ``since``: the first time;
    ``looked``: when it was last tried to replace them by a snapshot. Both by the monotonic clock."""

    index: int = -1
    since: float = field(default_factory=time.monotonic)
    looked: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class StoredSession:
    """A session as the store has it: its number in the journal, its record, its keyring and its operations."""

    number: int
    record: SessionRecord
    keyring: Keyring
    operations: tuple[AnyOperation, ...]
    """All that its history needs, those of its ancestors too; the first may be a snapshot."""
    written: int = 0
    """How many operations of its own it has had: the index of the next one."""


@dataclass(frozen=True, slots=True)
class Walk:
    """A part of a walk through the store (`JournalStore.walk`). ``found``: sessions and stored objects, each
    with the cursor from which the walk goes on behind it, its number and its record; None for a damaged one.
    ``cursor``: from where the walk goes on behind all of them; None at the end."""

    found: tuple[tuple[int, int, SessionRecord | None], ...]
    cursor: int | None


Condense: TypeAlias = Callable[[Sequence[AnyOperation]], tuple[int, AnyOperation] | None]
"""A function that makes a snapshot of some first operations of a session: it gets all, and returns how many the
snapshot replaces, and the snapshot; None if it is not worth it."""


class JournalStore:
    """The journal of one model on disk: writes records, finds and reads sessions, forgets them and keeps the
    logs small. One thread at a time uses it."""

    def __init__(
        self,
        folder: Path,
        model: bytes,
        settings: JournalSettings,
        *,
        disk: Disk | None = None,
        known: Identity | None = None,
        write: bool = True,
        whole: bool = False,
        lost: Callable[[], str] = str,
        clock: ServedClock | None = None,
    ) -> None:
        """Open the store in ``folder``, or make it. ``model``: the digest of its model; b"": of any model.

        ``write``: the caller holds the store's lock and may write; if false, no file is changed. ``disk``: the
        calls on files. ``known``: the store's identity, in case no log's header can be read. ``whole``: read
        every log, not only its index. ``lost`` returns why the store is not the caller's any more, "" if it is
        (`StoreLock.lost`). ``clock``: gives the time of what is written; None makes one. Raises
        ``StoreUnusable`` or one of its kinds.
        """
        files = (folder / FOLDER, model, settings.log_bytes, disk or Disk(), known)
        try:
            logs = LogFolder(*files, write=write, whole=whole, lost=lost, clock=clock)
        except StorageUnavailable as fault:
            raise StoreUnusable(f"the store {folder} cannot be opened: {fault.message}") from None
        self.folder = folder
        self.logs = logs
        self.sessions = Sessions(logs.size, self._died)
        self.long: set[int] = set()
        """Sessions that are long enough to `condense`."""
        self.full = False
        """Whether the last write failed because the journal has reached its size."""
        self.retention = Retention(self.sessions.states, settings.tenants)
        self.going: frozenset[int] = frozenset()
        """The sessions that retention forgets at this moment."""
        self.forgotten: Counter[str] = Counter()
        """How many sessions retention has forgotten since the store was opened, by reason."""
        self.mismatches: list[str] = []
        """How the journal differs from that of the last start, one sentence each."""
        self._settings = settings
        self._declined: dict[int, int] = {}  # sessions that could not be condensed, and their operations then
        self._removals: dict[int, _Removal] = {}  # by session; the one that was looked at longest ago first
        self._damaged: set[int] = set()
        self._merge: Merge | None = None
        self._resting = 0.0  # after a failed merge: none before this time
        self._began = False  # a server began to use it here
        self._backup = known if known is not None and known.backup else None  # until a server begins
        self._reserve = DiskReserve(folder / NAME, settings.reserve_bytes)
        with self.closed_on_failure():
            self._load(logs.loaded)
            if write and logs.made:
                logs.active = logs.begin()

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
        """Write `identity` if a server wrote here, drop an unfinished merge, and close the files."""
        if self.logs.generation and self.logs.writes:
            self.note()
        self._abandon_merge()
        self.logs.close()

    # --- writing --------------------------------------------------------------------------------------------

    def write(self, records: Sequence[Fresh]) -> None:
        """Write all records in one group and sync it. Raises ``StorageUnavailable``: then none is written."""
        self.full = False
        if not records:
            return
        if any(one.kind != Kind.DROP for one in records):
            self._check_room(sum(one.size for one in records))
        deleted = [one.session for one in records if one.kind == Kind.DROP and one.flags & segment.ERASED]
        hold = [one for one in self.logs.logs.values() if any(map(one.has, deleted))]
        self._apply(records, *self._appended(records))
        if deleted:
            self._mark(hold)
        if self.logs.unnoted and self.logs.generation:
            self.note()

    def _appended(self, records: Sequence[Fresh]) -> tuple[list[int], int, int]:
        """Append the records to the logs (`LogFolder.append`). On a full disk what is dead gives way first,
        then the reserve, but for its last part if nothing of the records makes room, and then logs in which
        something is dead. Raises ``StorageUnavailable``."""
        while True:
            try:
                return self.logs.append(records)
            except StoreLost:
                raise
            except StorageUnavailable:
                size = sum(one.size for one in records)
                last = any(one.kind in (Kind.DROP, Kind.START) for one in records)
                if self.remove_dead():
                    continue
                if not self.logs.full:
                    raise
                if not self._reserve.give(size + BESIDE_BYTES, last=last) and not self._shrink():
                    raise

    def _shrink(self) -> bool:
        """On a full disk, rewrite one log in which something is dead, with all of the reserve. Returns whether
        that made room."""
        before, active = self.logs.bytes, self.logs.active
        if active is not None and active.dead > ROLLED_BYTES:
            self.logs.roll()
        victims = [one for one in self._victims(least=SHORT_SHARE) if one.dead > one.marks]
        try:
            self._merge_whole(victims[:1])
        except StorageUnavailable as fault:
            self._rest(fault)
        return self.logs.bytes < before

    def begin(self, generation: int) -> None:
        """Record that a server starts, as number ``generation``. Raises ``StorageUnavailable``."""
        self._appended([Fresh(0, generation, Kind.START, b"")])
        self.logs.generation, self._began, self._backup = generation, True, None
        self.note()
        self._hold()

    def watch(self) -> None:
        """To be called about once a second. Raises ``StoreLost`` if the store is not the caller's any more."""
        self.logs.clock.now()
        self.logs.check()
        self._hold()
        active = self.logs.active
        if active is not None and (self._is_due(active) or (self.short and active.dead > ROLLED_BYTES)):
            self.logs.roll()

    def _hold(self) -> None:
        """Take the reserve again if there is room for it."""
        if not self._reserve.whole and (free := self._free()) is not None:
            self._reserve.take(free)

    @property
    def short(self) -> bool:
        """Whether the disk is so full that the reserve is not held: what is dead gives way soon."""
        return self._began and not self._reserve.whole

    def note(self, without: Sequence[Log] = ()) -> None:
        """Write the file `identity`, as if the logs ``without`` were removed already. A failure is only
        logged: the file is written again after the next write. Nothing is written if the store is lost."""
        try:
            self.logs.check()
            identity = self.logs.identity(without)
            if (copy := self._backup) is not None:
                identity = replace(identity, backup=True, runs=copy.runs, copied=copy.copied)
            try:
                write_identity(self.folder, identity, self.logs.disk)
            except OSError as fault:
                if fault.errno not in NO_ROOM or not self._reserve.give(BESIDE_BYTES, last=bool(without)):
                    raise
                write_identity(self.folder, identity, self.logs.disk)
        except OSError as fault:
            log.warning("%s cannot be written: %s", self.folder / IDENTITY, fault.strerror)
        except StoreLost:
            return
        else:
            self.logs.unnoted = False

    def erase(self, numbers: Sequence[int], *, deleted: bool = False) -> None:
        """Forget these sessions: write a DROP record for each. Their bytes go with a later merge, soon if
        a client has ``deleted`` them. Raises ``StorageUnavailable``."""
        for at in range(0, len(numbers), SWEEP_SESSIONS):
            self.write([drop(number, deleted=deleted) for number in numbers[at : at + SWEEP_SESSIONS]])

    def _apply(self, records: Sequence[Fresh], locations: Sequence[int], first: int, moment: int) -> None:
        """Call this after a group was written: it updates the index, the live bytes of the logs, the tenants'
        shares and the set of sessions that are long enough to condense. ``locations``: those of the
        ``records``; ``first``: the sequence number of the first one; ``moment``: when, in microseconds of the
        store's clock."""
        states, logs = self.sessions.states, self.logs.logs
        changed: dict[int, SessionState] = {}
        erased: list[SessionState] = []
        for sequence, (one, location) in enumerate(zip(records, locations, strict=True), first):
            number = one.session
            if one.kind == Kind.DROP:
                changed.pop(number, None)
                if number in states:
                    changed[number] = states.edit(number)
                    changed[number].deleted |= bool(one.flags & segment.ERASED)
                self._damaged.discard(number)
                self._declined.pop(number, None)
                self.long.discard(number)
            else:
                logs[slot_of(location)].live += one.size
            erased += self.sessions.apply(one, location, sequence, moment)
            if number not in states:  # it is forgotten: what was queued for it meanwhile goes with it
                self._mark([logs[slot_of(location)]] if one.kind != Kind.DROP else [])
                continue
            self._note_removal(one)
            if one.kind == Kind.DROP and number in states:  # its forks need it
                self._note_pinned(number)
            if one.kind not in (Kind.DROP, Kind.KEYRING):
                changed[number] = states.edit(number)
            elif one.kind == Kind.KEYRING and number not in changed:
                self.retention.opened(states[number])
        for state in changed.values():
            self.retention.count(state, self._size(state))
            if state.kept and self._is_long(state):
                self.long.add(state.number)
        for state in erased:
            self.retention.count(state, 0)
            removal = self._removals.pop(state.number, None)
            if state.deleted or removal is not None:  # while its forks needed it, it stayed
                since = None if removal is None else removal.since
                self._mark([one for one in self.logs.logs.values() if one.has(state.number)], since)
        states.rest()

    def _note_pinned(self, number: int) -> None:
        """Remember this forgotten session if a client has deleted it and its forks do not have all of its
        text: they are condensed then, and do not need it any more."""
        if self.sessions.states[number].deleted and self.sessions.outlasts(number):
            self._removals.setdefault(number, _Removal())

    def _note_removal(self, one: Fresh) -> None:
        """Remember that this operation removed items from its session; or that a snapshot has replaced it,
        so that their text leaves the logs with the records before."""
        if one.kind == Kind.OPERATION and one.flags & segment.ERASED:
            self._removals.setdefault(one.session, _Removal()).index = one.index
            return
        removal = self._removals.get(one.session)
        if removal is not None and one.kind == Kind.SNAPSHOT and removal.index <= one.index:
            del self._removals[one.session]
            if removal.index < 0:
                return
            self._mark([log for log in self.logs.logs.values() if log.has(one.session)], removal.since)

    def _size(self, state: SessionState) -> int:
        """Bytes that a session's record and operations take in the logs; without its keyring."""
        return self.logs.size(state.record) + state.base + state.grown

    def _died(self, location: int) -> None:
        """Called by the index when no session needs the record at ``location`` any more: subtracts its bytes
        from the live bytes of its log."""
        one = self.logs.logs.get(slot_of(location))
        if one is not None:
            one.live -= self.logs.size(location)

    def _is_long(self, state: SessionState) -> bool:
        """Whether a session is worth condensing, which reads all of it and writes a snapshot."""
        behind = len(state.operations)
        least = max(self._settings.snapshot_operations, AGAIN * self._declined.get(state.number, 0))
        return behind >= least and state.grown >= state.base

    @property
    def overlong(self) -> int | None:
        """The number of a session to `condense` next: of one with items that were removed ``erase_seconds``
        ago, or else a long one. None if there is none."""
        if self._has_old_removals:
            return next(iter(self._removals))
        return next(iter(self.long), None)

    @property
    def _has_old_removals(self) -> bool:
        first = next(iter(self._removals.values()), None)
        return first is not None and time.monotonic() - first.looked >= self._settings.erase_seconds

    def condense(self, number: int, how: Condense) -> bool:
        """Replace the first operations of session ``number`` by a snapshot that ``how`` makes, unless the
        session has forks. Returns whether that was done. Raises ``RecordDamaged``, ``StorageUnavailable``."""
        self.long.discard(number)
        state = self.sessions.states.get(number)
        if (removal := self._removals.pop(number, None)) is not None and state is not None:
            removal.looked = time.monotonic()
            self._removals[number] = removal
        if state is None:
            return False
        self._declined[number] = len(state.operations)
        if state.forks:
            if removal is not None:
                self._hurry_forks(number, removal.since)
            return False
        if state.record == MISSING:
            return False
        operations = self._operations(state)
        inherited = len(operations) - len(state.operations)
        count, snapshot = how(operations) or (0, None)
        if snapshot is None or count <= inherited:
            return False
        del self._declined[number]
        self.write([append(number, state.first + count - inherited - 1, snapshot)])
        return True

    def _hurry_forks(self, number: int, since: float) -> None:
        """Let the forks that need this session's operations be condensed next, the last begun first: none can
        be before its own forks are. ``since``: when text was removed from the session."""
        forks = sorted(filter(self.sessions.states.keeps, self.sessions.descendants(number)), reverse=True)
        first = {one: self._removals.pop(one, _Removal(since=since)) for one in forks}
        for removal in first.values():
            removal.looked = since
        self._removals = {**first, **self._removals}

    def free_bytes(self) -> int | None:
        """Bytes of the disk that the journal can still have: the free ones, and those of its reserve. None if
        that cannot be told."""
        free = self._free()
        return None if free is None else free + self._reserve.held

    def _free(self) -> int | None:
        try:
            return self.logs.free_bytes()
        except OSError:
            return None

    def sweep(self, keep: Container[int], *, aged: bool = True) -> int:
        """Forget the sessions that retention does not keep: those not used while servers ran for
        ``max_age_seconds`` (only if ``aged``), and those beyond ``max_sessions``; but none with a number in
        ``keep``. Returns how many. Raises ``StorageUnavailable``."""
        count = 0
        if aged:
            oldest = self.logs.clock.now() - self._settings.max_age_seconds * MICROSECONDS
            count += self._forget(self.retention.aged(oldest, keep), keep, "age")
        beyond = self.retention.beyond(self._settings.max_sessions, keep)
        return count + self._forget(beyond, keep, "number")

    def end_deletions(self) -> None:
        """Forget the sessions that clients have deleted while an earlier server used them. Raises
        ``StorageUnavailable``."""
        states = self.sessions.states
        self.erase([number for number in states if states.is_doomed(number)], deleted=True)

    def make_room(self, keep: Container[int]) -> bool:
        """Forget some sessions of the tenants that hold the most bytes, none with a number in ``keep``. Returns
        False if there is none to forget. Raises ``StorageUnavailable``."""
        return bool(self._forget(self.retention.largest(SWEEP_SESSIONS, keep), keep, "size"))

    def keep_shares(self, live: Container[int]) -> frozenset[bytes]:
        """Forget the sessions that tenants have beyond their shares, but none in ``live``, the sessions in
        memory. Returns the salts of the tenants that still have more bytes than their share. Raises
        ``StorageUnavailable``."""
        while gone := self.retention.surplus(live, SWEEP_SESSIONS):
            self._forget(gone, live, "share")
        return self.retention.full()

    def _forget(self, chosen: Sequence[int], keep: Container[int], why: str) -> int:
        """Forget the ``chosen`` sessions for a reason, one of `FORGOTTEN`, and say so; none that has come into
        ``keep`` since they were chosen. Returns how many they are."""
        # Another thread adds to `keep` and then looks at `going`: either it sees that a session goes, or this
        # sees that it is kept.
        self.going = frozenset(chosen)
        try:
            numbers = [number for number in chosen if number not in keep]
            if numbers:
                self.erase(numbers)
                self.forgotten[why] += len(numbers)
                log.info("%d sessions are forgotten: %s", len(numbers), FORGOTTEN[why])
        finally:
            self.going = frozenset()
        return len(numbers)

    # --- room -----------------------------------------------------------------------------------------------

    def _check_room(self, size: int) -> None:
        """Raises ``StorageUnavailable`` if ``size`` more bytes exceed the journal's size."""
        most = self._settings.max_bytes
        if self.logs.bytes + size <= most:
            return
        self._reclaim(size)
        if self.logs.bytes + size > most:
            self.full = True
            raise StorageFull(f"the journal has {self.logs.bytes} bytes, and may have no more")

    def _reclaim(self, size: int) -> None:
        """Try to make room for ``size`` bytes in the journal, now: remove dead logs, then merge others.
        Raises nothing; the caller checks whether there is room."""
        self.remove_dead()
        most = self._settings.max_bytes
        while self.logs.bytes + size > most:
            if self.logs.active is not None and self.logs.active.dead > self.logs.active.live:
                self.logs.roll()
                self.remove_dead()
            before = self.logs.bytes
            victims = self._victims(least=0.1)
            if not victims:
                return
            try:
                self._merge_whole(victims)
            except StorageUnavailable as fault:
                self._rest(fault)
                return
            if self.logs.bytes >= before:
                return

    def remove_dead(self) -> int:
        """Remove the logs without a needed record, after dropping an unfinished merge. Returns how many
        were removed. Writes no record."""
        self._abandon_merge()
        removed = 0
        while (one := next(dispensable(self.logs, self.sessions), None)) is not None:
            if not self._remove([one]):
                break
            removed += 1
        return removed

    def _remove(self, gone: Sequence[Log]) -> bool:
        """Remove these logs. Returns whether all could be removed. The file `identity` is written first,
        without them: a log that it lists and that is absent counts as lost."""
        if gone and self.logs.generation:
            self.note(without=gone)
        removed = True
        for one in gone:
            try:
                self.logs.remove(one)
            except OSError:
                removed = False
        return removed

    def _merge_whole(self, victims: list[Log]) -> None:
        """Merge these logs to the end, without pauses for other work. Raises ``StorageUnavailable``."""
        self._abandon_merge()
        while True:
            try:
                self._merge = Merge(self.logs, self.sessions, victims)
                while self._step():
                    pass
            except (OSError, ValueError, StorageUnavailable) as fault:
                if self._is_full(fault) and self._reserve.give(
                    sum(one.live for one in victims) + BESIDE_BYTES
                ):
                    continue
                if isinstance(fault, StorageUnavailable):
                    raise
                raise StorageUnavailable(str(fault)) from None
            return

    @staticmethod
    def _mark(logs: Iterable[Log], since: float | None = None) -> None:
        """Note that these logs have text that a client has deleted, at the time ``since`` (None: now): they
        are rewritten ``erase_seconds`` later."""
        since = time.monotonic() if since is None else since
        for one in logs:
            one.stained = since if one.stained is None else min(one.stained, since)

    def _is_due(self, one: Log) -> bool:
        return one.stained is not None and time.monotonic() - one.stained >= self._settings.erase_seconds

    @property
    def overdue(self) -> bool:
        """Whether deleted text has to leave the logs now, however much else there is to do."""
        return self._has_old_removals or any(map(self._is_due, self.logs.logs.values()))

    @property
    def wants_merge(self) -> bool:
        """Whether `merge` has something to do."""
        if self._merge is not None:
            return True
        return time.monotonic() >= self._resting and bool(self._victims())

    def merge(self) -> bool:
        """Do one slice of a merge. Returns whether there is more to do. If writing fails, that is logged,
        and no merge begins for `REST_SECONDS`."""
        victims = self._victims() if self._merge is None else self._merge.victims
        try:
            if self._merge is None:
                if not victims:
                    return False
                self._merge = Merge(self.logs, self.sessions, victims)
            return self._step()
        except Exception as fault:
            wanted = sum(one.live for one in victims) + BESIDE_BYTES
            if self._is_full(fault) and (self.remove_dead() or self._reserve.give(wanted)):
                return True
            self._rest(fault)
            if not isinstance(fault, OSError | StorageUnavailable | ValueError):
                raise
        return False

    def _is_full(self, fault: Exception) -> bool:
        """Whether this error of a merge is that the disk is full."""
        if isinstance(fault, OSError):
            return fault.errno in NO_ROOM
        return isinstance(fault, StorageUnavailable) and self.logs.full

    def _step(self) -> bool:
        """Do one slice of the merge that was begun; after the last, remove the old logs. Returns whether
        there is more to do. Raises what a slice raises: then the merge was dropped, and the logs stay as
        they were. Raises ``StorageUnavailable`` if an old log cannot be removed."""
        work = self._merge
        assert work is not None
        try:
            if not work.step():
                return True
        except BaseException:
            self._abandon_merge()
            raise
        self._merge = None
        emptied = [] if work.emptied is None else [work.emptied]
        if not (self._remove(work.victims) and self._remove(emptied)):
            raise StorageUnavailable("a log that was rewritten cannot be removed")
        return False

    def _abandon_merge(self) -> None:
        if self._merge is not None:
            self._merge.abandon()
            self._merge = None

    def _rest(self, fault: Exception) -> None:
        log.warning("the journal's logs were not merged: %s", fault)
        self._resting = time.monotonic() + (FULL_SECONDS if self._is_full(fault) else REST_SECONDS)

    def _victims(self, least: float | None = None) -> list[Log]:
        """Choose logs to rewrite into one: those of which more than the share ``least`` are bytes that no
        session needs, those with text that was deleted long enough ago, those of an earlier format, and small
        ones if there are `MOST_SMALL` of them; never the one that is being written. Empty if it is not worth
        it. Without ``least``, less is enough while the disk is full."""
        if least is None:
            least = SHORT_SHARE if self.short else DEAD_SHARE
        sealed = [one for one in self.logs.logs.values() if one is not self.logs.active]
        worn = [
            one
            for one in sealed
            if one.dead - one.marks > least * (one.end - LOG_START)
            or one.header.format < segment.FORMAT
            or self.logs.is_noted(one)
            or self._is_due(one)
        ]
        small = [one for one in sealed if one.end < SMALL_SHARE * self.logs.segment_bytes]
        if not worn and len(small) < MOST_SMALL:
            return []
        wanted = {id(one): one for one in [*worn, *(small if len(small) >= MOST_SMALL else [])]}
        return self._fitting(sorted(wanted.values(), key=lambda one: one.live))

    def _fitting(self, logs: Sequence[Log]) -> list[Log]:
        """The first of these logs that fit into one log together, one at least."""
        chosen: list[Log] = []
        size = 0
        for one in logs:
            size += one.live
            if (chosen and size > self.logs.segment_bytes) or len(chosen) == MOST_VICTIMS:
                break
            chosen.append(one)
        return chosen

    def rewrite(self) -> None:
        """Rewrite every log with the needed records alone. Raises ``StorageUnavailable``."""
        self.logs.roll()
        self.remove_dead()
        waiting = list(self.logs.logs.values())[::-1]
        while victims := self._fitting(waiting):
            del waiting[: len(victims)]
            self._merge_whole(victims)
        self.remove_dead()
        self.note()

    # --- reading --------------------------------------------------------------------------------------------

    def handle(self, digest: bytes) -> tuple[int, bytes] | None:
        """Find the session, or stored object, with a keyring that has this digest, such as that of a handle.
        Returns its number and its owner (the digest of an API key); None if the digest is not known. Raises
        ``RecordDamaged``, ``StorageUnavailable``."""
        number = self.sessions.handles.get(digest)
        return None if number is None else (number, self.record(number).owner)

    def session(self, number: int) -> StoredSession:
        """A session with all its operations. Raises ``RecordDamaged``, ``StorageUnavailable``."""
        state = self.sessions.states.get(number)
        if state is None or MISSING in (state.record, state.ring):
            raise RecordDamaged(f"a record of session {number} is missing")
        record = self.record(number)
        ring: Keyring = self._read(number, Kind.KEYRING, 0, state.ring, Keyring, number)
        return StoredSession(number, record, ring, self._operations(state), state.count)

    def record(self, number: int) -> SessionRecord:
        """The record of a session or a stored object. Raises ``RecordDamaged``, ``StorageUnavailable``."""
        state = self.sessions.states.get(number)
        if state is None or state.record == MISSING:
            raise RecordDamaged(f"the record of session {number} is missing")
        found: SessionRecord = self._read(number, Kind.SESSION, 0, state.record, SessionRecord, number)
        return found

    def walk(self, before: int | None, most: int, salt: bytes | None = None) -> Walk:
        """Look at ``most`` of all sessions and stored objects, the latest made first. ``before``: where the
        walk before this one has ended; None begins it. ``salt``: find only those of this tenant; None: of all.
        Raises ``StorageUnavailable``."""
        states, found, cursor = self.sessions.states, list[tuple[int, int, SessionRecord | None]](), 0
        for cursor, number in self.sessions.handles.rows(before, most):
            if not states.keeps(number) or states.is_doomed(number):
                continue
            if salt is None or states[number].salt == salt:
                try:
                    found.append((cursor, number, self.record(number)))
                except RecordDamaged:
                    found.append((cursor, number, None))
        return Walk(tuple(found), cursor or None)

    def search(
        self, before: int | None, most: int, session_id: str
    ) -> tuple[tuple[int, int, SessionRecord | None] | None, int | None]:
        """Look for the session with this id in a part of a walk, a damaged one by its `name_of`. Returns what
        `Walk.found` has of it, None if it is not there, and the `Walk.cursor`. Raises
        ``StorageUnavailable``."""
        walk = self.walk(before, most)
        for one in walk.found:
            _, number, record = one
            if session_id == (self.name_of(number) if record is None else record.is_session and record.id):
                return one, walk.cursor
        return None, walk.cursor

    def unused_seconds(self, number: int) -> float | None:
        """For how long servers have run since the session was last written to; None if it is not kept."""
        if not self.sessions.states.keeps(number):
            return None
        return (self.logs.clock.now() - self.sessions.states[number].used) / MICROSECONDS

    def fork_tree(self, number: int) -> list[tuple[int, SessionRecord]]:
        """Number and record of each session of this one's fork tree that is kept and not damaged. Raises
        ``RecordDamaged`` if this session's own record is damaged, and ``StorageUnavailable``."""
        found = [(number, self.record(number))]
        for one in self.sessions.fork_tree(number):
            if one != number:
                with suppress(RecordDamaged):
                    found.append((one, self.record(one)))
        return sorted(found, key=lambda pair: pair[0])

    def damaged(self) -> list[int]:
        """The numbers of the sessions known to be damaged."""
        states = self.sessions.states
        return sorted(number for number in self._damaged if number in states and states[number].kept)

    def statistics(self) -> dict[str, float]:
        """Counts for metrics, by name: sessions, bytes of the logs in all and of needed records, logs, damaged
        sessions, lost records of unknown sessions, and differences from the last start."""
        return {
            "journal_sessions": float(len(self.sessions.states)),
            "journal_bytes": float(self.logs.bytes),
            "journal_live_bytes": float(sum(one.live for one in self.logs.logs.values())),
            "journal_logs": float(len(self.logs.logs)),
            "journal_damaged": float(len(self.damaged())),
            "journal_lost_records": float(self.logs.findings.lost),
            "journal_mismatch": float(len(self.mismatches)),
            **{f"journal_forgotten_{why}": float(self.forgotten[why]) for why in FORGOTTEN},
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
        """Build the index in memory from ``parts``, the records of all logs; count the live bytes of each
        log; write what is damaged to the server's log."""
        used: list[tuple[int, int, int]] = []

        def loaded(state: SessionState) -> None:
            if state.record:
                state.counted = self._size(state)
                used.append((state.used, state.last, state.number))

        deleted = self.sessions.load(parts, loaded)
        pinned = [number for number in deleted if number in self.sessions.states]
        gone = set(deleted).difference(pinned)
        self._mark(one for one in self.logs.logs.values() if any(map(one.has, gone)))
        condensed = set[int]()
        for number, index, replaced in self.sessions.removals():
            if replaced:
                condensed.add(number)
            else:
                self._removals[number] = _Removal(index)
        logs, sessions = self.logs, self.sessions
        self._mark(one for one in logs.logs.values() if has_replaced(logs, sessions, one, condensed))
        for number in pinned:
            self._note_pinned(number)
        for _, _, number in sorted(used):  # the order in which retention forgets them
            if number in self.sessions.states:
                self.retention.enter(self.sessions.states[number])
        for one in self.logs.logs.values():
            one.live = 0
        for locations in self.sessions.states.all_locations():
            slots = (locations >> SLOT_SHIFT).astype(np.int64)
            sizes = np.bincount(slots, weights=self.sessions.bytes_at(locations).astype(float))
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

    def _operations(self, state: SessionState) -> tuple[AnyOperation, ...]:
        """All operations that a session's history needs, in order, those of the sessions that it was forked
        from too. Raises ``RecordDamaged``, ``StorageUnavailable``."""
        found: list[AnyOperation] = []
        for owner, index, location in self.sessions.needed(state.number):
            kind = owner.kind_at(index)
            found.append(self._read(owner.number, kind, index, location, AnyOperation, state.number))
        return tuple(found)

    def _read(self, number: int, kind: Kind, index: int, location: int, form: Any, needed_by: int) -> Any:
        """Read the record at ``location`` and decode it as the type ``form``. It is the record of session
        ``number`` with this ``kind`` and ``index``. Raises ``RecordDamaged``: then that session and session
        ``needed_by``, which needs the record, count as damaged from now on. Raises ``StorageUnavailable``."""
        try:
            return self._decoded(location, kind, number, index, form)
        except RecordDamaged as fault:
            if location not in (HIT, MISSING):
                self.logs.mark_dirty(location)
            self.sessions.hit(number, kind, index)
            states = self.sessions.states
            hit = {one for one in (number, needed_by) if one in states and states[one].kept}
            fresh = hit - self._damaged
            self._damaged |= hit
            if fresh:
                names = [self.name_of(one) for one in sorted(fresh)]
                log.error("the journal is damaged: session %s is lost: %s", named(names), fault.message)
            raise

    def _decoded(self, location: int, kind: Kind, number: int, index: int, form: Any) -> Any:
        if location in (HIT, MISSING):
            what = f"operation {index}" if kind in (Kind.OPERATION, Kind.SNAPSHOT) else kind.name.lower()
            raise RecordDamaged(f"session {number}: its {what} is {'damaged' if location else 'missing'}")
        found = self.logs.read(location)
        if (found.session, found.kind, found.index) != (number, kind, index):
            raise RecordDamaged(f"session {number}: another record stands instead of its {kind.name.lower()}")
        try:
            return msgspec.msgpack.decode(found.payload, type=form)
        except (msgspec.MsgspecError, RecursionError) as fault:
            raise RecordDamaged(f"a record of session {number} cannot be read: {fault}") from None
