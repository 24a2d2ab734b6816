"""Records in an LMDB environment: headers and payloads by key, within a budget; `order` says who goes first.

Never ``writemap`` (a full disk would kill the process), never a transaction that outlives a call, payloads
straight from and into the caller's buffers, every byte checked when it is read. What was read is above again
and the first to give way, until it is touched; its recency is written with the next batch. What raises here is
`StoreFailed`: the medium refused, and may not refuse the next time. For one process and thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import lmdb
from xxhash import xxh3_64_intdigest

from ..errors import KVStoreError, RecordDamaged, RecordMissing
from .order import RecordOrder
from .places import Places
from .record import RecordHeader, read_header

PAGE = 4096
FIRST_MAP = 16 << 20
SPARE = 64 << 20  # of the map, beyond twice the budget: pages freed are not free at once

T = TypeVar("T")


class StoreFailed(KVStoreError):
    """The medium refused; what was asked for has not happened."""


class StoreHeld(KVStoreError):
    """Another process has this store."""


@dataclass(frozen=True, slots=True)
class Given:
    """A record to be kept. ``payload`` is read during the call only."""

    key: bytes
    tokens: int
    digest: int
    payload: memoryview
    tenant: int = 0


class RecordStore:
    """The records of one namespace under ``folder``, at most ``budget`` bytes of them.

    ``ignored``: headers found that are not of this namespace, block size or layout; they are dropped.

    Raises:
        StoreHeld: another process has it open.
        StoreFailed: the folder or file cannot be opened, even anew.
    """

    def __init__(self, folder: Path, space: bytes, block_bytes: int, budget: int) -> None:
        self._folder = folder
        self._space = space
        self._length = block_bytes
        self._record_size = -(-(block_bytes + 16) // PAGE) * PAGE
        self.budget = budget
        self._order = RecordOrder()
        self._used: set[bytes] = set()  # read since the last batch
        self._places = Places(folder / "data.mdb")
        self._stamp = 0
        self.ignored = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = hold(folder)
        except OSError as error:
            raise StoreFailed(f"{folder}: {error}") from error
        try:
            self._env, self._headers, self._payloads = self._open()
        except (OSError, lmdb.Error) as error:
            os.close(self._lock)
            raise StoreFailed(f"{folder}: {error}") from error
        strange = self._read_order()
        self._places.mapped()
        self.ignored = len(strange)
        if strange:
            self.drop(strange)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: bytes) -> bool:
        return key in self._order

    @property
    def size(self) -> int:
        """Bytes that its records take."""
        return len(self._order) * self._record_size

    def keys(self) -> list[bytes]:
        """All of them, the longest unused first."""
        return list(self._order)

    def put(
        self, records: Sequence[Given], superseded: Iterable[bytes] = (), touched: Iterable[bytes] = ()
    ) -> list[bytes]:
        """Keep these and forget ``superseded``, all in one transaction; returns keys given up for room.

        ``touched``: used now, as if they had been put.

        Raises:
            StoreFailed: none of it happened.
        """
        kept = set(superseded)
        for key in touched:
            if key in self._order:
                self._order.move(key, last=True)
                self._used.add(key)
        fresh = [record for record in records if record.key not in self._order or record.key in kept]
        gone = [key for key in kept if key in self._order]
        room = self.budget - self.size - self._record_size * (len(fresh) - len(gone))
        wanted = max(0, -(room // self._record_size))
        evicted = self._order.evicted(wanted, [record.tenant for record in fresh], kept)
        if len(evicted) < wanted:
            raise StoreFailed(f"{len(fresh)} records do not fit a budget of {self.budget} bytes")
        stamps = {key: self._stamp + 1 + at for at, key in enumerate(sorted(self._used))}

        def work(txn: Any) -> None:
            for key in (*gone, *evicted):
                self._delete(txn, key)
            for key, stamp in stamps.items():
                self._restamp(txn, key, stamp)
            for at, record in enumerate(fresh):
                stamp = self._stamp + len(stamps) + at + 1
                txn.put(record.key, self._header(record, stamp).packed(), db=self._headers)
                txn.put(record.key, record.payload, db=self._payloads)

        self._write(work)
        self._find(record.key for record in fresh)
        self._stamp += len(stamps) + len(fresh)
        self._used.clear()
        for key in (*gone, *evicted):
            self._order.remove(key)
            self._places.forget(key)
        for record in fresh:
            self._order.add(record.key, record.tenant)
        return evicted

    def give_way(self, keys: Iterable[bytes]) -> None:
        """These are kept above: they go before all others here, the first of them first."""
        for key in reversed(list(keys)):
            self._order.move(key, last=False)

    def lease(self, keys: Iterable[bytes], *, on: bool) -> None:
        """Leases cover these, kept or not: they go after all others. Not ``on``: no longer."""
        self._order.lease(keys, on=on)

    def held(self) -> dict[int, int]:
        """Records by tenant."""
        return self._order.held()

    def expect(self, keys: Iterable[bytes]) -> None:
        """These will be read next: have the medium read ahead where it is known where they lie.

        First the pages of the B-trees that lead there, which would else wait behind all those payloads: looked
        up is what would stand right behind each key, as a payload that is found is read at once.
        """
        listed = list(keys)
        with contextlib.suppress(lmdb.Error), self._env.begin() as txn:
            for key in listed:
                txn.get(key + b"\0", db=self._headers)
                txn.get(key + b"\0", db=self._payloads)
        self._places.expect(listed, self._length)

    def get(self, key: bytes, into: memoryview) -> RecordHeader:
        """Copy the payload into ``into`` and check it there; from now on it is the first to give way here.

        Raises:
            RecordMissing: it is not here.
            RecordDamaged: header or bytes are not what was stored; it is dropped.
            StoreFailed: the medium refused.
        """
        try:
            with self._env.begin(buffers=True) as txn:
                head = txn.get(key, db=self._headers)
                with self._places.searching(key):
                    body = txn.get(key, db=self._payloads)
                if body is not None and key not in self._places:
                    self._places.learn(key, body)
                header = None if head is None else read_header(head, key, self._space, self._length)
                if header is not None and body is not None and len(body) == self._length:
                    into[:] = body
                else:
                    header = None
        except lmdb.Error as error:
            self._renew()
            raise StoreFailed(str(error)) from error
        if head is None and body is None:
            self._order.remove(key)
            raise RecordMissing(key, "not on disk")
        if header is None or xxh3_64_intdigest(into) != header.digest:
            self.drop([key])
            raise RecordDamaged(key, "its bytes on disk are not those that were stored")
        self._order.move(key, last=False)
        return header

    def drop(self, keys: Iterable[bytes]) -> None:
        """Forget these; those that the medium will not forget are forgotten here."""
        listed = list(keys)

        def work(txn: Any) -> None:
            for key in listed:
                self._delete(txn, key)

        with contextlib.suppress(StoreFailed):  # found again after a restart, and checked again
            self._write(work)
        for key in listed:
            self._order.remove(key)
            self._places.forget(key)
            self._used.discard(key)

    def sync(self) -> None:
        """Have the medium keep what was put. Raises `StoreFailed`."""
        try:
            self._env.sync(True)
            self._env.reader_check()
        except lmdb.Error as error:
            self._renew()
            raise StoreFailed(str(error)) from error

    def damaged(self) -> Iterator[bytes]:
        """Keys whose record is not what was stored; reads everything, a record at a time."""
        buffer = memoryview(bytearray(self._length))
        for key in self.keys():
            try:
                self.get(key, buffer)
            except RecordDamaged:
                yield key

    def close(self) -> None:
        """Let go of file and lock."""
        self._places.close()
        self._env.close()
        os.close(self._lock)

    # --- inside -----------------------------------------------------------------------------------------

    def _open(self) -> tuple[Any, Any, Any]:
        """The environment; one that is torn is thrown away: whoever reads a truncated map dies."""
        path = self._folder / "data.mdb"
        for _ in range(2):
            try:
                env = self._environment()
                try:
                    info, page = env.info(), env.stat()["psize"]
                    if not path.exists() or path.stat().st_size >= (info["last_pgno"] + 1) * page:
                        return env, env.open_db(b"headers"), env.open_db(b"payloads")
                except lmdb.Error:
                    env.close()
                    raise
                env.close()
            except (lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError, lmdb.PanicError):
                pass
            path.unlink(missing_ok=True)
            (self._folder / "lock.mdb").unlink(missing_ok=True)
        raise StoreFailed(f"{self._folder}: cannot be opened, even anew")

    def _environment(self) -> Any:
        size = max(FIRST_MAP, (self._folder / "data.mdb").stat().st_size if self._made else 0)
        # With readahead, for the scan at the beginning; then `Places` says what is read ahead.
        return lmdb.open(str(self._folder), map_size=size, max_dbs=2, sync=False, writemap=False)

    @property
    def _made(self) -> bool:
        return (self._folder / "data.mdb").exists()

    def _read_order(self) -> list[bytes]:
        """Take what the file holds, the longest unused first; gives keys of records that are not ours."""
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
        self._stamp = found[-1][0] if found else 0
        return strange

    def _write(self, work: Callable[[Any], T]) -> T:
        """Run ``work`` in a transaction, in a larger map where this one is full."""
        while True:
            try:
                with self._env.begin(write=True) as txn:
                    return work(txn)
            except lmdb.MapFullError as error:
                size = self._env.info()["map_size"]
                most = 2 * self.budget + SPARE
                if size >= most:
                    raise StoreFailed("the map is full") from error
                self._env.set_mapsize(min(most, 2 * size))
                self._places.mapped(anew=False)
            except (lmdb.Error, OSError) as error:
                self._renew()
                raise StoreFailed(str(error)) from error

    def _renew(self) -> None:
        """An environment whose meta page could not be written refuses everything: have another, or next time.

        What the file holds is found again; recency since the last batch is forgotten.
        """
        with contextlib.suppress(lmdb.Error), self._env.begin():
            return
        with contextlib.suppress(OSError, lmdb.Error, StoreFailed):
            self._env.close()
            self._env, self._headers, self._payloads = self._open()
            self._read_order()
            self._places.mapped()

    def _find(self, keys: Iterable[bytes]) -> None:
        """Look up where these have just been put, while their pages are still in memory."""
        with contextlib.suppress(lmdb.Error), self._env.begin(db=self._payloads, buffers=True) as txn:
            for key in keys:
                body = txn.get(key)
                if body is not None:
                    self._places.learn(key, body)

    def _delete(self, txn: Any, key: bytes) -> None:
        txn.delete(key, db=self._headers)
        txn.delete(key, db=self._payloads)

    def _restamp(self, txn: Any, key: bytes, stamp: int) -> None:
        data = txn.get(key, db=self._headers)
        header = None if data is None else read_header(data, key, self._space, self._length)
        if header is not None:
            txn.put(key, replace(header, stamp=stamp).packed(), db=self._headers)

    def _header(self, record: Given, stamp: int) -> RecordHeader:
        return RecordHeader(
            self._space, record.key, record.tokens, self._length, record.digest, stamp, record.tenant
        )


def hold(folder: Path) -> int:
    """Take the folder's lock, whose file names the process. Raises `StoreHeld`, naming who has it."""
    fd = os.open(folder / "holder", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        raise StoreHeld(f"{folder} is held by process {holder or 'unknown'}") from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd


def clear(folder: Path) -> None:
    """Remove a namespace's records. Raises `StoreHeld` while a process has them."""
    if folder.is_dir():
        lock = hold(folder)
        shutil.rmtree(folder)
        os.close(lock)
