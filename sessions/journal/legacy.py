"""Migration of a journal of formats 1 and 2, an LMDB file, into logs, at the first start.

LMDB ends its process on a damaged page, so child processes read. If one dies, the next one reads on behind the
page. Sessions that lack a record are damaged in the new journal too; all others are unchanged. The old file is
kept under another name.

    meta      "store"                 -> StoreRecord
    sessions  number                  -> SessionRecord
    tails     number                  -> Tail
    log       number, index           -> an operation
    keyrings  number                  -> Keyring
    handles   digest of the handle    -> HandleRecord
    forks     number, child's number  -> nothing: the child's record says the same
"""

from __future__ import annotations

import logging
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import xxhash

from ..errors import RecordDamaged, StoreForeign, StoreNewer, StoreUnusable
from ..settings import JournalSettings
from .folder import FOLDER, IDENTITY, Disk, named, read_identity
from .logs import LogFolder
from .records import AnyOperation, Keyring, SessionRecord, append, drop, put, session_extra
from .segment import FORMAT, LOST, Fresh, Kind

log = logging.getLogger(__name__)

FILE = "data.mdb"
KEPT = "data.mdb.migrated"
UNREADABLE = "data.mdb.unreadable"
FORMATS = (1, 2)
SALVAGE_SECONDS = 300.0  # for all tries after the first death of a child
CHECK_BYTES = 8
ALL, FIRST = "all", "first"
T = TypeVar("T")


class Tail(msgspec.Struct, frozen=True, kw_only=True):
    """How many operations a session has had, and when the last was written (seconds since the epoch).
    Operations before ``first`` are in the snapshot at ``first``."""

    operations: int
    used: float
    first: int = 0


class HandleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The session that a handle opens. Only the handle's digest is kept."""

    session: int


class StoreRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The store's format, and the model of its token ids."""

    format: int
    model: bytes


def unseal(key: bytes, value: bytes, kind: type[T] | Any) -> T:
    """The record in ``value``, which was stored under ``key``: a checksum of key and record (8 bytes), then
    the record in MessagePack. ``kind``: its type. Raises ``RecordDamaged``."""
    payload = value[CHECK_BYTES:]
    if xxhash.xxh3_64_digest(key + payload) != value[:CHECK_BYTES]:
        raise RecordDamaged(f"a record's checksum is wrong (key {key.hex()})")
    try:
        record: T = msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.MsgspecError, RecursionError) as fault:
        raise RecordDamaged(f"a record cannot be read (key {key.hex()}): {fault}") from None
    return record


def migrate(folder: Path, model: bytes, settings: JournalSettings) -> bool:
    """Move the LMDB journal in ``folder`` into logs beside it. Returns whether there was one to move.
    ``model``: the digest of the model that is served. Raises ``StoreForeign`` if it is another model's,
    ``StoreNewer``, ``StoreUnusable``; then the old file is unchanged."""
    old = folder / FILE
    if not old.exists() or old.stat().st_size == 0:
        return False  # left by a server that died before its first commit
    if (folder / FOLDER).exists():
        if not _in_use(folder, settings):  # else the old file came later
            _put_away(folder)
        return False
    reader = Reader(folder)
    found = reader.about()
    if found is None:
        aside = folder / UNREADABLE
        os.rename(old, aside)
        log.error("%s cannot be read: its sessions are lost; it is kept as %s", old, aside)
        return True
    if found.format not in FORMATS:
        raise StoreNewer(f"the store {folder} has format {found.format}; this version reads up to {FORMAT}")
    if found.model != model:
        raise StoreForeign(f"the store {folder} was written for another model")
    fresh = folder / f"{FOLDER}.new"
    try:
        sessions, damaged = _copied(reader, fresh, model, settings)
        os.rename(fresh, folder / FOLDER)
        Disk().sync_folder(folder)
    except OSError as fault:
        raise StoreUnusable(f"{old} cannot be moved into logs: {fault.strerror}") from None
    _put_away(folder)
    log.warning(
        "%s had format %d: its %d sessions are in %s now; it is kept as %s, which `holdfast store gc` removes",
        *(old, found.format, sessions, folder / FOLDER, folder / KEPT),
    )
    if damaged or reader.unread:
        log.error(
            "%s is damaged: %d places cannot be read, and these sessions are lost: %s",
            *(folder / KEPT, reader.unread, named(damaged) or "none known"),
        )
    return True


def _in_use(folder: Path, settings: JournalSettings) -> bool:
    """Whether a server has started with the journal in ``folder``. Raises ``StoreUnusable``. An identity
    alone does not prove it: an earlier journal may have left it."""
    if not (folder / IDENTITY).exists():
        return False
    logs = LogFolder(folder / FOLDER, b"", settings.log_bytes, Disk(), write=False)
    logs.close()
    if logs.generation:
        return True
    with suppress(ValueError):
        known = read_identity(folder)
        return known is not None and known.store == logs.header.store
    return False


def _put_away(folder: Path) -> None:
    os.rename(folder / FILE, folder / KEPT)
    with suppress(OSError):
        os.unlink(folder / "lock.mdb")


def _copied(reader: Reader, folder: Path, model: bytes, settings: JournalSettings) -> tuple[int, list[str]]:
    """Copy all that can be read of the old journal into new logs in ``folder``, which is emptied first.
    Returns the number of sessions that can be resumed, and the names of damaged ones."""
    shutil.rmtree(folder, ignore_errors=True)
    logs = LogFolder(folder, model, settings.log_bytes, _Later())
    moved, damaged = 0, list[str]()
    try:
        sessions = {_number(key): value for key, value in reader.records("sessions", SessionRecord)}
        tails = {_number(key): value for key, value in reader.records("tails", Tail)}
        rings = {_number(key): value for key, value in reader.records("keyrings", Keyring)}
        # The store's clock begins now: of the times of day only their order is kept.
        used = sorted((tail.used, number) for number, tail in tails.items() if isinstance(tail, Tail))
        ranks = {number: rank for rank, (_, number) in enumerate(used)}
        handles: dict[int, list[bytes]] = {}
        for digest, handle in reader.records("handles", HandleRecord):
            if isinstance(handle, HandleRecord):
                handles.setdefault(handle.session, []).append(digest)
        told = {*sessions, *tails, *rings, *handles}
        for number, items in groupby(reader.records("log", AnyOperation), lambda item: _number(item[0])):
            operations = {struct.unpack(">QQ", key)[1]: value for key, value in items}
            told.discard(number)
            moved += _move(logs, number, operations, sessions, tails, rings, handles, ranks, damaged)
        for number in sorted(told):
            moved += _move(logs, number, {}, sessions, tails, rings, handles, ranks, damaged)
        for one in logs.logs.values():
            if one.fd is not None:
                os.fsync(one.fd)
        Disk().sync_folder(folder)
    finally:
        logs.close()
    return moved, damaged


class _Later(Disk):
    """File calls that do not sync, for speed: the migration syncs everything at its end."""

    def sync(self, fd: int) -> None:
        """Do nothing: the migration syncs all files at its end."""

    def sync_folder(self, folder: Path) -> None:
        """Do nothing: the migration syncs the folder at its end."""


def _move(
    logs: LogFolder,
    number: int,
    operations: dict[int, Any],
    sessions: dict[int, Any],
    tails: dict[int, Any],
    rings: dict[int, Any],
    handles: dict[int, list[bytes]],
    ranks: dict[int, int],
    damaged: list[str],
) -> bool:
    """Write session ``number`` of the old journal into ``logs``. Records that are lost are marked as lost, and
    then the session's name is added to ``damaged``.

    ``operations``: the session's, by index. ``sessions``, ``tails``, ``rings``: the old tables of records,
    tails and keyrings by session number; ``handles``: the digests of its handles, too. An entry of None is
    damaged. ``ranks``: by number, the sessions' places in the order in which they were last used. Returns False
    if the session was forgotten and only its forks need it.
    """
    record, ring, tail = (table.get(number) for table in (sessions, rings, tails))
    kept = any(number in table for table in (rings, tails, handles))
    if isinstance(record, SessionRecord):
        group = [put(number, record)]
    else:
        unknown = session_extra(SessionRecord(id="", owner=b"", salt=b"", clock=""))
        group = [Fresh(number, 0, Kind.SESSION, unknown, unknown, flags=LOST)]
    if isinstance(ring, Keyring):
        group.append(put(number, ring))
    elif kept:
        known = b"".join(handles.get(number, []))
        group.append(Fresh(number, 0, Kind.KEYRING, known, known, flags=LOST))
    first = tail.first if isinstance(tail, Tail) else min(operations, default=0)
    count = tail.operations if isinstance(tail, Tail) else max(operations, default=-1) + 1
    for index in range(first, count):
        operation = operations.get(index)
        lost = Fresh(number, index, Kind.OPERATION, b"", flags=LOST)
        group.append(lost if operation is None else append(number, index, operation))
    if kept and not isinstance(tail, Tail):  # there may have been more
        group.append(Fresh(number, count, Kind.OPERATION, b"", flags=LOST))
    if not kept:
        group.append(drop(number))
    logs.append(group, ranks.get(number, 0))
    if any(one.flags & LOST for one in group):
        damaged.append(record.id if isinstance(record, SessionRecord) else f"number {number}")
    return kept


def _number(key: bytes) -> int:
    return int.from_bytes(key[:8], "big")


class Reader:
    """Reads the LMDB journal in ``folder``, each range of keys in a child process of its own. ``unread``: how
    many ranges none of them could read."""

    def __init__(self, folder: Path) -> None:
        self.unread = 0
        self._folder = folder
        self._until: float | None = None

    def about(self) -> StoreRecord | None:
        """The record that says the old journal's format and model; None if it cannot be read."""
        for item in list(self._asked("meta", b"", FIRST)):
            if item is not None:
                with suppress(RecordDamaged):
                    found: StoreRecord = unseal(*item, StoreRecord)
                    return found
        return None

    def records(self, table: str, kind: Any) -> Iterator[tuple[bytes, Any]]:
        """Key and record of each entry of a table, in order; a damaged record is None. ``kind``: the records'
        type."""
        for key, value in self._all(table):
            try:
                yield key, unseal(key, value, kind)
            except RecordDamaged:
                yield key, None

    def _all(self, table: str) -> Iterator[tuple[bytes, bytes]]:
        """Key and value of each entry of a table, in order. Ranges that cannot be read are counted."""
        first = b""
        while True:
            for item in self._asked(table, first):
                if item is None:
                    break
                yield item
                first = item[0]
            else:
                return
            self.unread += 1
            if self._until is None:
                self._until = time.monotonic() + SALVAGE_SECONDS
            beyond = self._beyond(table, _number(first) + 1 if first else 0)
            if beyond is None:
                return
            first = struct.pack(">Q", beyond)

    def _beyond(self, table: str, low: int) -> int | None:
        """The lowest session number from ``low`` on at which the table can be read again, found by doubling,
        then halving. None if there is none, or no time is left."""
        bad, good, step = low - 1, low, 1
        while not self._reads(table, good):
            bad, good, step = good, low + step, 2 * step
            assert self._until is not None
            if good >= 1 << 63 or time.monotonic() > self._until:
                return None
        while good - bad > 1:
            middle = (good + bad) // 2
            if self._reads(table, middle):
                good = middle
            else:
                bad = middle
        return good

    def _reads(self, table: str, number: int) -> bool:
        return all(item is not None for item in self._asked(table, struct.pack(">Q", number), FIRST))

    def _asked(self, table: str, first: bytes, how: str = ALL) -> Iterator[tuple[bytes, bytes] | None]:
        """Ask a child process for the records of ``table`` from the key ``first`` on (b"": from the beginning),
        all of them or only the next one (``how``: `ALL`, `FIRST`). Yields each key and value; at last None if
        the child died or could not read on."""
        program = str(Path(__file__).with_name("legacy_reader.py"))
        words = [sys.executable, "-I", program, str(self._folder), table, first.hex(), how]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
            assert child.stdout is not None
            try:
                while len(head := child.stdout.read(8)) == 8:
                    length, size = struct.unpack("<II", head)
                    data = child.stdout.read(length + size)
                    if len(data) < length + size:
                        break
                    yield data[:length], data[length:]
                if child.wait():
                    yield None
            finally:
                child.kill()
