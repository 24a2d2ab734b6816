"""Merge: rewrites logs in which few records are still needed. These go to a new log, which replaces the
old ones.

It runs in slices, so that commits and readers do not wait. The new log is written under another name and synced
slice by slice; when it is whole it is renamed, and its header names the logs that it replaces. If a start finds
both, it removes the old ones. Records keep their sequence numbers. A drop is kept as long as any log has a
record of its session, and so are the marks of damaged records. An operation that removed items is kept as long
as another stained log has records of its session: by it a start finds those that are to be rewritten.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Iterator, Sequence

import numpy as np

from ..errors import RecordDamaged
from . import segment
from .logs import Log, LogFolder
from .segment import ENTRY, ERASED, GROUP_END, HIT, LOG_START, LOST, MISSING, Kind, location_of
from .state import Moved, Sessions

SLICE_BYTES = 256 << 10  # of one slice: some milliseconds
SLICE_RECORDS = 1000


class Merge:
    """One merge: writes the needed records of some logs, ``victims``, into a new log. None of them may be
    the log that is being written. Call `step` until it returns true."""

    def __init__(self, logs: LogFolder, sessions: Sessions, victims: Sequence[Log]) -> None:
        self.victims = list(victims)
        self._logs = logs
        self._sessions = sessions
        self._out = logs.begin(self._replaced(), logs.folder / f"merged-{logs.run:016x}.log.new")
        self._rows: list[segment.Row] = []
        self._extras: dict[int, bytes] = {}
        self._moved: dict[int, list[Moved]] = {}  # by session
        self._marks = (
            0  # bytes of records that are not of a session: starts, and marks that one was forgotten
        )
        self._work = self._copies()

    def _replaced(self) -> list[int]:
        """The numbers of the logs that the new log replaces: the victims, and logs that these replaced earlier
        and that could not be removed yet."""
        there = {one.number for one in self._logs.logs.values()}
        older = (number for one in self.victims for number in one.header.replaces if number in there)
        return sorted({*older, *(one.number for one in self.victims)})

    @property
    def emptied(self) -> Log | None:
        """The new log, if no record was needed, so that it only says which logs it replaces: the caller removes
        it after those. None otherwise."""
        return self._out if self._out.end == LOG_START else None

    def step(self) -> bool:
        """Write one slice of the new log. Returns True when the new log is whole and in place: then the caller
        removes the ``victims``, and `emptied`. If it raises, call `abandon`: another `step` would leave out the
        rest of the records."""
        pieces: list[bytes] = []
        size, begin, whole = 0, self._out.end, True
        for piece in self._work:
            pieces.append(piece)
            size += len(piece)
            if size >= SLICE_BYTES or len(pieces) >= SLICE_RECORDS:
                whole = False
                break
        if pieces:
            fd = self._logs.opened(self._out)
            self._logs.disk.write(fd, b"".join(pieces), begin)
            if not whole:
                self._logs.disk.sync(fd)
        if whole:
            self._finish()
        return whole

    def abandon(self) -> None:
        """Drop the new log; the old ones stay."""
        self._work.close()
        self._logs.discard(self._out)

    def _copies(self) -> Generator[bytes, None, None]:
        """The bytes of the records to keep; a damaged one becomes a mark that it was lost."""
        for one in self.victims:
            entries, extras = self._logs.entries_of(one)
            for at in range(0, len(entries), SLICE_RECORDS):
                part = entries[at : at + SLICE_RECORDS]
                for session, row in zip(segment.sessions_of(part), part.tolist(), strict=True):
                    if copy := self._copy(one, session, row, extras.get(row[4], b"")):
                        yield copy

    def _copy(self, one: Log, session: int, row: segment.Row, extra: bytes) -> bytes | None:
        """The bytes of one record of the old log ``one`` for the new log; None if the record is not needed.
        Also stores where it will be. ``session``: its session's number. ``row``: its entry in the index of
        ``one``. ``extra``: the part of its content that the index has too (`records.extra_of`)."""
        sequence, _, word, moment, offset, _, length, _ = row
        kind, index = word >> 8 & 0xFF, word >> 16
        payload, source = b"", location_of(one.slot, offset, one.header.frame.padded(length))
        if kind == Kind.START:
            if index != self._logs.generation:
                return None
        elif kind == Kind.DROP:
            if not self._is_needed(session):
                return None
        else:
            valid = self._sessions.location(session, kind, index)
            if valid == source:
                try:
                    payload = self._logs.read(source).payload
                except RecordDamaged:
                    self._sessions.hit(session, kind, index)
                    valid = HIT
            if valid == HIT:
                word, payload = word | LOST, extra
            elif valid != source:
                marks = valid == MISSING and word & ERASED and session in self._sessions.states
                if not (marks and _is_stained(self._logs, session, self.victims)):
                    return None
                try:
                    payload = self._logs.read(source).payload
                except RecordDamaged:
                    return None
        out, at, word = self._out, self._out.end, word | GROUP_END
        data = segment.encoded_record(out.header.frame, at, sequence, session, word, moment, payload)
        self._rows.append(segment.entry(sequence, session, word, moment, at, len(payload), len(extra)))
        if extra:
            self._extras[at] = extra
        target = location_of(out.slot, at, len(data))
        self._moved.setdefault(session, []).append((kind, index, source, target))
        out.end += len(data)
        if kind in (Kind.START, Kind.DROP) or word & LOST or valid == MISSING:
            self._marks += len(data)
        return data

    def _is_needed(self, session: int) -> bool:
        """Whether the mark that a session was forgotten (its DROP record) must be kept, because the session
        still has records: in the index in memory, in the new log, or in a log that stays."""
        if session in self._sessions.states or session in self._moved:
            return True
        return any(one.has(session) for one in self._logs.logs.values() if one not in self.victims)

    def _finish(self) -> None:
        self._logs.adopt(self._out, np.array(self._rows, dtype=ENTRY), self._extras)
        for session, records in self._moved.items():
            self._out.live += sum(map(self._logs.size, self._sessions.moved(session, records)))
            self._sessions.states.rest()
        if self._out.dead > self._marks and any(one.stained is not None for one in self.victims):
            self._out.stained = time.monotonic()  # something was deleted after it was copied
        self._out.marks = self._out.dead


def _is_stained(logs: LogFolder, session: int, but: Sequence[Log]) -> bool:
    """Whether a log, not one of ``but``, has records of this session and is to be rewritten soon."""
    return any(one.stained is not None and one.has(session) for one in logs.logs.values() if one not in but)


def has_replaced(logs: LogFolder, sessions: Sessions, one: Log, numbers: Collection[int]) -> bool:
    """Whether the log has operations of one of the sessions ``numbers`` that a snapshot has replaced. Those
    that removed items do not count; a log that cannot be read counts."""
    if not any(map(one.has, numbers)):
        return False
    try:
        entries, _ = logs.entries_of(one)
    except OSError:
        return True
    entries = entries[(segment.kinds_of(entries) <= Kind.SNAPSHOT) & (entries["word"] & ERASED == 0)]
    for session, row in zip(segment.sessions_of(entries), entries.tolist(), strict=True):
        if session in numbers:
            source = location_of(one.slot, row[4], one.header.frame.padded(row[6]))
            if sessions.location(session, row[2] >> 8 & 0xFF, row[2] >> 16) not in (source, HIT):
                return True
    return False


def dispensable(logs: LogFolder, sessions: Sessions) -> Iterator[Log]:
    """The logs that can be removed because no session needs a record of theirs, the oldest first. Remove each
    before asking for the next.

    Not among them are: the log that is being written; one that cannot be read; one that replaces a log that is
    still there; one with the record of the present server start; one with the mark that a session was forgotten
    of which other logs have records; one with an operation that removed items of which another stained log may
    have the text; and one with the mark of a damaged record.
    """
    for one in sorted(logs.logs.values(), key=lambda one: one.number):
        if one is logs.active or one.live:
            continue
        others = [other for other in logs.logs.values() if other is not one]
        if any(other.number in one.header.replaces for other in others):
            continue
        try:
            entries, _ = logs.entries_of(one)
        except OSError:
            continue
        kinds, indexes = segment.kinds_of(entries), entries["word"] >> 16
        if (indexes[kinds == Kind.START] == logs.generation).any():
            continue
        dropped = set(segment.sessions_of(entries[kinds == Kind.DROP]))
        if any(number in sessions.states or any(other.has(number) for other in others) for number in dropped):
            continue
        removers = entries[(kinds == Kind.OPERATION) & (entries["word"] & ERASED != 0)]
        removed = set(segment.sessions_of(removers)) & sessions.states.keys()
        if any(_is_stained(logs, number, [one]) for number in removed):
            continue
        keys = zip(segment.sessions_of(entries), kinds.tolist(), indexes.tolist(), strict=True)
        if any(sessions.location(*key) == HIT for key in keys):
            continue
        yield one
