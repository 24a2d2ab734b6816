"""A tier that keeps records as a folder of files: an example of the interface, with no more than it asks for.

A record is one file, named after its key: a header, then the bytes of the block. It is written under another
name and then renamed, so it is there whole or not at all. After a crash of the machine it may still be cut:
nothing is synced. Header and bytes are checked as they are read, and a file that is wrong costs its record.

All is done at once, in `store` and `fetch`; the next `poll` tells it. Nothing is evicted: a full disk refuses.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from struct import Struct

import xxhash

from holdfast.kvstore.host.slots import SlotMemory
from holdfast.kvstore.tier import MoveEnd, Presence, Record, Tier

HEADER = Struct("<QqQQ")
"""Tokens, tenant, the xxh3 of the bytes, and the xxh3 of the key and of the fields before."""

SUFFIX = ".record"


class FolderTier(Tier):
    """The records in ``folder``, which is made if it is not there. They are blocks of ``memory``. One process
    uses a folder. Raises `OSError` if the folder cannot be made or listed."""

    name = "folder"
    checks = True

    def __init__(self, folder: Path, memory: SlotMemory) -> None:
        self._folder = folder
        self._memory = memory
        self._unfinished = folder / "unfinished"
        self._ended: list[tuple[bytes, MoveEnd]] = []
        self._to_erase: set[bytes] = set()
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):
            self._unfinished.unlink(missing_ok=True)
        self._keys = self._find()

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def room(self) -> int:
        """As many as the disk has space for."""
        try:
            free = shutil.disk_usage(self._folder).free
        except OSError:
            return 0
        return free // (HEADER.size + self._memory.block_bytes)

    @property
    def waiting(self) -> bool:
        return bool(self._ended)

    def lookup(self, keys: Collection[bytes]) -> list[Presence]:
        return [Presence.FOUND if key in self._keys else Presence.ABSENT for key in keys]

    def store(self, record: Record, slot: int, ticket: int, now: float) -> bool:
        key = record.key
        if key in self._keys:
            return False
        done = self._write(record, self._memory.payload(slot))
        if done:
            self._keys.add(key)
            self._to_erase.discard(key)  # the new file has taken the place of the old one
        self._ended.append((key, MoveEnd(ticket, done)))
        return True

    def fetch(self, key: bytes, slot: int | None, ticket: int, now: float) -> bool:
        if slot is None or key not in self._keys:
            return False
        record = self._read(key, self._memory.payload(slot))
        if record is None:
            self.drop(key)
        self._ended.append((key, MoveEnd(ticket, record is not None, record)))
        return True

    def poll(self, now: float) -> list[MoveEnd]:
        self._to_erase = {key for key in self._to_erase if not self._remove(key)}
        ended = [end for _, end in self._ended]
        self._ended.clear()
        return ended

    def touch(self, keys: Iterable[bytes]) -> None:
        """Nothing is evicted."""

    def evict_first(self, keys: Iterable[bytes]) -> None:
        """Nothing is evicted."""

    def drop(self, key: bytes, *, erase: bool = False) -> None:
        """Its file is removed now. If that fails and it is to be erased, each `poll` tries again."""
        self._keys.discard(key)
        self._ended = [(of, MoveEnd(end.ticket, False) if of == key else end) for of, end in self._ended]
        if not self._remove(key) and erase:
            self._to_erase.add(key)

    def _find(self) -> set[bytes]:
        """The keys of the files that look like records. What is in them is checked when they are read."""
        keys = set()
        for path in self._folder.iterdir():
            with suppress(OSError, ValueError):
                key = bytes.fromhex(path.name.removesuffix(SUFFIX))
                whole = path.stat().st_size == HEADER.size + self._memory.block_bytes
                if path == self._path(key) and path.is_file() and whole:
                    keys.add(key)
        return keys

    def _path(self, key: bytes) -> Path:
        return self._folder / (key.hex() + SUFFIX)

    def _write(self, record: Record, payload: memoryview) -> bool:
        """Make a record's file. Returns whether it is there."""
        try:
            with self._unfinished.open("wb") as file:
                file.write(_header(record))
                file.write(payload)
            os.replace(self._unfinished, self._path(record.key))
        except OSError:
            with suppress(OSError):
                self._unfinished.unlink(missing_ok=True)
            return False
        return True

    def _read(self, key: bytes, payload: memoryview) -> Record | None:
        """Read a record's file into ``payload``. None: it cannot be read, or it is not what was written."""
        try:
            with self._path(key).open("rb") as file:
                header = file.read(HEADER.size)
                whole = len(header) == HEADER.size and file.readinto(payload) == len(payload)
        except OSError:
            return None
        if not whole:
            return None
        tokens, tenant, digest, _ = HEADER.unpack(header)
        record = Record(key, tokens, digest, tenant)
        good = header == _header(record) and xxhash.xxh3_64_intdigest(payload) == digest
        return record if good else None

    def _remove(self, key: bytes) -> bool:
        """Remove a record's file. Returns whether it is gone."""
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError:
            return False
        return True


def _header(record: Record) -> bytes:
    fields = HEADER.pack(record.tokens, record.tenant, record.digest, 0)[:-8]
    return fields + xxhash.xxh3_64_digest(record.key + fields)
