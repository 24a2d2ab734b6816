"""The store file: LMDB, opened, written and read by one thread. Blocking.

Never ``writemap`` (a full disk would kill the process); no transaction outlives a method, and what is read
is copied out inside it. The map grows when it is full; at its limit the sessions used longest ago go first.
Knows keys and tables, not what an operation means.

    meta      "store"                 -> StoreRecord
    sessions  number                  -> SessionRecord
    tails     number                  -> Tail
    log       number, index           -> an operation
    keyrings  number                  -> Keyring
    handles   digest of the handle    -> HandleRecord
    forks     number, child's number  -> nothing: the child's operations follow on some of these
"""

from __future__ import annotations

import logging
import os
import struct
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import lmdb
from msgspec.structs import replace

from ..errors import RecordDamaged, StorageUnavailable, StoreForeign, StoreNewer, StoreUnusable
from . import lineage
from .changes import Append, Applied, Change, Condensed, Drop, Put
from .file import check_length, environment
from .lineage import Table as Table
from .lineage import key_of as key_of
from .records import (
    FORMAT,
    READERS,
    AnyOperation,
    HandleRecord,
    Keyring,
    SessionRecord,
    StoreRecord,
    Tail,
    seal,
    unseal,
)
from .settings import JournalSettings
from .shares import Born, Shares

log = logging.getLogger(__name__)

STORE_KEY = b"store"
SWEEP_SESSIONS = 64  # forgotten in one transaction


@dataclass(frozen=True, slots=True)
class Stored:
    """A session as it stands in the store."""

    number: int
    record: SessionRecord
    keyring: Keyring
    operations: tuple[AnyOperation, ...]
    """Those that are kept, of the sessions it was forked from too: the first may be a snapshot of many."""
    written: int = 0
    """How many it has had of its own: the index of the next."""


AGAIN = 1.25  # times as many operations as a session had when it could not be made shorter
Condense: TypeAlias = Callable[[Sequence[AnyOperation]], tuple[int, AnyOperation] | None]
"""How many of a session's operations one stands for, and that one; None where it is not worth it."""


class JournalStore:
    """One store file. ``open`` it on the thread that uses it."""

    def __init__(self, environment: lmdb.Environment, folder: Path, settings: JournalSettings) -> None:
        self._environment = environment
        self.folder = folder
        self._settings = settings
        self._tables: dict[Table, Any] = {}
        self.long: set[int] = set()
        """Sessions that `condense` would make shorter."""
        self._declined: dict[int, int] = {}  # operations of those that it did not, as while a reply runs
        self.damaged = 0
        """Records found damaged so far."""
        self.full = False
        """Whether the last write failed because the map may grow no further."""
        self.shares = Shares(settings.tenants)

    @classmethod
    def open(cls, folder: Path, model: bytes, settings: JournalSettings) -> JournalStore:
        """Open or make the store of ``model``. Hold its lock.

        Raises ``StoreUnusable`` or one of its kinds.
        """
        path = folder / "data.mdb"
        check_length(path, len(Table))
        made = path.exists() and path.stat().st_size > 0
        try:
            with ExitStack() as opening:
                if not made:  # what could not be begun holds nothing, and must not look cut short later
                    opening.callback(path.unlink, missing_ok=True)
                store = cls(environment(folder, settings, len(Table)), folder, settings)
                opening.callback(store.close)
                store._prepare(model)
                store._count()
                opening.pop_all()
        except (lmdb.Error, StorageUnavailable) as fault:
            raise StoreUnusable(f"the store {folder} cannot be opened: {fault}") from None
        return store

    def close(self) -> None:
        """Close the file."""
        self._environment.close()

    # --- writing --------------------------------------------------------------------------------------------

    def write(self, changes: Iterable[Change]) -> None:
        """All changes in one synchronous commit, or none. Raises ``StorageUnavailable``."""
        changes = list(changes)
        self.full = False
        while True:
            try:
                with self._environment.begin(write=True) as transaction:
                    done = self._apply(transaction, changes)
                break
            except lmdb.MapFullError:
                self._grow()
            except (lmdb.Error, OSError) as fault:
                self._renew()
                raise StorageUnavailable(f"the journal cannot be written: {fault}") from None
        self.long.update(number for number, tail in done.tails.items() if self._is_long(number, tail))
        self.long.difference_update(done.forgotten)
        self.shares.enter(done.born)
        self.shares.used({number: tail.base + tail.grown for number, tail in done.tails.items()})
        for number, erased in done.forgotten.items():
            self.shares.forgotten(number, erased)
            self._declined.pop(number, None)

    def _is_long(self, number: int, tail: Tail) -> bool:
        """A snapshot costs its bytes, and trying in vain the reading of it all: there must be more first."""
        behind = tail.operations - tail.first
        least = max(self._settings.snapshot_operations, AGAIN * self._declined.get(number, 0))
        return behind >= least and tail.grown >= tail.base

    def condense(self, number: int, how: Condense) -> bool:
        """Put one operation in the place of a session's first ones, unless forks follow on these; if it was.

        Raises ``StorageUnavailable``, ``RecordDamaged``.
        """
        self.long.discard(number)
        tail: Tail | None = self._get(Table.TAILS, key_of(number), Tail)
        record: SessionRecord | None = self._get(Table.SESSIONS, key_of(number), SessionRecord)
        with self._reading() as transaction:
            forked = lineage.forked(transaction, self._tables, number)
        if tail is not None:
            self._declined[number] = tail.operations - tail.first
        if tail is None or record is None or forked:
            return False
        own = self._operations(number, tail)
        inherited = self._inherited(record, own)
        count, snapshot = how((*inherited, *own)) or (0, None)
        if snapshot is None or count <= len(inherited):
            return False
        del self._declined[number]
        self.write([Condensed(number, tail.first + count - len(inherited) - 1, snapshot)])
        return True

    def free_bytes(self) -> int | None:
        """What the disk has left for us; None where the folder is gone."""
        try:
            found = os.statvfs(self.folder)
        except OSError:
            return None
        return found.f_bavail * found.f_frsize

    def sweep(self, keep: frozenset[int], *, aged: bool = True) -> int:
        """Forget what retention lets go, but for those in ``keep``; how many. Not ``aged``: for no age."""
        gone = self._past(keep, aged=aged)
        for at in range(0, len(gone), SWEEP_SESSIONS):
            self.write([Drop(number) for number in gone[at : at + SWEEP_SESSIONS]])
        return len(gone)

    def make_room(self, keep: frozenset[int]) -> bool:
        """Forget the sessions used longest ago; False where there is none."""
        oldest = sorted((tail.used, number) for number, tail in self._ages().items() if number not in keep)
        for _, number in oldest[:SWEEP_SESSIONS]:
            self.write([Drop(number)])
        return bool(oldest)

    def keep_shares(self, live: Container[int]) -> frozenset[bytes]:
        """Forget what tenants have beyond their shares, but for sessions that are open; whose shares are full.

        Raises ``StorageUnavailable``.
        """
        while gone := self.shares.surplus(live, SWEEP_SESSIONS):
            self.write([Drop(number) for number in gone])
        return self.shares.full()

    # --- reading --------------------------------------------------------------------------------------------

    def next_number(self) -> int:
        """A number no session has had."""
        with self._reading() as transaction:
            last = 0
            for table in (Table.SESSIONS, Table.TAILS):
                cursor = transaction.cursor(self._tables[table])
                if cursor.last():
                    last = max(last, struct.unpack(">Q", bytes(cursor.key()))[0])
            return last + 1

    def handle(self, digest: bytes) -> HandleRecord | None:
        """Whose handle this is; None for one that is unknown, or damaged. Raises ``StorageUnavailable``."""
        try:
            found: HandleRecord | None = self._get(Table.HANDLES, digest, HandleRecord)
            return found
        except RecordDamaged:
            self.damaged += 1
            return None

    def session(self, number: int) -> Stored:
        """A session with all its operations. Raises ``RecordDamaged``, counted, ``StorageUnavailable``."""
        try:
            record = self._get(Table.SESSIONS, key_of(number), SessionRecord)
            keyring = self._get(Table.KEYRINGS, key_of(number), Keyring)
            tail = self._get(Table.TAILS, key_of(number), Tail)
            if record is None or keyring is None or tail is None:
                raise RecordDamaged(f"a record of session {number} is missing")
            operations = (*self._inherited(record, own := self._operations(number, tail)), *own)
            return Stored(number, record, keyring, operations, tail.operations)
        except RecordDamaged:
            self.damaged += 1
            raise

    def family(self, number: int) -> list[tuple[int, SessionRecord]]:
        """The sessions that this one was forked from, and all that were forked from those, but for such as were
        forgotten. Raises ``RecordDamaged``, ``StorageUnavailable``.
        """
        with self._reading() as transaction:
            return lineage.family(transaction, self._tables, number)

    def statistics(self) -> dict[str, float]:
        """Sessions and bytes."""
        with self._reading() as transaction:
            sessions = transaction.stat(self._tables[Table.SESSIONS])["entries"]
        info = self._environment.info()
        page = self._environment.stat()["psize"]
        return {
            "journal_sessions": float(sessions),
            "journal_bytes": float((info["last_pgno"] + 1) * page),
            "journal_damaged": float(self.damaged),
        }

    # --- inside ---------------------------------------------------------------------------------------------

    def _prepare(self, model: bytes) -> None:
        self._environment.reader_check()
        self._open_tables()
        found = self._get(Table.META, STORE_KEY, StoreRecord)
        if found is None:
            self.write([Put(Table.META, STORE_KEY, StoreRecord(format=FORMAT, model=model))])
            return
        if found.format not in READERS:
            raise StoreNewer(
                f"the store {self.folder} has format {found.format}; this version reads up to {FORMAT}"
            )
        if found.model != model:
            raise StoreForeign(f"the store {self.folder} was written for another model")
        if found.format < FORMAT:  # from now on there may be what that one does not know
            self.write([Put(Table.META, STORE_KEY, StoreRecord(format=FORMAT, model=model))])

    def _open_tables(self) -> None:
        for table in Table:
            self._tables[table] = self._environment.open_db(table.encode())

    def _renew(self) -> None:
        """With a meta page that could not be written an environment refuses everything: have another one."""
        with suppress(lmdb.Error), self._environment.begin():
            return
        try:
            self._environment.close()
            self._environment = environment(self.folder, self._settings, len(Table))
            self._open_tables()
        except lmdb.Error as fault:
            log.warning("the journal cannot be opened again yet: %s", fault)

    @contextmanager
    def _reading(self) -> Iterator[lmdb.Transaction]:
        """A transaction to read in. Raises ``RecordDamaged``, ``StorageUnavailable``."""
        try:
            with self._environment.begin() as transaction:
                yield transaction
        except (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.BadValsizeError) as fault:
            raise RecordDamaged(f"the journal cannot be read there: {fault}") from None
        except lmdb.Error as fault:
            self._renew()
            raise StorageUnavailable(f"the journal cannot be read: {fault}") from None

    def _apply(self, transaction: lmdb.Transaction, changes: list[Change]) -> Applied:
        """Make the changes."""
        done = Applied({}, [], {})
        tails = done.tails

        def tail_of(number: int) -> Tail:
            return tails[number] if number in tails else self._tail(transaction, number)

        for change in changes:
            match change:
                case Append(number=number, index=index, operation=operation):
                    key = key_of(number, index)
                    sealed = seal(key, operation)
                    transaction.put(key, sealed, db=self._tables[Table.LOG], append=False)
                    tail = tail_of(number)
                    tails[number] = replace(tail, operations=index + 1, grown=tail.grown + len(sealed))
                case Condensed(number=number):
                    tails[number] = self._condensed(transaction, change, tail_of(number))
                case Put(table=table, key=key, record=None):
                    transaction.delete(key, db=self._tables[table])
                case Put(table=table, key=key, record=record):
                    sealed = seal(key, record)
                    transaction.put(key, sealed, db=self._tables[table])
                    if isinstance(record, SessionRecord):
                        number = struct.unpack(">Q", key)[0]
                        tails[number] = tail_of(number)
                        self._note(transaction, {number: tails[number]})  # a Drop behind it looks there
                        done.born.append(Born(number, record.salt, len(sealed)))
                        lineage.enter(transaction, self._tables, number, record.origin)
                case Drop(number=number):
                    done.forgotten[number] = self._drop(transaction, number)
                    tails.pop(number, None)
        self._note(transaction, tails)
        return done

    def _note(self, transaction: lmdb.Transaction, tails: dict[int, Tail]) -> None:
        now = time.time()
        for number, tail in tails.items():
            key = key_of(number)
            transaction.put(key, seal(key, replace(tail, used=now)), db=self._tables[Table.TAILS])

    def _tail(self, transaction: lmdb.Transaction, number: int) -> Tail:
        key = key_of(number)
        value = transaction.get(key, db=self._tables[Table.TAILS])
        try:
            return Tail(operations=0, used=0.0) if value is None else unseal(key, bytes(value), Tail)
        except RecordDamaged:  # found again, and counted, when the session is read
            return Tail(operations=0, used=0.0)

    def _condensed(self, transaction: lmdb.Transaction, change: Condensed, tail: Tail) -> Tail:
        """The snapshot is there, what it stands for is not; what comes behind is what has grown since."""
        cursor, log = transaction.cursor(self._tables[Table.LOG]), self._tables[Table.LOG]
        found = cursor.set_range(key_of(change.number, tail.first))
        last = key_of(change.number, change.index)
        while found and bytes(cursor.key()) <= last:
            found = cursor.delete()
        grown = 0
        while found and bytes(cursor.key())[:8] == last[:8]:
            grown += len(cursor.value())
            found = cursor.next()
        sealed = seal(last, change.snapshot)
        transaction.put(last, sealed, db=log)
        return replace(tail, first=change.index, base=len(sealed), grown=grown)

    def _drop(self, transaction: lmdb.Transaction, number: int) -> list[int]:
        key = key_of(number)
        ring = transaction.get(key, db=self._tables[Table.KEYRINGS])
        if ring is not None:
            try:
                keyring: Keyring = unseal(key, bytes(ring), Keyring)
                for digest in keyring.digests():
                    transaction.delete(digest, db=self._tables[Table.HANDLES])
            except RecordDamaged:
                self.damaged += 1
        for table in (Table.TAILS, Table.KEYRINGS):
            transaction.delete(key, db=self._tables[table])
        return lineage.erase(transaction, self._tables, number)

    def _grow(self) -> None:
        """Double the map. No transaction is open: this thread has them all. At its limit: `make_room`."""
        size = self._environment.info()["map_size"]
        if size >= self._settings.max_bytes:
            self.full = True
            raise StorageUnavailable(f"the journal has {size} bytes, and may have no more")
        self._environment.set_mapsize(min(2 * size, self._settings.max_bytes))

    def _get(self, table: Table, key: bytes, kind: type) -> Any:
        with self._reading() as transaction:
            value = transaction.get(key, db=self._tables[table])
        return None if value is None else unseal(key, bytes(value), kind)

    def _inherited(self, record: SessionRecord, own: tuple[AnyOperation, ...]) -> tuple[AnyOperation, ...]:
        with self._reading() as transaction:
            return lineage.inherited(transaction, self._tables, record.origin, own)

    def _operations(self, number: int, tail: Tail) -> tuple[AnyOperation, ...]:
        read, prefix = READERS[FORMAT], key_of(number)
        found: list[AnyOperation] = []
        with self._reading() as transaction:
            cursor = transaction.cursor(self._tables[Table.LOG])
            there = cursor.set_range(prefix)
            while there and bytes(cursor.key())[:8] == prefix:
                if bytes(cursor.key()) != key_of(number, tail.first + len(found)):
                    break
                found.append(read(bytes(cursor.key()), bytes(cursor.value())))
                there = cursor.next()
        if tail.first + len(found) != tail.operations:
            raise RecordDamaged(
                f"session {number} has {len(found)} operations of {tail.operations - tail.first}"
            )
        return tuple(found)

    def _ages(self) -> dict[int, Tail]:
        ages: dict[int, Tail] = {}
        with self._reading() as transaction:
            for key, value in transaction.cursor(self._tables[Table.TAILS]):
                try:
                    ages[struct.unpack(">Q", bytes(key))[0]] = unseal(bytes(key), bytes(value), Tail)
                except RecordDamaged:
                    self.damaged += 1
        return ages

    def _count(self) -> None:
        """What tenants have that have a share: of sessions that were forgotten, too, where forks need it."""
        if not self.shares:
            return
        ages = self._ages()
        with self._reading() as transaction:
            sizes = {number: tail.base + tail.grown for number, tail in ages.items()}
            born = list(lineage.born(transaction, self._tables))
            for one in born:
                if not sizes.get(one.number):  # forgotten, or from before sizes were kept
                    sizes[one.number] = lineage.size(transaction, self._tables, one.number)
        self.shares.enter(born)
        for number in sorted(
            (one.number for one in born), key=lambda one: ages[one].used if one in ages else 0
        ):
            self.shares.used({number: sizes[number]})
            if number not in ages:
                self.shares.forgotten(number, [])

    def _past(self, keep: frozenset[int], *, aged: bool) -> list[int]:
        """Sessions beyond the numbers of retention, the one used longest ago first."""
        ages = sorted((tail.used, number) for number, tail in self._ages().items())
        surplus = len(ages) - self._settings.max_sessions
        oldest = time.time() - self._settings.max_age_seconds if aged else 0.0
        past = [number for at, (used, number) in enumerate(ages) if at < surplus or used < oldest]
        return [number for number in past if number not in keep]
