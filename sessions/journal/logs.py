"""The log files of one store: opened and checked, appended to in groups, read, removed.

They are files `NNNNNNNN.log` in one folder, each with an `NNNNNNNN.index` beside it that may be missing or
damaged. One log is active: groups go to its end. A group that cannot be written is cut off again. After a
failed sync the log's end is not trusted, and a new log begins. Knows where a record lies, not what it
means.

Only the run (`segment`) that has made a log writes to it, and a log's file is made only where none was: so one
run alone has each number, and it knew all logs with lower ones. What a run finds of the others it takes as it
is then: where each unfinished log ended stands in the headers of its own logs, and what comes behind that point
later counts for nothing. A group is written when, after it is on the disk, the store is still this run's
(`LogFolder.check`).
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace as changed

from ...kvstore.folder_lock import elsewhere, make_private
from ...kvstore.system_limits import errno_of, explained
from ..errors import (
    RecordDamaged,
    StorageFull,
    StorageUnavailable,
    StoreForeign,
    StoreLost,
    StoreNewer,
    StoreUnusable,
)
from . import segment
from .clock import ServedClock
from .folder import RUNS, Disk, Identity, mismatch
from .records import extra_of
from .segment import LOG_START, Found, Fresh, LoadedLog, SegmentHeader

log = logging.getLogger(__name__)

NAME = re.compile(r"(\d{8,})\.log")
INDEX_NAME = re.compile(r"(\d{8,})\.index")
MOST_AHEAD = 2 << 20  # the most bytes of zeros that are written ahead, behind the active log's end
PLENTY = 128  # zeros are written ahead only if this many times as much is free
MOST_ENDS = 64  # of unfinished logs, in a header
TRIES = 20  # attempts to read a log to which a server may write at the same time
TRY_SECONDS = 0.002
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(slots=True, eq=False)
class Log:
    """One log file. ``slot``: a small number that this process gives it; the location of a record begins with
    it. ``end``: the offset at which the next group of records is written. ``room``: the file's length, which
    may include zeros behind ``end``. ``index_end``: the length of its index.

    ``live``: bytes of records that are still needed. ``marks``: bytes of other records that a merge kept,
    such as those that a session was forgotten. ``stained``: since when, by the monotonic clock, it has records
    of a session that a client has deleted; None: it has none. ``sessions``: the marks (`segment.mark_of`),
    sorted, of the sessions of which it had records when it was opened or sealed; ``fresh``: those added since.
    ``dirty``: damage was found in it.
    """

    slot: int
    header: SegmentHeader
    path: Path
    end: int = LOG_START
    room: int = 0
    index_end: int = 0
    fd: int | None = None
    index_fd: int | None = None
    live: int = 0
    marks: int = 0
    sessions: Any = field(default_factory=lambda: np.empty(0, np.uint64))
    fresh: set[int] = field(default_factory=set)
    dirty: bool = False
    stained: float | None = None

    @property
    def number(self) -> int:
        """The number in the name of the log's file."""
        return self.header.number

    @property
    def index_path(self) -> Path:
        """The path of the log's index, beside the log."""
        return self.path.with_suffix(".index")

    @property
    def dead(self) -> int:
        """Bytes of records in this log that no session needs."""
        return max(0, self.end - LOG_START - self.live)

    def has(self, session: int) -> bool:
        """Whether the log has records of the session with the number ``session``, needed or not. Very rarely it
        says so of a session that it has none of."""
        mark = segment.mark_of(session)
        if mark in self.fresh:
            return True
        at = int(np.searchsorted(self.sessions, np.uint64(mark)))
        return at < len(self.sessions) and int(self.sessions[at]) == mark


@dataclass(slots=True)
class Findings:
    """What was wrong when the logs were opened. ``lines``: texts for the server's log. ``damaged``: paths of
    damaged logs. ``lost``: how many records are lost of which the session is not known."""

    lines: list[str] = field(default_factory=list)
    lost: int = 0
    damaged: list[str] = field(default_factory=list)

    def report(self, line: str, path: Path | None = None, lost: int = 0) -> None:
        """Add what was found: ``line``, a text for the server's log; ``path``, that of a damaged log;
        ``lost``, how many records are lost of which the session is not known."""
        self.lines.append(line)
        self.lost += lost
        if path is not None:
            self.damaged.append(str(path))


class LogFolder:
    """The log files in ``folder``, their indexes, and the one log, ``active``, to which groups of records are
    written. One thread uses it."""

    def __init__(
        self,
        folder: Path,
        model: bytes,
        segment_bytes: int,
        disk: Disk,
        known: Identity | None = None,
        *,
        write: bool = True,
        whole: bool = False,
        lost: Callable[[], str] = str,
        clock: ServedClock | None = None,
    ) -> None:
        """``model``: the digest of the model that is served; empty accepts any. ``segment_bytes``: the size at
        which a log is sealed. ``known``: the store's identity, in case no header can be read. If not ``write``,
        no file is changed, and a server may run beside: the logs are those of one moment. ``whole``: read every
        log, not only its index. ``lost``: why the store is not this process's any more, "" if it is. ``clock``:
        None makes one. Raises ``StoreForeign``, ``StoreNewer``, ``StoreUnusable``.
        """
        self.folder = folder
        self.writes = write
        self.disk = disk
        self.clock = clock or ServedClock()
        """Gives the time of the records that are written."""
        self.segment_bytes = segment_bytes
        self.logs: dict[int, Log] = {}
        self.active: Log | None = None
        self.findings = Findings()
        self.next_sequence = 1
        self.generation = 0
        self.full = False
        """Whether the last group could not be written for lack of room on the disk."""
        self.made = False
        self._begun = False  # there was no journal when it was opened
        self.vanished: list[str] = []
        """Texts for the server's log about logs that are absent although their indexes list records."""
        self.explained: set[int] = set()
        """Numbers of logs that are absent for a known reason: replaced, or named in ``vanished``."""
        self.cut: set[int] = set()
        """Numbers of logs that are shorter than the store's identity says."""
        self.holed: set[int] = set()
        """Numbers of logs of which records are lost, between others, whose sessions are not known."""
        self.runs: tuple[tuple[int, int], ...] = ()
        """The runs of which nothing is lost, as in `Identity`; this one, if it writes, is the last."""
        self.unnoted = False
        """Whether logs were added or removed since `identity` was written."""
        self.run = secrets.randbits(64) | 1
        """Marks the sessions that are begun by this opening of the folder."""
        self.header = SegmentHeader(format=segment.FORMAT, store=b"", seed=0, sync=b"", model=b"", number=0)
        self._lost = lost
        self._astray = False  # the last `check` failed
        self._folder_fd: int | None = None  # the folder, opened
        self._next_count = 1
        self._ends: dict[int, int] = {}  # by number, where unfinished logs of earlier runs end
        self._slots = iter(range(1, segment.MOST_SLOTS))
        self._free_slots: list[int] = []
        self._next_number = 1
        self._believing = not whole
        self._ahead = min(MOST_AHEAD, segment_bytes // 16)
        self._uncut: list[Log] = []
        """Logs with a failed group at their end that could not be cut off."""
        self._held: dict[int, int] = {}
        """Descriptors of the logs, opened before any is read, if a server may remove logs meanwhile."""

        self.loaded: list[LoadedLog] = []
        """Of each log that was there, where its records lie."""
        try:
            self.loaded += self._opened(model, known)
            self._follow(known)
        except OSError as fault:
            self.close()
            raise StoreUnusable(explained(fault, f"the journal {folder}")) from None
        except BaseException:
            self.close()
            raise

    # --- opening --------------------------------------------------------------------------------------------

    def identity(self, without: Sequence[Log] = ()) -> Identity:
        """What the file `identity` is to say of the store now: its headers' values, counters and the numbers of
        its logs, as if the logs ``without`` were removed already."""
        header, gone = self.header, {one.number for one in without}
        there = [one for one in self.logs.values() if one.number not in gone]
        return Identity(
            format=segment.FORMAT,
            store=header.store,
            seed=header.seed,
            sync=header.sync,
            model=header.model,
            generation=self.generation,
            sequence=self.next_sequence,
            logs=tuple(sorted(one.number for one in there)),
            keys={one.number: one.header.key for one in there},
            ends={one.number: one.end for one in there if one.end > LOG_START},
            holed=tuple(sorted(one.number for one in there if one.number in self.holed)),
            time=self.clock.now(),
            runs=self.runs,
        )

    def mismatch(self, known: Identity | None) -> str:
        """How the logs differ from the identity ``known``, as a sentence; "" if they do not."""
        found = self.identity()
        return mismatch(known, found, fresh=self._begun, absent=self.explained, cut=self.cut)

    def _follow(self, known: Identity | None) -> None:
        """Set `runs`: if nothing was lost since ``known`` was written, they go on from its runs."""
        self._begun = self.made
        if known is not None and not (self.mismatch(known) or self.vanished or self.holed - {*known.holed}):
            self.runs = known.runs
        if self.writes:
            self.runs = (*self.runs, (self.run, self.next_sequence))[-RUNS:]

    @property
    def next_session(self) -> int:
        """The number of the next session that is begun. Those behind it are `segment.HIGH` bits higher,
        each."""
        return self._next_count << segment.HIGH | self.run

    def is_noted(self, one: Log) -> bool:
        """Whether this log is one of so many unfinished ones that the headers of later logs have no room for
        more."""
        return len(self._ends) > MOST_ENDS and one.number in self._ends

    def check(self) -> None:
        """Raises ``StoreLost`` if another server may have the store now, or if this folder or the log that is
        being written is not at its path any more."""
        why = self._lost()
        opened = [(self.folder, self._folder_fd)]
        if self.active is not None:
            opened.append((self.active.path, self.active.fd))
        for path, fd in opened:
            if not why and fd is not None and (moved := elsewhere(path, fd)):
                why = f"{path} {moved}"
        self._astray = bool(why)
        if why:
            raise StoreLost(why)

    def close(self) -> None:
        """Cut the active log behind its last whole group, cut off groups that failed, sync the active log's
        index, and close all files. The log is not sealed, so that the next start reads it: damage to what was
        written last is found then."""
        if self.active is not None:
            self._cut(self.active)
            if self.active.index_fd is not None:
                with suppress(OSError):
                    self.disk.sync(self.active.index_fd)
        with suppress(StorageUnavailable):
            self._cut_failed()
        self.active = None
        for one in self.logs.values():
            self._close_files(one)
        for fd in (*self._held.values(), *([] if self._folder_fd is None else [self._folder_fd])):
            os.close(fd)
        self._held.clear()
        self._folder_fd = None

    def _opened(self, model: bytes, known: Identity | None) -> list[LoadedLog]:
        if self.writes:
            make_private(self.folder.parent)
            make_private(self.folder)
            self._folder_fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        numbers = self._listed() if self.writes else self._hold()
        headers = {number: self._header_of(number) for number in numbers}
        for number in [number for number, header in headers.items() if header is None]:
            path = self._path(number)
            if self._length_of(number) <= LOG_START and not path.with_suffix(".index").exists():
                numbers.remove(number)  # the process died while it made this log: it has no record
                del headers[number]
                if self.writes:
                    self.disk.remove(path)
        self._choose(headers, known, model)
        if not self.header.store:
            if numbers:
                for path in map(self._path, numbers):
                    self.findings.report(
                        f"{path} cannot be read as a log: its sessions are lost", path, lost=1
                    )
                    if self.writes:
                        self.disk.rename(path, path.with_suffix(".unreadable"))
            self.header = _new_header(model)
            self._next_number = max([0, *numbers]) + 1
            self.made = True
            return []
        self._next_number = max(numbers, default=0) + 1
        ours: dict[int, SegmentHeader] = {}
        for number, found in headers.items():
            header = found or self._guessed(number, known)
            if (header.store, header.number) == (self.header.store, number):
                ours[number] = header
            else:
                path = self._path(number)
                self.findings.report(f"{path} belongs to another journal, or elsewhere: it is ignored", path)
        replaced = {gone for header in ours.values() for gone in header.replaces}
        for number, end in (pair for header in ours.values() for pair in header.ends.items()):
            if number in ours.keys() - replaced:
                self._ends[number] = min(end, self._ends.get(number, end))
        self.explained |= replaced
        self._find_vanished(set(numbers), replaced, known)
        loaded: list[LoadedLog] = []
        for number, header in ours.items():
            if number in replaced:
                if self.writes:
                    self.disk.remove(self._path(number).with_suffix(".index"))
                    self.disk.remove(self._path(number))
                continue
            part = self._load(header, 0 if known is None else known.ends.get(number, 0))
            loaded.append(part)
            sequence, high, time = (
                int(part.entries[name].max(initial=0)) for name in ("sequence", "high", "time")
            )
            self.next_sequence = max(self.next_sequence, header.next_sequence, sequence + 1)
            self._next_count = max(self._next_count, header.next_session if header.key else 1, high + 1)
            self.clock.begin(time)
            starts = part.entries["word"][segment.kinds_of(part.entries) == segment.Kind.START] >> 16
            self.generation = max(self.generation, header.generation, int(starts.max(initial=0)))
        if known is not None and known.store == self.header.store:
            self.clock.begin(known.time)
        return loaded

    def _guessed(self, number: int, known: Identity | None) -> SegmentHeader:
        """The header of a log of which no copy can be read, as far as the store's identity ``known`` tells
        it."""
        key = 0 if known is None else known.keys.get(number, 0)
        return changed(self.header, number=number, key=key, format=segment.FORMAT if key else 3)

    def _listed(self) -> list[int]:
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        for name in [name for name in names if NAME.fullmatch(name) or INDEX_NAME.fullmatch(name)]:
            path = self.folder / name
            if path.is_dir():
                self.findings.report(f"{path} is a folder, not a file of the journal: it is ignored")
                names.remove(name)
                if self.writes:
                    self.disk.rename(path, path.with_name(f"{name}.unreadable"))
        numbers = sorted(int(found[1]) for name in names if (found := NAME.fullmatch(name)))
        if self.writes:
            for name in names:
                if name.endswith(".new"):  # left by an unfinished merge
                    self.disk.remove(self.folder / name)
        return numbers

    def _hold(self) -> list[int]:
        """Open all logs, as they were at one moment, to read them beside a server; returns their numbers. A
        merge adds its log before it removes those that it replaces. So if all listed logs are still there
        after they were opened, the list was complete. Raises ``StoreUnusable`` if it changes too fast."""
        for attempt in range(TRIES):
            numbers = self._listed()
            with suppress(FileNotFoundError):
                for number in numbers:
                    self._held[number] = self.disk.open(self._path(number))
                if set(numbers) <= set(self._listed()):
                    return numbers
            while self._held:
                os.close(self._held.popitem()[1])
            time.sleep(attempt * TRY_SECONDS)
        raise StoreUnusable(f"the journal {self.folder} changes faster than it can be read")

    def _length_of(self, number: int) -> int:
        held = self._held.get(number)
        return self._path(number).stat().st_size if held is None else self.disk.size(held)

    def _find_vanished(self, numbers: set[int], replaced: set[int], known: Identity | None) -> None:
        """Report each log that is absent while its index is there. A server removes the index first, so
        something else removed these logs.

        ``numbers``: those of the logs that are there. ``replaced``: those of logs that a merge replaced,
        which are not reported. A server removes the index of an absent log.
        """
        for path in sorted(self.folder.glob("*.index")):
            if not (found := INDEX_NAME.fullmatch(path.name)) or (number := int(found[1])) in numbers:
                continue
            if not self.writes and self._path(number).exists():  # a server has just made it
                continue
            data = self.disk.contents(path, segment.HEADER_BYTES)
            header = segment.decoded_header(data, segment.INDEX_MAGIC) or self._guessed(number, known)
            one = Log(0, header, self._path(number))
            index = self._index_of(one)
            if number not in replaced and index and (entries := len(index.entries)):
                line = (
                    f"{one.path} is gone, and {entries} records with it: sessions that began in it are lost"
                )
                self.findings.report(line, one.path)
                self.vanished.append(line)
                self.explained.add(number)
            if self.writes:  # a later log may get this number
                self.disk.remove(path)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08}.log"

    def _header_of(self, number: int) -> SegmentHeader | None:
        """The header of the log with this number, from one of its two copies or from its index. None if none
        can be read."""
        path = self._path(number)
        if (held := self._held.get(number)) is None:
            data = self.disk.contents(path, LOG_START)
        else:
            data = self.disk.readable(held, LOG_START)
        beside = self.disk.contents(path.with_suffix(".index"), segment.HEADER_BYTES)
        return (
            segment.decoded_header(data[: segment.HEADER_BYTES], segment.LOG_MAGIC)
            or segment.decoded_header(data[segment.HEADER_BYTES :], segment.LOG_MAGIC)
            or segment.decoded_header(beside, segment.INDEX_MAGIC)
        )

    def _choose(self, headers: dict[int, SegmentHeader | None], known: Identity | None, model: bytes) -> None:
        """Set the store's header from the logs: the newest header of the store that most of the logs belong to.

        ``headers``: the header of each log, by the log's number; None if it cannot be read. ``known``: the
        store's identity, used if no header can be read; None if that is not known, either. ``model``: the
        digest of the model that is served; empty accepts any. Sets nothing if no header is known. Raises
        ``StoreNewer``, or ``StoreForeign`` if the store is another model's.
        """
        found = [one for one in headers.values() if one is not None]
        if not found:
            if headers and known is not None and model in (b"", known.model):
                self.header = changed(known.header(), format=segment.FORMAT)
            return
        newer = [one.format for one in found if one.format > segment.FORMAT]
        if newer:
            raise StoreNewer(
                f"the store {self.folder.parent} has format {max(newer)}; "
                f"this version reads up to {segment.FORMAT}"
            )
        counts: dict[bytes, int] = {}
        for one in found:
            counts[one.store] = counts.get(one.store, 0) + 1
        best = max(found, key=lambda one: (counts[one.store], one.number))
        if model and best.model != model:
            raise StoreForeign(f"the store {self.folder.parent} was written for another model")
        self.header = changed(best, format=segment.FORMAT, key=0, replaces=(), ends={})

    def _load(self, header: SegmentHeader, least: int) -> LoadedLog:
        """Open a log and find its records. ``least``: the length that it had earlier."""
        one = Log(self._new_slot(), header, self._path(header.number))
        self.logs[one.slot] = one
        one.fd = self.disk.open(one.path) if self.writes else self._held.pop(header.number)
        index, size = self._index_of(one), self.disk.size(one.fd)
        one.end = min(size, self._ends.get(one.number, size))
        if size < least:
            self.cut.add(one.number)
        if self._believing and index is not None and index.sealed == one.end:
            return self._known(one, index.entries, np.zeros(len(index.entries), bool), index.extras)
        if self.writes:
            data = self.disk.readable(one.fd, one.end)
        else:
            index, data = self._read_beside(one)
            one.end = len(data)
        entries, hits, extras, clean = self._scanned(one, data, index)
        if self.writes:
            if clean and one.number not in self._ends:  # its run may have ended in the middle of a group
                one.end = int(_ends_of(one, entries).max(initial=LOG_START))
            if index is None or index.sealed != one.end:
                self._ends.setdefault(one.number, one.end)
            if clean:
                with suppress(OSError):  # a full disk: the next start reads the log again
                    self._rewrite_index(one, entries, extras)
        one.dirty = not clean
        return self._known(one, entries, hits, extras)

    def _index_of(self, one: Log) -> segment.Index | None:
        if not one.index_path.is_file():
            return None
        data = self.disk.contents(one.index_path)
        header = segment.decoded_header(data[: segment.HEADER_BYTES], segment.INDEX_MAGIC)
        one.index_end = len(data)
        found = segment.read_index(data, one.header.frame)
        if header is None or (header.store, header.number) != (self.header.store, one.number):
            found.whole, found.sealed = False, None
        return found

    def _read_beside(self, one: Log) -> tuple[segment.Index | None, bytes]:
        """Read a log to which a server may write meanwhile. Returns its index, None if it has none, and its
        bytes.

        The end of a group may be seen before its beginning: then all is read again, up to `TRIES` times. What
        is broken after that is damage.
        """
        for _ in range(TRIES):
            index = self._index_of(one)  # before the log, which may be ahead of it, never behind
            size = self.disk.size(self.opened(one))
            data = self.disk.readable(self.opened(one), min(size, self._ends.get(one.number, size)))
            if index is not None and index.sealed is not None:
                break
            found = segment.scan(data, one.header.frame)
            settled = LOG_START if index is None else index.end
            if all(beyond <= settled for _, beyond in found.gaps):
                if index is not None and index.whole:
                    return index, data[: max(found.end, settled)]
                if index is None and not one.index_path.exists():
                    break
            time.sleep(TRY_SECONDS)
        return index, data

    def _scanned(
        self, one: Log, data: bytes, index: segment.Index | None
    ) -> tuple[Any, Any, dict[int, bytes], bool]:
        """Check all records of the log ``one``, with the bytes ``data``, against its ``index``.

        Returns an array with an entry (`segment.ENTRY`) for each record, a bool array that says which of these
        are damaged, the records' extra bytes (`records.extra_of`) by their offset, and whether nothing is
        damaged. A group at the end that is not whole is left out.
        """
        size = len(data)
        found = segment.scan(data, one.header.frame)
        listed, cut = self._listed_entries(one, size, index)
        records = _committed(found.records, set(listed["offset"].tolist()), cut)
        offsets = {record.offset for record in found.records}
        hits = listed[[offset not in offsets for offset in listed["offset"].tolist()]]
        unknown = self._unknown(one, found, listed, data, index)
        extras = {record.offset: extra for record in records if (extra := _extra(record))}
        if index is not None:
            gone = set(hits["offset"].tolist())
            extras.update((offset, extra) for offset, extra in index.extras.items() if offset in gone)
        entries = np.array([_entry(record) for record in records], dtype=segment.ENTRY)
        flags = np.concatenate([np.zeros(len(entries), bool), np.ones(len(hits), bool)])
        return np.concatenate([entries, hits]), flags, extras, cut == size and not len(hits) and not unknown

    def _listed_entries(self, one: Log, size: int, index: segment.Index | None) -> tuple[Any, int]:
        """The entries of a log's index that lie inside the log, and the offset up to which the log counts:
        ``size``, its length. If it is shorter than its index says, it has lost its end: that is reported, and
        the log counts up to the end of its last whole group."""
        listed = np.empty(0, segment.ENTRY) if index is None else index.entries
        ends = _ends_of(one, listed)
        if not len(listed) or int(ends.max()) <= size:
            return listed, size
        whole = (ends <= size) & (listed["word"] & segment.GROUP_END != 0)
        cut = int(ends[whole].max()) if whole.any() else LOG_START
        self.findings.report(
            f"{one.path} lost its end: {size} bytes of {int(ends.max())} are there; "
            f"{int((ends > cut).sum())} records are gone, and sessions go on from what they had before",
            one.path,
        )
        return listed[ends <= cut], cut

    def _unknown(
        self, one: Log, found: segment.Scan, listed: Any, data: bytes, index: segment.Index | None
    ) -> int:
        """How many damaged records the log has that its index does not list, so that their sessions are not
        known. They are reported in `findings`. ``found``: what was read from the log's bytes ``data``;
        ``listed``: the index's entries."""
        unknown, size = 0, len(data)
        starts = listed["offset"]
        lengths = _ends_of(one, listed) - starts
        for begin, beyond in found.gaps:
            inside = (starts >= begin) & (starts < beyond)
            if int(lengths[inside].sum()) < beyond - begin:
                after = next(record.sequence for record in found.records if record.offset == beyond)
                before = [record.sequence for record in found.records if record.offset < begin] or [after - 2]
                unknown += max(1, after - before[-1] - 1 - int(inside.sum()))
                self.holed.add(one.number)
        ahead = not any(data[found.end :])  # zeros that were written ahead
        listed_behind = bool((starts >= found.end).any())
        if size > found.end and not listed_behind and not ahead and (index is None or not index.whole):
            unknown += 1
            self.findings.report(
                f"the last {size - found.end} bytes of {one.path} are no record: "
                "a write that was cut off, or damage"
            )
        if unknown:
            self.findings.report(
                f"{one.path} is damaged, and so is its index: {unknown} records of unknown sessions are lost",
                one.path,
                unknown,
            )
        return unknown

    def _known(self, one: Log, entries: Any, hits: Any, extras: dict[int, bytes]) -> LoadedLog:
        found = segment.locations_of(one.slot, entries["offset"], _ends_of(one, entries) - entries["offset"])
        found[hits | (entries["word"] & segment.LOST != 0)] = segment.HIT
        one.sessions = segment.marks_of(entries)
        if hits.any():
            self.findings.damaged.append(str(one.path))
        return LoadedLog(entries, found, extras)

    # --- writing --------------------------------------------------------------------------------------------

    def append(self, records: Sequence[Fresh], moment: int | None = None) -> tuple[list[int], int, int]:
        """Write the records as one group at the end of the active log, and sync it.

        ``moment``: the time that the records carry, in microseconds of the store's clock; None: now. Returns
        the records' locations (`segment.location_of`), the first one's sequence number, and that time. Raises
        ``StorageUnavailable``: then none of the group counts as written.
        """
        if self._astray:  # otherwise it is enough to look when the group is on the disk
            self.check()
        total = sum(one.size for one in records)
        moment = self.clock.now() if moment is None else moment
        first, self.next_sequence = self.next_sequence, self.next_sequence + len(records)
        self.full = False
        active = self._room_for(total)
        locations, pieces, entries = [], [], []
        at, last, frame = active.end, len(records) - 1, active.header.frame
        for index, one in enumerate(records):
            word, sequence = one.word(index == last), first + index
            pieces.append(segment.encoded_record(frame, at, sequence, one.session, word, moment, one.payload))
            entries.append(
                segment.entry(sequence, one.session, word, moment, at, len(one.payload), len(one.extra))
            )
            locations.append(segment.location_of(active.slot, at, len(pieces[-1])))
            at += len(pieces[-1])
        written = False
        try:
            self._put(active, b"".join(pieces), at)
            written = True
            self.disk.sync(self.opened(active))
            self.check()
        except (OSError, StoreLost) as fault:
            lost = isinstance(fault, StoreLost)
            cut = not lost and self._cut(active)  # another server may have read the group
            if not cut and not lost:
                self._uncut.append(active)
            if not cut or written:  # it is not known whether the group is on the disk
                self.active = None
                active.fresh.update(segment.mark_of(one.session) for one in records)
                self._close_index(active)
            if lost:
                raise
            raise self._unavailable(fault, active) from None
        active.end = at
        active.fresh.update(segment.mark_of(one.session) for one in records)
        self._next_count = max(self._next_count, 1 + max(one.session >> segment.HIGH for one in records))
        self._extend_index(active, entries, b"".join(one.extra for one in records))
        return locations, first, moment

    def _unavailable(self, fault: Exception, one: Log) -> StorageUnavailable:
        """The error for a log that could not be written because of ``fault``."""
        self.full = errno_of(fault) in NO_ROOM
        kind = StorageFull if self.full else StorageUnavailable
        return kind(explained(fault, f"the journal's log {one.path}"))

    def _put(self, one: Log, data: bytes, end: int) -> None:
        """Write ``data`` at the log's end; ``end`` is the offset behind it. Raises ``OSError``.

        Syncing a file that grows is slow: it waits until the file system has written the growth of its other
        files, such as KV. So on a disk with plenty of room zeros are written ahead, and later groups overwrite
        them.
        """
        if end > one.room and self.free_bytes() > PLENTY * self._ahead:
            with suppress(OSError):
                self.disk.write(self.opened(one), data + bytes(self._ahead), one.end)
                one.room = end + self._ahead
                return
        self.disk.write(self.opened(one), data, one.end)

    def free_bytes(self) -> int:
        """Free bytes on the disk. Raises ``OSError``."""
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize

    def roll(self) -> None:
        """Seal the active log: cut the zeros behind its end, and mark its index as complete. The next group
        begins another."""
        active, self.active = self.active, None
        if active is not None:
            self._cut(active)
            self._end_index(active, segment.SEALED)
            active.sessions = np.array(sorted(active.fresh), np.uint64)  # a set takes ten times as much
            active.fresh = set()

    def _room_for(self, total: int) -> Log:
        self._cut_failed()
        active = self.active
        if active is not None and active.end > LOG_START:
            full = active.end + total > self.segment_bytes
            if full or active.index_fd is None:
                self.roll()
        if self.active is None:
            self.active = self.begin()
        return self.active

    def begin(self, replaces: Sequence[int] = (), name: Path | None = None) -> Log:
        """Create a log file and write its header. Without ``name`` it gets its number and its index, is synced
        and joins the folder's logs. With ``name``, it is written under that path, and gets a number and joins
        the logs only by `adopt`. ``replaces``: numbers of the logs that it replaces. Raises
        ``StorageUnavailable``."""
        self.check()
        there = {one.number for one in self.logs.values()}
        header = changed(
            self.header,
            number=self._next_number,
            key=secrets.randbits(64) | 1,
            replaces=tuple(replaces),
            ends={number: end for number, end in self._ends.items() if number in there},
            generation=self.generation,
            next_session=self._next_count,
            next_sequence=self.next_sequence,
        )
        one = Log(self._new_slot(), header, name or self._path(header.number))
        try:
            if name is not None:
                self.disk.remove(name)
            one.fd = self.disk.create(one.path)
            self._next_number += name is None
            self.disk.write(one.fd, segment.encoded_header(header, segment.LOG_MAGIC) * 2, 0)
            if name is None:
                self.disk.sync(one.fd)
                self.disk.remove(one.index_path)
                one.index_fd = self.disk.create(one.index_path)
                self.disk.write(one.index_fd, segment.encoded_header(header, segment.INDEX_MAGIC), 0)
                one.index_end = segment.HEADER_BYTES
                self.disk.sync_folder(self.folder)
        except OSError as fault:
            made = one.fd is not None
            self._close_files(one)
            self._free_slots.append(one.slot)
            if isinstance(fault, FileExistsError) and not made:
                self._astray = True
                raise StoreLost(
                    f"{one.path} is there already: another server or program makes logs"
                ) from None
            with suppress(OSError, StoreLost):
                self.check()  # otherwise another server may count on it
                self.disk.remove(one.path)
                self.disk.remove(one.index_path)
            raise self._unavailable(fault, one) from None
        self.made = False
        if name is None:
            self.logs[one.slot] = one
            self.unnoted = True
        return one

    def _new_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        slot = next(self._slots, None)
        if slot is None:
            raise StorageUnavailable(
                f"the journal {self.folder} has {segment.MOST_SLOTS} logs, the most it may have"
            )
        return slot

    def _cut(self, one: Log) -> bool:
        """Cut the log's file off behind its last whole group (``one.end``). Returns whether that succeeded."""
        try:
            self.disk.truncate(self.opened(one), one.end)
        except OSError:
            return False
        one.room = one.end
        return True

    def _cut_failed(self) -> None:
        """Cut off the failed groups that could not be cut off when they failed: a start would take them for
        written. Raises ``StorageUnavailable``; then nothing more may be written."""
        while self._uncut:
            one = self._uncut[-1]
            if self.logs.get(one.slot) is one:
                try:
                    self.disk.truncate(self.opened(one), one.end)
                    self.disk.sync(self.opened(one))
                except OSError as fault:
                    raise StorageUnavailable(explained(fault, f"the journal's log {one.path}")) from None
            self._uncut.pop()

    def _extend_index(self, one: Log, entries: list[segment.Row], extras: bytes, flags: int = 0) -> None:
        """Append a chunk to the log's index: the ``entries`` (as in `segment.ENTRY`) of the records that were
        just written, their ``extras`` (the bytes that the index has of them, joined), and the chunk's
        ``flags``.

        If that fails, the index stays as it was and is never sealed, so that the next start reads the log.
        """
        if one.index_fd is None:
            return
        chunk = segment.encoded_chunk(one.header.frame, one.index_end, entries, extras, one.end, flags)
        try:
            self.disk.write(one.index_fd, chunk, one.index_end)
            one.index_end += len(chunk)
        except OSError:
            with suppress(OSError):
                self.disk.truncate(one.index_fd, one.index_end)
            self._close_index(one)

    def _end_index(self, one: Log, flags: int) -> None:
        """Append a last chunk to the log's index, without entries and with these ``flags``; sync and close the
        index."""
        self._extend_index(one, [], b"", flags)
        if one.index_fd is not None:
            with suppress(OSError):
                self.disk.sync(one.index_fd)
        self._close_index(one)

    def _rewrite_index(self, one: Log, entries: Any, extras: dict[int, bytes]) -> None:
        """Replace the index of a log by a complete one, marked as sealed. ``entries``: an array of
        `segment.ENTRY`, one for each record. ``extras``: the bytes that the index has of some records, by their
        offset. Raises ``OSError``."""
        header = segment.encoded_header(one.header, segment.INDEX_MAGIC)
        ordered = np.sort(entries, order="offset")
        listed = b"".join(extras.get(offset, b"") for offset in ordered["offset"].tolist())
        chunk = segment.encoded_chunk(
            one.header.frame, len(header), ordered.tolist(), listed, one.end, segment.SEALED
        )
        self.disk.replace(one.index_path, header + chunk)
        one.index_end = len(header) + len(chunk)

    def adopt(self, one: Log, entries: Any, extras: dict[int, bytes]) -> None:
        """Take in a log that was written under another name: give it its number, sync it, rename it, write
        its index, and add it to the folder's logs. Raises ``OSError``, ``StoreLost``.

        ``entries``: for the index, an array of `segment.ENTRY`, one for each record. ``extras``: the bytes that
        the index has of some records, by their offset.
        """
        one.header = changed(
            one.header, number=self._next_number
        )  # like the next log, it follows on all others
        self.disk.write(self.opened(one), segment.encoded_header(one.header, segment.LOG_MAGIC) * 2, 0)
        self.disk.sync(self.opened(one))
        one.sessions = segment.marks_of(entries)
        self.check()
        try:
            self.disk.rename_new(one.path, self._path(one.number))
        except OSError:
            if elsewhere(self._path(one.number), self.opened(one)):
                raise  # otherwise it was done all the same
        one.path = self._path(one.number)
        self._next_number += 1
        self.logs[one.slot] = one
        self.unnoted = True
        self.disk.sync_folder(self.folder)
        with suppress(OSError):  # then the next start reads the log
            self._rewrite_index(one, entries, extras)

    def discard(self, one: Log) -> None:
        """Give up a log that a merge wrote: close it and remove its file. If the file cannot be removed,
        and has its number already, it stays among the folder's logs."""
        self._close_files(one)
        listed = one.slot in self.logs
        with suppress(OSError):
            if listed:
                self.disk.remove(one.index_path)  # as in `remove`
            self.disk.remove(one.path)
        if listed and one.path.exists():
            return
        self.logs.pop(one.slot, None)
        self._free_slots.append(one.slot)

    def remove(self, one: Log) -> None:
        """Remove a log that no session needs. Raises ``OSError``, ``StoreLost``."""
        self.check()
        self.disk.remove(one.index_path)  # first: an index without its log means that the log is lost
        self.disk.remove(one.path)
        self._close_files(one)
        self.logs.pop(one.slot, None)
        self._ends.pop(one.number, None)
        self.unnoted = True
        self._free_slots.append(one.slot)

    # --- reading --------------------------------------------------------------------------------------------

    def read(self, location: int) -> Found:
        """Read the record at ``location``, a number that holds the log's slot, the offset and the length
        (`segment.location_of`). Raises ``RecordDamaged``, ``StorageUnavailable``."""
        one, offset, length = (
            self.logs[segment.slot_of(location)],
            segment.offset_of(location),
            segment.bytes_at(location),
        )
        try:
            if length >> 3 >= segment.GIANT:
                length = self._giant(one, offset)
            data = self.disk.read(self.opened(one), length, offset)
        except OSError as fault:
            if fault.errno == errno.EIO:
                raise RecordDamaged(f"{one.path} cannot be read at {offset}: {fault.strerror}") from None
            raise StorageUnavailable(explained(fault, f"the journal's log {one.path}")) from None
        found = segment.record_at(data, 0, one.header.frame, offset)
        if found is None:
            raise RecordDamaged(f"a record's checksum is wrong ({one.path}, offset {offset})")
        return found

    def entries_of(self, one: Log) -> tuple[Any, dict[int, bytes]]:
        """A log's entries, an array of `segment.ENTRY`, one for each record; and by the record's offset the
        bytes that the index has of some records (`records.extra_of`). Read from the index if it is complete, or
        else from the log and what the index lists."""
        index = self._index_of(one)
        if index is not None and index.sealed == one.end:
            return index.entries, index.extras
        kept, self.findings = self.findings, Findings()
        try:
            data = self.disk.readable(self.opened(one), one.end)
            entries, _, extras, _ = self._scanned(one, data, index)
        finally:
            self.findings = kept
        return entries, extras

    def mark_dirty(self, location: int) -> None:
        """Call this when damage was found at ``location``: it marks the log in its index, so that the next
        opening reads the log whole."""
        one = self.logs[segment.slot_of(location)]
        if one.dirty:
            return
        one.dirty = True
        if not self.writes:
            return
        if one is self.active:
            self._extend_index(one, [], b"", segment.DIRTY)
            return
        with suppress(OSError):
            one.index_fd = self.disk.open(one.index_path, write=True)
            one.index_end = self.disk.size(one.index_fd)
            self._end_index(one, segment.DIRTY)

    def size(self, location: int) -> int:
        """How many bytes the record at ``location`` takes in its log; 0 if the location is that of a missing or
        damaged record."""
        slot, length = segment.slot_of(location), int(segment.bytes_at(location))
        if not slot:
            return 0
        if length >> 3 == segment.GIANT:
            with suppress(OSError, StorageUnavailable):
                return self._giant(self.logs[slot], segment.offset_of(location))
        return length

    def _giant(self, one: Log, offset: int) -> int:
        """How many bytes a record at ``offset`` takes that is so long that its location cannot hold the length.
        It is read from the record itself."""
        head = self.disk.read(self.opened(one), 16, offset)
        length = int.from_bytes(head[12:16], "little") if len(head) == 16 else 0
        whole: int = one.header.frame.padded(length)
        return min(whole, max(0, one.end - offset))

    @property
    def bytes(self) -> int:
        """Bytes of all logs and indexes."""
        return sum(one.end + one.index_end for one in self.logs.values())

    def opened(self, one: Log) -> int:
        """The descriptor of a log's file, opened if it is not."""
        if one.fd is None:
            one.fd = self.disk.open(one.path)
        return one.fd

    def _close_index(self, one: Log) -> None:
        if one.index_fd is not None:
            os.close(one.index_fd)
            one.index_fd = None

    def _close_files(self, one: Log) -> None:
        self._close_index(one)
        if one.fd is not None:
            os.close(one.fd)
            one.fd = None


def _new_header(model: bytes) -> SegmentHeader:
    return SegmentHeader(
        format=segment.FORMAT,
        store=secrets.token_bytes(16),
        seed=secrets.randbits(63),
        sync=secrets.token_bytes(4),
        model=model,
        number=0,
    )


def _extra(record: Found) -> bytes:
    return record.payload if record.word & segment.LOST else extra_of(record.kind, record.payload)


def _entry(record: Found) -> segment.Row:
    """The entry of a record for the index of its log."""
    length, extra = len(record.payload), len(_extra(record))
    return segment.entry(
        record.sequence, record.session, record.word, record.time, record.offset, length, extra
    )


def _ends_of(one: Log, entries: Any) -> Any:
    """Where each record of ``entries`` (an array of `segment.ENTRY` of the log ``one``) ends in the log, as an
    array."""
    return entries["offset"] + one.header.frame.padded(entries["length"].astype("<u8"))


def _committed(records: Sequence[Found], listed: set[int], cut: int) -> list[Found]:
    """The ``records`` before the offset ``cut`` that were committed: they belong to a whole group, or the index
    lists their offset (``listed``)."""
    finished = max((at for at, record in enumerate(records) if record.word & segment.GROUP_END), default=-1)
    return [
        record
        for at, record in enumerate(records)
        if record.offset < cut and (at <= finished or record.offset in listed)
    ]
