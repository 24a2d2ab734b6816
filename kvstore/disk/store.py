"""Records on disk: which there are (`index`), their payloads (`payload_file`), and which go (`eviction`).

Payloads go straight from and into the caller's buffers, and every byte is checked when it is read. A record
that was read is on a tier above again: it is evicted first until it is touched. A payload is written to a
free slot before the index names it, and its slot is free before another is written there; so a process that
is killed at any moment loses the records that it was given last. Two errors leave this file. `StoreFailed`:
the medium refused, and may not refuse the next time. `StoreTorn`: the index is damaged; all is thrown away.

While less than ``floor`` bytes are free on the disk, records are evicted and their slots become holes of the
file. On a file system without holes the whole file is given back, and the store begins anew."""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import logging
import shutil
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from xxhash import xxh3_64_intdigest

from ..errors import FolderHeld, KVStoreError, RecordCorrupt, RecordMissing
from ..folder_lock import FolderLock
from ..reserve import held_by
from ..system_limits import OUT_OF_DESCRIPTORS, errno_of
from ..tier import Record
from . import index
from .eviction import RecordEviction
from .index import RecordEntry, RecordIndex, StoreFailed, named
from .messages import Begin
from .payload_file import FILE, PayloadFile, stride_of

TREE_BYTES = 64 << 10  # that the index may take with one batch of records
GIVEN_SHARE = 32  # one record in so many is evicted beyond what is needed now, when space is given back
MOST_USED = 1 << 16  # keys whose use is written when the store is closed, the last ones
HOLDER = "holder"  # the file that stands for the folder's lock

log = logging.getLogger(__name__)


class FreeSlots:
    """The slots of a payload file that hold no record, below its end at ``end``, a number of slots. Those that
    still have bytes are taken first: then the file takes no more space."""

    def __init__(self, used: Collection[int]) -> None:
        self.end = max(used, default=-1) + 1
        taken = set(used)
        self.stained = [slot for slot in range(self.end) if slot not in taken]
        """With the bytes of a record that is gone. A heap, as the next one: those in front are taken first."""
        self._empty: list[int] = []

    def take(self, count: int) -> list[int]:
        """Take so many slots, those in front first; the file may grow by some."""
        found: list[int] = []
        for free in (self.stained, self._empty):
            while free and len(found) < count:
                found.append(heapq.heappop(free))
        more = count - len(found)
        self.end += more
        return [*found, *range(self.end - more, self.end)]

    def give(self, slots: Iterable[int]) -> None:
        """Give back slots that may have bytes."""
        for slot in slots:
            heapq.heappush(self.stained, slot)

    def all(self) -> list[int]:
        """All free slots."""
        return [*self.stained, *self._empty]

    def emptied(self) -> None:
        """Note that no free slot has bytes any more."""
        self._empty = sorted(self.all())
        self.stained = []


class RecordStore:
    """The records of one record space, as ``begin`` says: in which folder, of what length, how many at most.

    ``given_up``: keys of records that went without a `put` that returned them; the caller takes them.
    ``anew``: throw away what is there, since the process that opened it last died of it. Records that are not
    of this record space, block size or layout are dropped. ``order``: that in which records are evicted.
    ``entries``: what the index has of each record, by key.

    Raises `FolderHeld`: another process holds it; `StoreFailed`: the folder or a file cannot be opened, even
    anew; with ``keep`` `StoreTorn` in place of throwing away an index that is damaged or of another form.
    """

    def __init__(self, begin: Begin, *, anew: bool = False, keep: bool = False) -> None:
        self.folder = folder = Path(begin.folder)
        self._reserve = Path(begin.reserve) if begin.reserve else None
        self._begun, self._stride = begin, stride_of(begin.block_bytes)
        self.budget, self.floor = begin.budget, begin.floor
        self.given_up: list[bytes] = []
        self._most = {tenant: cap // self._stride for tenant, cap in begin.caps.items()}
        with named(f"the KV folder {folder}"):
            self._lock = hold(folder)
        with self._named(MemoryError), contextlib.ExitStack() as undo:
            undo.callback(self._lock.release)
            self._file = _held_file(folder / FILE, begin.block_bytes)
            undo.callback(self._file.close)
            self._begin(anew=anew, keep=keep)
            undo.pop_all()
        if surplus := [key for tenant in self._most for key in self._surplus(tenant)]:
            self.drop(surplus)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def size(self) -> int:
        """Bytes that all records take in the file: their number times the size of one."""
        return len(self.entries) * self._stride

    @property
    def file_bytes(self) -> int:
        """Bytes of the disk that the files take; holes in them do not count."""
        return held(self.folder)

    @property
    def stained(self) -> bool:
        """Whether the file still has the bytes of records that are gone (`scrub`)."""
        return bool(self._free.stained)

    @property
    def headroom(self) -> int:
        """How many bytes the files may grow by before less than ``floor`` bytes are free on the disk; a
        negative number: how many to give back. The budget if there is no floor. Raises `StoreFailed`."""
        if self.floor is None:
            return self.budget
        with named(f"the folder {self.folder}"):
            return shutil.disk_usage(self.folder).free + held_by(self._reserve) - self.floor

    @property
    def room(self) -> int:
        """Bytes that records may take now: the budget, or what the disk allows. Raises `StoreFailed`."""
        return min(self.budget, max(0, self.file_bytes + self.headroom))

    def put(
        self,
        records: Iterable[tuple[Record, memoryview]],
        touched: Iterable[bytes] = (),
    ) -> list[bytes]:
        """Store the records. Returns the keys of records that are not here now: those evicted for the new ones,
        and new ones that were left out. ``records``: each with its bytes, which are read only during the call.

        ``touched``: keys of records that count as used now. A tenant with a cap gives up its own records;
        where the new ones alone exceed the cap, the first of them are left out. Where the disk is short of
        space others are evicted before these are stored (``given_up``); where that is not enough, the first
        of these are left out. Raises `StoreFailed`: none of the records is stored.
        """
        payloads = dict(records)
        for key in touched:
            self.order.move(key, last=True)
            self._used.pop(key, None)
            self._used[key] = None
            if len(self._used) > MOST_USED:
                self._used.popitem(last=False)
        fresh = [record for record in payloads if record.key not in self.entries]
        fresh, refused = self._within_caps(fresh)
        fresh, crowded = self._within_disk(fresh)
        coming = Counter(record.tenant for record in fresh)
        evicted = [key for one in coming for key in self._surplus(one, coming[one])]
        room = self.budget - self.size - self._stride * (len(fresh) - len(evicted))
        wanted = len(evicted) + max(0, -(room // self._stride))
        evicted += self.order.evicted(wanted - len(evicted), coming, set(evicted))
        if len(evicted) < wanted:
            raise StoreFailed(f"{len(fresh)} records do not fit a budget of {self.budget} bytes")
        if evicted:
            self._remove(evicted)
        try:
            self._store(fresh, payloads)
        except KVStoreError:
            self.given_up += evicted
            raise
        return [*evicted, *refused, *crowded]

    def _store(self, fresh: Sequence[Record], payloads: Mapping[Record, memoryview]) -> None:
        if not fresh:
            return
        slots = self._free.take(len(fresh))
        entries = {
            record.key: RecordEntry(slot, record.digest, self._age + 1 + at, record.tenant, record.tokens)
            for at, (record, slot) in enumerate(zip(fresh, slots, strict=True))
        }
        try:
            with self._named():
                for record, slot in zip(fresh, slots, strict=True):
                    self._file.write(slot, payloads[record])
            self._index.write(entries)
        except KVStoreError:
            self._free.give(slots)
            raise
        self._age += len(fresh)
        self.entries.update(entries)
        for record in fresh:
            self.order.add(record.key, record.tenant)

    def evict_first(self, keys: Iterable[bytes]) -> None:
        """Let these records be evicted before all others of their tenants, in this order: they are on a tier
        above."""
        for key in reversed(list(keys)):
            self.order.move(key, last=False)

    def get(self, key: bytes, into: memoryview | None) -> RecordEntry:
        """Copy the record's payload into ``into`` and check it there; None: bring it into the page cache alone,
        where a reader must check it. Returns its entry. From now on the record is the first of its tenant's to
        be evicted.

        Raises `RecordMissing`: it is not here; `RecordCorrupt`: its bytes are not what was stored, and it is
        dropped; `StoreFailed`: the medium refused.
        """
        if (entry := self.entries.get(key)) is None:
            raise RecordMissing(key, "not on disk")
        with self._named():
            whole = self._file.cache(entry.slot) if into is None else self._file.read(entry.slot, into)
        if not whole or (into is not None and xxh3_64_intdigest(into) != entry.digest):
            self.drop([key])
            raise RecordCorrupt(key, "its bytes on disk are not those that were stored")
        self.order.move(key, last=False)
        return entry

    def drop(self, keys: Iterable[bytes]) -> None:
        """Remove these records. Where the medium refuses, they are only forgotten in memory, and are found
        again after a restart."""
        self._remove([key for key in keys if key in self.entries], surely=True)

    def relieve(self, coming: int = 0) -> None:
        """If ``coming`` more bytes do not fit on the disk beside the floor, make room: turn free slots of the
        file into holes, and evict the longest unused records to free more.

        The keys of evicted records are in ``given_up``. Raises `StoreTorn` only: what cannot be given back now
        is tried again by the next call.
        """
        try:
            lack = coming - self.headroom
            if lack <= 0 or self.floor is None:
                return
            lack -= self._punch()
            if lack > 0 and len(self):
                count = -(-lack // self._stride) + len(self) // GIVEN_SHARE
                keys = self.order.evicted(count, {}, ())
                self._remove(keys)
                self.given_up += keys
                self._punch()
        except (OSError, StoreFailed) as error:
            if errno_of(error) in OUT_OF_DESCRIPTORS:
                return
            if len(self):
                log.warning("all KV in %s is given up for space: %s", self.folder / FILE, error)
            self._empty()

    def scrub(self) -> None:
        """Remove the bytes of records that are gone from the file. Raises `StoreFailed`, `StoreTorn`."""
        with self._named():
            self._file.clear(self._free.stained)
        self._free.emptied()
        self.sync()

    def sync(self) -> None:
        """Flush what was stored so far to the medium, the payloads first. Raises `StoreFailed`, `StoreTorn`."""
        with self._named():
            self._file.sync()
        self._index.sync()

    def verify(self) -> int:
        """Read and check all records, one at a time. Damaged ones are dropped; returns how many."""
        buffer, before = memoryview(bytearray(self._file.length)), len(self)
        for key in list(self.entries):
            with contextlib.suppress(RecordCorrupt):
                self.get(key, buffer)
        return before - len(self)

    def close(self) -> None:
        """Write the ages of records that were used, close the files and release the lock."""
        ages = enumerate((key for key in self._used if key in self.entries), self._age + 1)
        used = {key: replace(self.entries[key], age=age) for age, key in ages}
        if used:
            with contextlib.suppress(KVStoreError):
                self._index.write(used)
        self._index.close()
        self._file.close()
        self._lock.release()

    # --- what does not fit ----------------------------------------------------------------------------------

    def _within_caps(self, fresh: list[Record]) -> tuple[list[Record], list[bytes]]:
        """Leave out those of the new records for which their tenants' caps have no room, the first ones
        first. Returns the records that stay, in order, and the keys of the others. Tenants without a cap keep
        all."""
        coming = Counter[int]()
        staying: list[Record] = []
        refused: list[bytes] = []
        for record in reversed(fresh):
            coming[record.tenant] += 1
            if coming[record.tenant] <= self._most.get(record.tenant, len(fresh)):
                staying.append(record)
            else:
                refused.append(record.key)
        return staying[::-1], refused

    def _within_disk(self, fresh: list[Record]) -> tuple[list[Record], list[bytes]]:
        """Make room on the disk for the new records. Returns as many of them as there is room for, the last
        ones, and the keys of the others."""
        if self.floor is None or not fresh:
            return fresh, []
        self.relieve(max(0, len(fresh) - len(self._free.stained)) * self._stride + TREE_BYTES)
        most = len(self._free.stained) + max(0, self.headroom - TREE_BYTES) // self._stride
        left_out = max(0, len(fresh) - most)
        return fresh[left_out:], [record.key for record in fresh[:left_out]]

    def _surplus(self, tenant: int, coming: int = 0) -> list[bytes]:
        """The keys of records that a tenant must give up for ``coming`` new ones, in eviction order; none if it
        has no cap."""
        most = self._most.get(tenant)
        return [] if most is None else self.order.surplus(tenant, most - coming)

    # --- the files ------------------------------------------------------------------------------------------

    def _begin(self, *, anew: bool = False, keep: bool = False) -> None:
        """Open the index (``anew``: an empty one). Records are dropped whose slots are not in the file, or
        belong to a younger one: the index could not be written when they were dropped before."""
        self._index = RecordIndex(self._begun, anew=anew, keep=keep)
        found, slots = self._index.entries, self._file.slots
        holders = {entry.slot: key for key, entry in found.items()}  # the youngest come last
        self.entries = {
            key: entry for key, entry in found.items() if entry.slot < slots and holders[entry.slot] == key
        }
        self._used: OrderedDict[bytes, None] = OrderedDict()
        self.order = RecordEviction()
        for key, entry in self.entries.items():
            self.order.add(key, entry.tenant)
        self._age = max((entry.age for entry in found.values()), default=0)
        self._free = FreeSlots({entry.slot for entry in self.entries.values()})
        if len(self.entries) < len(found):
            with contextlib.suppress(StoreFailed):
                self._index.write({}, found.keys() - self.entries.keys())
        with contextlib.suppress(OSError):  # what lies behind the last record is of one that was not finished
            self._file.cut(self._free.end)

    def _remove(self, keys: Collection[bytes], *, surely: bool = False) -> None:
        """Remove records that are here. ``surely``: even if the medium refuses. Raises `StoreFailed`: they are
        here; `StoreTorn`."""
        try:
            self._index.write({}, keys)
        except StoreFailed:
            if not surely:
                raise
        self._free.give(self.entries.pop(key).slot for key in keys)
        for key in keys:
            self.order.remove(key)

    def _punch(self) -> int:
        """Turn the free slots of the file into holes. Returns the bytes given back."""
        given = self._file.punch(self._free.all())
        self._free.emptied()
        return given

    def _empty(self) -> None:
        """Throw all records away; their keys are noted in ``given_up``."""
        keys = list(self.entries)
        with contextlib.suppress(OSError, KVStoreError):  # the next call tries to have another
            self._index.close()
            self._begin(anew=True)
        self.given_up += keys

    def _named(self, *others: type[Exception]) -> contextlib.AbstractContextManager[None]:
        return named(f"the KV file {self.folder / FILE}", (OSError, *others))


def _held_file(path: Path, length: int) -> PayloadFile:
    """Open the payloads' file, and lock it: it may be in another folder, too, by a hard link. Raises
    `FolderHeld`, `OSError`."""
    file = PayloadFile(path, length, writable=True)
    try:
        fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        told = f"{path} is held by another process: is it linked into another folder?"
        raise FolderHeld(told) from None
    return file


def held(folder: Path) -> int:
    """Bytes of the disk that the records in ``folder`` take, with their index; holes do not count."""
    return held_by(folder / FILE) + held_by(folder / index.FILE)


def throw_away(folder: Path) -> None:
    """Remove the records in ``folder``: see `index.remove`."""
    for name in (index.FILE, FILE):
        index.remove(folder / name)


def hold(folder: Path) -> FolderLock:
    """Take the lock of ``folder``; `FolderLock.release` frees it. Raises `FolderHeld`, naming the process that
    has it, or `OSError`."""
    return FolderLock(folder, HOLDER).acquire()


def clear(folder: Path) -> None:
    """Remove a record space's folder with all its records. Raises `FolderHeld` while a process holds it."""
    if folder.is_dir():
        with hold(folder):
            shutil.rmtree(folder)
