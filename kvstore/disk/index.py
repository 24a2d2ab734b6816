"""Which records a store has, and in which slot of its file each payload lies: an LMDB environment.

Small transactions; no payloads. It is read once, when it is opened. Never ``writemap``: a full disk would
kill the process."""

from __future__ import annotations

import contextlib
import logging
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import lmdb
from xxhash import xxh3_64_intdigest

from ..errors import KVStoreError
from ..system_limits import explained
from .messages import Begin
from .payload_file import stride_of

FILE = "data.mdb"
"""Name of the file in a store's folder; LMDB gives it."""
FIRST_MAP = 16 << 20
LAYOUT, VERSION = b"layout", 2
"""Under this key of the main tree stands what the records are: the version of this form, the record space,
the bytes of a payload and those of a slot."""
_LAYOUT = struct.Struct("<I16sQQ")
_ENTRY, _SUM = struct.Struct("<QQQQI"), struct.Struct("<Q")  # an entry is followed by its checksum

TORN = (
    lmdb.BadDbiError,
    lmdb.BadTxnError,
    lmdb.BadValsizeError,
    lmdb.CorruptedError,
    lmdb.CursorFullError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.InvalidParameterError,
    lmdb.PageFullError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)
"""Errors of a file with damaged pages: they would come again and again."""
ANOTHER_FORMAT = "LMDB data format"
"""Part of the LMDB binding's error text for a file of another version, or damaged there; it has no class of
its own."""


log = logging.getLogger(__name__)


class StoreFailed(KVStoreError):
    """The disk refused to read or write the files, or they cannot be opened."""


@contextlib.contextmanager
def named(what: str, errors: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    """Raise `StoreFailed` for one of ``errors`` in the block; ``what``: see `explained`."""
    try:
        yield
    except errors as error:
        raise StoreFailed(explained(error, what)) from error


class StoreTorn(KVStoreError):
    """LMDB's own pages in the index were damaged; it is removed."""


@dataclass(frozen=True, slots=True)
class RecordEntry:
    """What stands in the index for a record. ``slot``: where its payload lies; ``digest``: xxh3 of that;
    ``age``: a number that rises with each record stored; ``tenant``: its number; ``tokens``: in the block."""

    slot: int
    digest: int
    age: int
    tenant: int
    tokens: int

    def packed(self, key: bytes) -> bytes:
        """The entry of the record ``key`` as it is written: with a checksum of the key and of all that it
        says, since LMDB checks nothing."""
        told = _ENTRY.pack(self.slot, self.digest, self.age, self.tenant, self.tokens)
        return told + _SUM.pack(xxh3_64_intdigest(key + told))

    @staticmethod
    def unpacked(key: bytes, data: bytes) -> RecordEntry:
        """What `packed` has packed. Raises `lmdb.CorruptedError` if that is not what was written."""
        told = data[: _ENTRY.size]
        if data[_ENTRY.size :] != _SUM.pack(xxh3_64_intdigest(key + told)):
            raise lmdb.CorruptedError("an entry is damaged")
        return RecordEntry(*_ENTRY.unpack(told))


class RecordIndex:
    """The index of the record space that ``begin`` names. ``entries``: what it has. ``anew``: throw away what
    is there.

    An index that is damaged or of another form is thrown away, and one that finds no memory: reading a
    truncated map kills the process. Raises `StoreFailed`; with ``keep`` `StoreTorn` in place of throwing away.
    """

    def __init__(self, begin: Begin, *, anew: bool = False, keep: bool = False) -> None:
        self._folder = Path(begin.folder)
        self.path = self._folder / FILE
        length = begin.block_bytes
        self._layout = _LAYOUT.pack(VERSION, begin.space, length, stride_of(length))
        self.entries: dict[bytes, RecordEntry] = {}
        for thrown in (anew, True):
            if thrown:
                remove(self.path)
            try:
                self._open()
                return
            except lmdb.Error as error:
                # The first pages say how much is mapped: damaged, they ask for more memory than there is.
                lost = (*TORN, lmdb.PanicError, lmdb.MemoryError)
                if thrown or (not isinstance(error, lost) and ANOTHER_FORMAT not in str(error)):
                    raise StoreFailed(explained(error, f"the KV index {self.path}")) from error
                told = f"the KV index {self.path} is damaged or of another form: {error}"
            if keep:
                raise StoreTorn(told)
            log.warning("%s; all KV in the folder is given up", told)

    def write(self, put: Mapping[bytes, RecordEntry], delete: Collection[bytes] = ()) -> None:
        """Delete some records and put others, in one transaction. If LMDB's map is too small, it is made
        larger. Raises `StoreFailed`: nothing was changed; `StoreTorn`."""
        while True:
            try:
                with self._env.begin(db=self._records, write=True) as txn:
                    for key in delete:
                        txn.delete(key)
                    for key, one in put.items():
                        txn.put(key, one.packed(key))
                return
            except lmdb.MapFullError as error:
                try:
                    self._env.set_mapsize(2 * self._env.info()["map_size"])
                except (lmdb.Error, MemoryError):  # of a limit on memory; what is mapped stays
                    raise self._failed(error) from error
            except (lmdb.Error, OSError) as error:
                raise self._failed(error) from error

    def sync(self) -> None:
        """Flush the transactions so far to the medium. Raises `StoreFailed`, `StoreTorn`."""
        try:
            self._env.sync(True)
        except lmdb.Error as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _open(self) -> None:
        """Open the environment and read all entries. Raises what LMDB raises."""
        size = max(FIRST_MAP, self.path.stat().st_size if self.path.exists() else 0)
        self._env = env = lmdb.open(
            str(self._folder), map_size=size, max_dbs=1, sync=False, lock=False, mode=0o600
        )
        try:
            if self.path.stat().st_size < (env.info()["last_pgno"] + 1) * env.stat()["psize"]:
                raise lmdb.CorruptedError("the file is cut")
            with env.begin(write=True) as txn:
                layout, entries = txn.get(LAYOUT), txn.stat()["entries"]
                if layout is None and not entries:
                    txn.put(LAYOUT, self._layout)
                elif layout != self._layout:
                    raise lmdb.InvalidError("its records have another layout")
            self._records = env.open_db(b"records")
            with env.begin(db=self._records) as txn:
                found = {key: RecordEntry.unpacked(key, value) for key, value in txn.cursor()}
        except BaseException:
            env.close()
            raise
        self.entries = dict(sorted(found.items(), key=lambda one: one[1].age))

    def _failed(self, error: Exception) -> KVStoreError:
        """The error that the caller raises for ``error``: `StoreTorn` if the file is damaged, which is then
        removed; else `StoreFailed`, and the environment is opened again if it refuses everything, as after a
        meta page that could not be written."""
        if isinstance(error, TORN):
            self.path.unlink(missing_ok=True)  # still mapped here: a shorter one would kill us
            return StoreTorn(f"{self._folder}: the index of records is damaged and thrown away: {error}")
        with contextlib.suppress(lmdb.Error), self._env.begin():
            return StoreFailed(explained(error, f"the KV index {self.path}"))
        with contextlib.suppress(OSError, lmdb.Error):
            self._env.close()
            self._open()
        return StoreFailed(explained(error, f"the KV index {self.path}"))


def remove(path: Path) -> None:
    """Remove a file, if it is there. It is emptied first, so that its space is free even if another process
    still has it open."""
    with contextlib.suppress(FileNotFoundError):
        with path.open("r+b") as file:
            file.truncate()
        path.unlink()
