"""Records in an LMDB environment: headers and payloads by key, within a budget. `eviction` has the order.

Never ``writemap`` (a full disk would kill the process), never a transaction that outlives a call. Payloads go
straight from and into the caller's buffers, and every byte is checked when it is read. A record that was read
is on a tier above again: it is evicted first until it is touched. Two errors leave this file. `StoreFailed`:
the medium refused, and may not refuse the next time. `StoreTorn`: the file's own pages are damaged; it is
thrown away.

While less than ``floor`` bytes are free on the disk, records are evicted and their pages become holes of the
file (`free_pages`). On a file system without holes the whole file is given back, and the store begins anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import lmdb
from xxhash import xxh3_64_intdigest

from ..errors import FolderHeld, KVStoreError, RecordCorrupt, RecordMissing
from ..folder_lock import FolderLock
from ..reserve import held_by
from ..system_limits import OUT_OF_DESCRIPTORS, errno_of, explained
from .eviction import RecordEviction
from .free_pages import ListUnreadable, clear_free_pages, punch_free_pages
from .payload_offsets import FILE, PayloadOffsets, stride_of
from .record import RecordHeader, read_header

FIRST_MAP = 16 << 20
SPARE = 64 << 20  # of the map, beyond twice the budget: pages freed are not free at once
TREE_BYTES = 64 << 10  # that the B-trees may take with one batch of records
GIVEN_SHARE = 32  # one record in so many is evicted beyond what is needed now, when space is given back
OWN_CORRUPT = 3
"""So many corrupt records that were stored since the file was opened mean damaged pages of LMDB: a list of
free pages names pages in use, and records are written over each other, again and again."""
HOLDER = "holder"  # the file that stands for the folder's lock
TURN = b"turn"  # a meaningless key in the main tree: written to have a transaction

log = logging.getLogger(__name__)
T = TypeVar("T")
TORN = (
    lmdb.BadDbiError,
    lmdb.BadValsizeError,
    lmdb.CorruptedError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)
"""LMDB's errors for a file with damaged pages: they would come again and again."""
ANOTHER_FORMAT = "LMDB data format"
"""Part of the LMDB binding's error text for a file of another version, or damaged there; it has no class of
its own."""


class StoreFailed(KVStoreError):
    """The disk refused to read or write the file, or it cannot be opened; nothing was changed."""


class StoreFull(StoreFailed):
    """The disk has no space for a record: less would stay free than ``floor``, even after records that may be
    evicted are gone."""


class StoreLocked(KVStoreError):
    """Another process holds this store."""


class StoreTorn(KVStoreError):
    """LMDB's own pages in the file were damaged; the file is removed."""


@dataclass(frozen=True, slots=True)
class NewRecord:
    """A record to be stored. ``tokens``: how many its block holds. ``payload``: its bytes, read only during the
    call. ``digest``: xxh3 of the payload. ``tenant``: the number of its tenant."""

    key: bytes
    tokens: int
    digest: int
    payload: memoryview
    tenant: int = 0


class RecordStore:
    """The records of one namespace in an LMDB file under ``folder``, at most ``budget`` bytes of them.
    ``space``: the namespace, 16 bytes; ``block_bytes``: the length of each payload.

    ``caps``: most bytes of a tenant's records, by the tenant's number. ``floor``: bytes of the disk that stay
    free, however full it is; None: the disk is not looked at. ``reserve``: a file of which the bytes count as
    free. ``ignored``: how many records were found that are not of this namespace, block size or layout; they
    are dropped. ``given_up``: keys evicted because the disk is short of space; the caller takes them. ``anew``:
    throw away what is there, since the process that opened it last died of it.

    Raises `StoreLocked`: another process holds it; `StoreFailed`: the folder or file cannot be opened, even
    anew.
    """

    def __init__(
        self,
        folder: Path,
        space: bytes,
        block_bytes: int,
        budget: int,
        caps: Mapping[int, int] | None = None,
        *,
        floor: int | None = None,
        reserve: Path | None = None,
        anew: bool = False,
    ) -> None:
        self.folder = folder
        self._reserve = reserve
        self._space = space
        self._length = block_bytes
        self._record_size = stride_of(block_bytes)
        self.budget = budget
        self.floor = floor
        self.given_up: list[bytes] = []
        self._most = {tenant: cap // self._record_size for tenant, cap in (caps or {}).items()}
        self._order = RecordEviction()
        self._used: set[bytes] = set()  # read since the last batch
        self._offsets = PayloadOffsets(folder / FILE)
        self._stamp = 0
        self._found_stamp = 0  # of the last record that was here when the file was opened
        self._own_corrupt = 0  # corrupt records that were stored or used after that
        self._file: int | None = None  # locked
        self.stained = True
        """Whether the file may still have the bytes of records that were removed (`scrub`): at first those that
        the last process removed before it ended."""
        self.ignored = 0
        try:
            self._lock = hold(folder)
        except OSError as error:
            raise StoreFailed(explained(error, f"the KV folder {folder}")) from error
        try:
            strange = self._begin(anew=anew)
        except BaseException as error:
            self._let_go()
            self._lock.release()
            if not isinstance(error, (OSError, lmdb.Error, MemoryError)):
                raise
            raise StoreFailed(explained(error, f"the KV file {folder / FILE}")) from error
        self.ignored = len(strange)
        surplus = [key for tenant, most in self._most.items() for key in self._order.surplus(tenant, most, 0)]
        if strange or surplus:
            self.drop([*strange, *surplus])

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: bytes) -> bool:
        return key in self._order

    @property
    def size(self) -> int:
        """Bytes that all records take in the file: their number times the size of one."""
        return len(self._order) * self._record_size

    @property
    def file_bytes(self) -> int:
        """Bytes of the disk that the file takes; holes in it do not count."""
        return held_by(self.folder / FILE)

    @property
    def headroom(self) -> int:
        """How many bytes the file may grow by before less than ``floor`` bytes are free on the disk; a
        negative number: how many to give back. The budget if there is no floor. Raises `StoreFailed`."""
        if self.floor is None:
            return self.budget
        try:
            held = 0 if self._reserve is None else held_by(self._reserve)
            return shutil.disk_usage(self.folder).free + held - self.floor
        except OSError as error:
            raise StoreFailed(explained(error, f"the folder {self.folder}")) from error

    @property
    def room(self) -> int:
        """Bytes that records may take now: the budget, or what the disk allows. Raises `StoreFailed`."""
        if self.floor is None:
            return self.budget
        return min(self.budget, max(0, self.file_bytes + self.headroom))

    def keys(self) -> list[bytes]:
        """The keys of all records, tenant by tenant; those of a tenant in the order in which it gives them
        up."""
        return list(self._order)

    def put(
        self, records: Sequence[NewRecord], superseded: Iterable[bytes] = (), touched: Iterable[bytes] = ()
    ) -> list[bytes]:
        """Store the records and remove those of ``superseded``, all in one transaction. Returns the keys of
        records that are not here now: those evicted for the new ones, and new ones that were left out.

        ``touched``: keys of records that count as used now. A tenant with a cap gives up its own records;
        where the new ones alone exceed the cap, the first of them are left out. Where the disk is short of
        space others are evicted before these are stored (``given_up``); where that is not enough, the first
        of these are left out. Raises `StoreFailed`: nothing was changed.
        """
        kept = set(superseded)
        for key in touched:
            if key in self._order:
                self._order.move(key, last=True)
                self._used.add(key)
        fresh = [record for record in records if record.key not in self._order or record.key in kept]
        fresh, refused = self._within_caps(fresh)
        fresh, crowded = self._within_disk(fresh)
        refused += crowded
        gone = [key for key in kept if key in self._order]
        surplus = self._surplus(fresh, kept)
        going = kept.union(surplus)
        room = self.budget - self.size - self._record_size * (len(fresh) - len(gone) - len(surplus))
        wanted = max(0, -(room // self._record_size))
        evicted = [*surplus, *self._order.evicted(wanted, [record.tenant for record in fresh], going)]
        if len(evicted) < wanted + len(surplus):
            raise StoreFailed(f"{len(fresh)} records do not fit a budget of {self.budget} bytes")
        stamps = {key: self._stamp + 1 + at for at, key in enumerate(sorted(self._used))}

        first = self._stamp + len(stamps) + 1
        headers = [self._header(record, first + at) for at, record in enumerate(fresh)]

        def work(txn: Any) -> None:
            self._delete(txn, (*gone, *evicted))
            for key, stamp in stamps.items():
                self._restamp(txn, key, stamp)
            for header, record in zip(headers, fresh, strict=True):
                txn.put(record.key, header.packed(), db=self._headers)
                txn.put(record.key, record.payload, db=self._payloads)

        self._write(work)
        self.stained |= bool(gone or evicted)
        self._find(headers)
        self._stamp += len(stamps) + len(fresh)
        self._used.clear()
        for key in (*gone, *evicted):
            self._order.remove(key)
            self._offsets.forget(key)
        for record in fresh:
            self._order.add(record.key, record.tenant)
        return [*evicted, *refused]

    def evict_first(self, keys: Iterable[bytes]) -> None:
        """Let these records be evicted before all others of their tenants, in this order: they are on a tier
        above."""
        for key in reversed(list(keys)):
            self._order.move(key, last=False)

    def lease(self, keys: Iterable[bytes], *, on: bool) -> None:
        """With ``on``, note that leases cover these keys: their records, also those that come later, are
        evicted after all others. Without, note that no lease covers them any longer."""
        self._order.lease(keys, on=on)

    def held(self) -> dict[int, int]:
        """The number of records of each tenant."""
        return self._order.held()

    def offset_of(self, key: bytes) -> int:
        """The payload's offset in the file, in bytes; 0 if it is unknown. A hint: a reader must check the
        bytes there."""
        return self._offsets.offset_of(key)

    def get(self, key: bytes, into: memoryview) -> RecordHeader:
        """Copy the record's payload into ``into`` and check it there. Returns its header. From now on the
        record is the first of its tenant's to be evicted.

        Raises `RecordMissing`: it is not here; `RecordCorrupt`: header or bytes are not what was stored, and
        it is dropped; `StoreFailed`: the medium refused; `StoreTorn`: the file is damaged, as the third
        corrupt record that was stored since it was opened shows, too.
        """
        header = self._get_by_offset(key, into)
        if header is not None:
            self._order.move(key, last=False)
            return header
        try:
            with self._env.begin(buffers=True) as txn:
                header, body, present = self._look_up(txn, key)
                if header is not None:
                    into[:] = body
        except lmdb.Error as error:
            raise self._failed(error) from error
        if not present:
            self._order.remove(key)
            raise RecordMissing(key, "not on disk")
        if header is None or xxh3_64_intdigest(into) != header.digest:
            if header is not None and header.stamp > self._found_stamp:
                self._own_corrupt += 1
                if self._own_corrupt == OWN_CORRUPT:
                    raise self._torn("records are written over each other")
            self.drop([key])
            raise RecordCorrupt(key, "its bytes on disk are not those that were stored")
        self._order.move(key, last=False)
        return header

    def load_pages(self, key: bytes) -> RecordHeader | None:
        """Bring the record's payload into the page cache, without a check: a reader must check it, see
        `offset_of`. From now on the record is the first of its tenant's to be evicted. Returns its header;
        None if it did not come: `get` finds out why.

        Raises `StoreFailed`: the medium refused; `StoreTorn`: the file is damaged.
        """
        try:
            if key not in self._offsets:
                with self._env.begin(buffers=True) as txn:
                    self._look_up(txn, key)
            header = self._offsets.load_pages(key, self._length)
        except (OSError, lmdb.Error) as error:
            raise self._failed(error) from error
        if header is not None:
            self._order.move(key, last=False)
        return header

    def drop(self, keys: Iterable[bytes]) -> None:
        """Remove these records. Where the medium refuses, they are only forgotten in memory, and are found
        again after a restart."""
        listed = list(keys)
        self.stained |= bool(listed)
        with contextlib.suppress(StoreFailed):  # found again after a restart, and checked again
            self._write(lambda txn: self._delete(txn, listed))
        self._forget(listed)

    def relieve(self, coming: int = 0) -> int:
        """If ``coming`` more bytes do not fit on the disk beside the floor, make room: turn free pages of the
        file into holes, and evict the longest unused records to free more.

        Returns by how many bytes the file is smaller; the keys of evicted records are in ``given_up``. Raises
        `StoreTorn` only: what cannot be given back now is tried again by the next call.
        """
        try:
            before, lack = self.file_bytes, coming - self.headroom
            if lack <= 0 or self.floor is None:
                return 0
            lack -= self._punch()
            if lack > 0 and len(self._order):
                count = -(-lack // self._record_size) + len(self._order) // GIVEN_SHARE
                self._give_up(self._order.evicted(count, (), ()))
                self._punch()
            return max(0, before - self.file_bytes)
        except (OSError, lmdb.Error, StoreFailed, ListUnreadable) as error:
            if errno_of(error) in OUT_OF_DESCRIPTORS:
                return 0
            if len(self):
                log.warning("all KV in %s is given up for space: %s", self.folder / FILE, error)
            return self._empty()

    def scrub(self) -> bool:
        """Remove the bytes of records that are gone from the file: LMDB only notes that their pages are free.
        Returns whether that was done; another process that reads the file prevents it. Raises `StoreFailed`,
        `StoreTorn`."""
        if not self.stained:
            return True
        self._write(lambda txn: txn.put(TURN, b""))  # after it the pages that were freed are free
        self.sync()
        try:
            self._punch(clear=True)
        except (OSError, ListUnreadable, lmdb.Error):
            return False
        self.stained = False
        return True

    def sync(self) -> None:
        """Flush the transactions so far to the medium. Raises `StoreFailed`."""
        try:
            self._env.sync(True)
            self._env.reader_check()
        except lmdb.Error as error:
            raise self._failed(error) from error

    def damaged(self) -> Iterator[bytes]:
        """Read and check all records, one at a time. Damaged ones are dropped; yields the keys of these."""
        buffer = memoryview(bytearray(self._length))
        for key in self.keys():
            try:
                self.get(key, buffer)
            except RecordCorrupt:
                yield key

    def close(self) -> None:
        """Close the file and release the lock."""
        self._offsets.close()
        self._env.close()
        self._let_go()
        self._lock.release()

    def _within_caps(self, fresh: list[NewRecord]) -> tuple[list[NewRecord], list[bytes]]:
        """Leave out those of the new records for which their tenants' caps have no room, the first ones
        first. Returns the records that stay, in order, and the keys of the others. Tenants without a cap keep
        all."""
        left = dict(self._most)
        staying: list[NewRecord] = []
        refused: list[bytes] = []
        for record in reversed(fresh):
            if left.get(record.tenant, 1) < 1:
                refused.append(record.key)
                continue
            staying.append(record)
            if record.tenant in left:
                left[record.tenant] -= 1
        return staying[::-1], refused

    def _within_disk(self, fresh: list[NewRecord]) -> tuple[list[NewRecord], list[bytes]]:
        """Make room on the disk for the new records. Returns as many of them as there is room for, the last
        ones, and the keys of the others. Raises `StoreFull` if there is room for none."""
        if self.floor is None or not fresh:
            return fresh, []
        self.relieve(len(fresh) * self._record_size + TREE_BYTES)
        most = max(0, self.headroom - TREE_BYTES) // self._record_size
        if not most:
            raise StoreFull(f"the disk of {self.folder} has no space for KV beyond what is kept free there")
        return fresh[-most:], [record.key for record in fresh[:-most]]

    def _give_up(self, keys: list[bytes]) -> None:
        """Evict these records for lack of space, note them in ``given_up``, and let their pages be free."""
        self._write(lambda txn: self._delete(txn, keys))
        self._write(lambda txn: txn.put(TURN, b""))  # after it the pages that were freed are free
        self._forget(keys)
        self.given_up += keys

    def _forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._order.remove(key)
            self._offsets.forget(key)
            self._used.discard(key)

    def _punch(self, *, clear: bool = False) -> int:
        """Turn the free pages of the file into holes. Returns the bytes given back. With ``clear``, they are
        overwritten on a file system without holes. Raises `ListUnreadable` also if another process reads the
        file."""
        if any(line.split()[-1].isdigit() for line in self._env.readers().splitlines()[1:]):
            raise ListUnreadable("another process reads it")
        fd = os.open(self.folder / FILE, os.O_RDWR | os.O_CLOEXEC)
        try:
            return clear_free_pages(fd) if clear else punch_free_pages(fd)
        finally:
            os.close(fd)

    def _empty(self) -> int:
        """Throw the whole file away, and begin an empty one; the keys of all records are noted in
        ``given_up``. Returns the bytes given back."""
        before, keys = self.file_bytes, self.keys()
        with contextlib.suppress(OSError, lmdb.Error, StoreFailed):  # the next call tries to have another
            self._env.close()
            self._begin(anew=True)
        self._forget(keys)
        self._used.clear()
        self.given_up += keys
        return max(0, before - self.file_bytes)

    def _surplus(self, fresh: list[NewRecord], besides: Collection[bytes]) -> list[bytes]:
        """The keys of records that tenants with a cap must give up for the new records ``fresh``.
        ``besides``: keys that are removed anyway."""
        coming = Counter(record.tenant for record in fresh if record.tenant in self._most)
        found = (self._order.surplus(one, self._most[one], coming[one], besides) for one in coming)
        return list(chain.from_iterable(found))

    def _begin(self, *, anew: bool = False) -> list[bytes]:
        """Open the LMDB environment (``anew``: with an empty file), and read the headers into the eviction
        order. Returns the keys of records that are not of this namespace, block size or layout. Raises
        `StoreFailed`, or what LMDB raises.

        A damaged file is thrown away: reading a truncated map kills the process.
        """
        path = self.folder / FILE
        for thrown in (anew, True):
            if thrown:
                throw_away(self.folder)
            env = None
            try:
                self._env = env = self._environment()
                info, page = env.info(), env.stat()["psize"]
                if not path.exists() or path.stat().st_size >= (info["last_pgno"] + 1) * page:
                    self._headers, self._payloads = env.open_db(b"headers"), env.open_db(b"payloads")
                    strange = self._read_order()
                    self._offsets.mapped()
                    return strange
                env.close()
            except (*TORN, lmdb.PanicError):
                if env is not None:
                    env.close()
            except lmdb.Error as error:
                if env is not None:
                    env.close()
                if ANOTHER_FORMAT not in str(error):
                    raise
        raise StoreFailed(f"{self.folder}: cannot be opened, even anew")

    def _environment(self) -> Any:
        path = self.folder / FILE
        size = max(FIRST_MAP, path.stat().st_size if path.exists() else 0)
        # With readahead, for the scan at the start; later `PayloadOffsets` advises the kernel.
        self._hold_file()
        return lmdb.open(str(self.folder), map_size=size, max_dbs=2, sync=False, writemap=False, mode=0o600)

    def _hold_file(self) -> None:
        """Lock the LMDB file itself: it may be in another folder, too, by a hard link. Raises `StoreLocked`."""
        self._let_go()
        self._file = os.open(self.folder / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._let_go()
            told = f"{self.folder / FILE} is held by another process: is it linked into another folder?"
            raise StoreLocked(told) from None

    def _let_go(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _read_order(self) -> list[bytes]:
        """Read all headers into the eviction order, by their stamps. Returns the keys of records that are not
        of this namespace, block size or layout."""
        found: list[tuple[int, bytes, int]] = []
        strange: list[bytes] = []
        with self._env.begin(db=self._headers) as txn:
            for key, data in txn.cursor():
                header = read_header(data, bytes(key), self._space, self._length)
                if header is None:
                    strange.append(bytes(key))
                else:
                    found.append((header.stamp, header.key, header.tenant))
        found.sort()
        for key in list(self._order):
            self._order.remove(key)
        for _, key, tenant in found:
            self._order.add(key, tenant)
        self._stamp = self._found_stamp = found[-1][0] if found else 0
        self._own_corrupt = 0
        return strange

    def _write(self, work: Callable[[Any], T]) -> T:
        """Run ``work`` in a write transaction and return its result. If LMDB's map is too small, make it
        larger and run ``work`` again. Raises `StoreFailed` or `StoreTorn`."""
        while True:
            try:
                with self._env.begin(write=True) as txn:
                    return work(txn)
            except lmdb.MapFullError as error:
                self._grow_map(error)
            except (lmdb.Error, OSError) as error:
                raise self._failed(error) from error

    def _grow_map(self, full: Exception) -> None:
        size, most = self._env.info()["map_size"], 2 * self.budget + SPARE
        if size >= most:
            raise StoreFailed("the map is full") from full
        try:
            self._env.set_mapsize(min(most, 2 * size))
        except (lmdb.Error, MemoryError) as error:  # of a limit on memory; what is mapped stays
            raise self._failed(error) from error
        self._offsets.mapped(anew=False)

    def _failed(self, error: Exception) -> KVStoreError:
        """Make the error that the caller raises for ``error``: `StoreTorn` if the file is damaged, which is
        then removed; otherwise `StoreFailed`, and the environment is opened again if it refuses
        everything."""
        if isinstance(error, TORN):
            return self._torn(str(error))
        self._renew()
        return StoreFailed(explained(error, f"the KV file {self.folder / FILE}"))

    def _torn(self, reason: str) -> StoreTorn:
        """Make the error that the caller raises because the file's pages are damaged, and remove the file.
        ``reason``: for its text."""
        (self.folder / FILE).unlink(missing_ok=True)  # still mapped here: a shorter one would kill us
        return StoreTorn(f"{self.folder}: the file of records is damaged and thrown away: {reason}")

    def _renew(self) -> None:
        """Open the LMDB environment again if it refuses everything, as after a meta page that could not be
        written.

        Which records were used since the last batch is lost then.
        """
        with contextlib.suppress(lmdb.Error), self._env.begin():
            return
        with contextlib.suppress(OSError, lmdb.Error, StoreFailed):
            self._env.close()
            self._begin()

    def _get_by_offset(self, key: bytes, into: memoryview) -> RecordHeader | None:
        """Read the payload from its known offset in the file into ``into``, and check it. Returns the
        record's header; None if the offset is unknown, or other bytes are there. Raises `StoreFailed`."""
        try:
            header = self._offsets.read(key, into)
        except OSError as error:
            raise StoreFailed(explained(error, f"the KV file {self.folder / FILE}")) from error
        return header if header is not None and xxh3_64_intdigest(into) == header.digest else None

    def _look_up(self, txn: Any, key: bytes) -> tuple[RecordHeader | None, Any, bool]:
        """Look a record up in LMDB's B-trees: its header and payload, and True. If a part is missing or the
        header or the length is wrong: None, None, and whether any part is there.

        The payload's bytes are not checked. Where it lies is remembered from now on.
        """
        head = txn.get(key, db=self._headers)
        with self._offsets.searching(key):
            body = txn.get(key, db=self._payloads)
        header = None if head is None else read_header(head, key, self._space, self._length)
        if header is None or body is None or len(body) != self._length:
            return None, None, head is not None or body is not None
        self._offsets.learn(key, body, header)
        return header, body, True

    def _find(self, headers: Iterable[RecordHeader]) -> None:
        """Look up the file offsets of records just stored, and remember them for later reads; the pages
        needed for that are still in memory. Errors are ignored."""
        with contextlib.suppress(lmdb.Error), self._env.begin(db=self._payloads, buffers=True) as txn:
            for header in headers:
                body = txn.get(header.key)
                if body is not None:
                    self._offsets.learn(header.key, body, header)

    def _delete(self, txn: Any, keys: Iterable[bytes]) -> None:
        for key in keys:
            txn.delete(key, db=self._headers)
            txn.delete(key, db=self._payloads)

    def _restamp(self, txn: Any, key: bytes, stamp: int) -> None:
        data = txn.get(key, db=self._headers)
        header = None if data is None else read_header(data, key, self._space, self._length)
        if header is not None:
            txn.put(key, replace(header, stamp=stamp).packed(), db=self._headers)

    def _header(self, record: NewRecord, stamp: int) -> RecordHeader:
        return RecordHeader(
            self._space, record.key, record.tokens, self._length, record.digest, stamp, record.tenant
        )


def throw_away(folder: Path) -> None:
    """Remove the LMDB file of records in ``folder``. It is emptied first, so that its space is free even if
    another process still has it open."""
    path = folder / FILE
    with contextlib.suppress(FileNotFoundError):
        os.truncate(path, 0)
        path.unlink()
    (folder / "lock.mdb").unlink(missing_ok=True)


def hold(folder: Path) -> FolderLock:
    """Take the lock of ``folder``; `FolderLock.release` frees it. Raises `StoreLocked`, naming the process that
    has it, or `OSError`."""
    try:
        return FolderLock(folder, HOLDER).acquire()
    except FolderHeld as held:
        raise StoreLocked(str(held)) from None


def clear(folder: Path) -> None:
    """Remove a namespace's folder with all its records. Raises `StoreLocked` while a process holds it."""
    if folder.is_dir():
        with hold(folder):
            shutil.rmtree(folder)
