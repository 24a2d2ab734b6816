"""Reads records that lie in the page cache straight from the store's file, with one copy, to where KV is used.

The read never waits for the disk: what is not in memory comes through the disk process. The file is read by
plain calls, never mapped: if it is truncated, it reads short. An offset is a hint from the disk process: bytes
that are not those that were stored are left to that process, which drops such a record. Knows offsets and
bytes; no slots.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from threading import Lock
from typing import TypeAlias

from xxhash import xxh3_64, xxh3_64_intdigest

from ..system_limits import roam
from .payload_offsets import FILE, in_memory, stride_of

RUN_BYTES = 3 << 19  # of records in one call: they are still in the core's cache when they are checked
SHARED = 32  # records from which on a second thread helps

Parts: TypeAlias = Sequence[memoryview]
"""The bytes of a block, in order, as writable memory: one part for each arena."""


@dataclass(frozen=True, slots=True)
class RecordAt:
    """Where a record lies: the ``offset`` of its payload in the file, its number of ``tokens``, and the xxh3
    ``digest`` of the payload."""

    offset: int
    tokens: int
    digest: int


class DirectRead:
    """Reads records of ``length`` bytes from the page cache, out of the file that a disk process keeps in
    ``folder``."""

    def __init__(self, folder: Path, length: int) -> None:
        self._path = folder / FILE
        self._fd: int | None = None
        self._known: dict[bytes, RecordAt] = {}
        self._stride = stride_of(length)
        self._most_in_run = max(1, RUN_BYTES // length)
        self._between = memoryview(bytearray(self._stride - length))  # takes what lies between two records
        # The thread starts with its first work.
        self._second = ThreadPoolExecutor(1, "holdfast-direct-read", roam)

    def __contains__(self, key: bytes) -> bool:
        """Whether the record's offset is known."""
        return key in self._known

    def learn(self, key: bytes, record: RecordAt) -> None:
        """Remember where a record lies. An offset of 0 means that it is unknown, and is ignored."""
        if record.offset:
            self._known[key] = record

    def forget(self, key: bytes) -> None:
        """Forget the record's offset, so that it is not read directly."""
        self._known.pop(key, None)

    def close(self) -> None:
        """Forget all offsets, close the file and end the second thread."""
        self.forget_all()
        self._second.shutdown(wait=False)

    def forget_all(self) -> None:
        """Forget all offsets and close the file: the next disk process may make another file."""
        self._known.clear()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def has(self, key: bytes) -> bool:
        """Whether `read` is likely to succeed now: the first page of the record's payload is in the page
        cache."""
        record = self._known.get(key)
        if record is None:
            return False
        with contextlib.suppress(OSError):
            if in_memory(self._file(), record.offset):
                return True
        self._look_again()
        return False

    def read(self, keys: Sequence[bytes], parts_of: Callable[[int], Parts], first: int = 0) -> list[int]:
        """Fill blocks with records, in order, and check the bytes there. Returns the number of tokens of each
        record that came: the longest beginning of ``keys`` that is in the page cache and sound.

        ``parts_of``: gives the memory to fill for a position; the first key has the position ``first``, the
        next ``first + 1``. The memory of records that did not come may hold anything then, and the first of
        these is not tried again before its offset is learned again.
        """
        with contextlib.suppress(OSError):
            self._file()  # opened once, before two threads need it
        runs, taking = self._runs(keys), Lock()
        came: dict[int, list[RecordAt]] = {}

        def work() -> None:
            while True:
                with taking:  # a thread that is done with one run takes the next
                    at, run = next(runs, (0, []))
                if not run:
                    return
                sound = self._read_run(run, [parts_of(first + at + each) for each in range(len(run))])
                came[at] = run[:sound]
                if sound < len(run):  # what follows is useless
                    with taking:
                        runs.close()
                    return

        if len(keys) < SHARED:
            work()
        else:
            other = self._second.submit(work)
            work()
            other.result()
        found: list[int] = []
        while run := came.get(len(found), []):
            found += [record.tokens for record in run]
        if len(found) < len(keys):
            self.forget(keys[len(found)])
            self._look_again()
        return found

    def _runs(self, keys: Sequence[bytes]) -> Generator[tuple[int, list[RecordAt]], None, None]:
        """Yield the leading records with known offsets, in runs that lie one behind the other in the file;
        each run with the position of its first record among ``keys``. The last runs are small, so that two
        threads end together."""
        at, run, most = 0, list[RecordAt](), self._share_of(len(keys))
        for record in takewhile(bool, map(self._known.get, keys)):
            assert record is not None
            if run and (len(run) == most or record.offset != run[-1].offset + self._stride):
                yield at, run
                at, run = at + len(run), []
                most = self._share_of(len(keys) - at)
            run.append(record)
        if run:
            yield at, run

    def _share_of(self, left: int) -> int:
        """The most records for the next run of `_runs`, if ``left`` records are left: fewer near the end."""
        return max(1, min(self._most_in_run, left // 4))

    def _read_run(self, run: list[RecordAt], blocks: Sequence[Parts]) -> int:
        """Read records that lie one behind the other in the file, with one call, into ``blocks`` (one each).
        Returns how many of them came whole and passed their check, counted from the first."""
        parts = [part for block in blocks for part in (*block, self._between)]
        got = 0
        with contextlib.suppress(OSError):  # not in memory; or no such file, medium or kernel
            got = os.preadv(self._file(), parts, run[0].offset, os.RWF_NOWAIT)
        whole = (got + len(self._between)) // self._stride
        for at in range(whole):
            if _digest(blocks[at]) != run[at].digest:
                return at
        return whole

    def _look_again(self) -> None:
        """If the file was removed, because the disk process has begun another, forget all offsets."""
        if self._fd is not None and not os.fstat(self._fd).st_nlink:
            self.forget_all()

    def _file(self) -> int:
        if self._fd is None:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        return self._fd


def _digest(parts: Parts) -> int:
    if len(parts) == 1:
        return xxh3_64_intdigest(parts[0])
    whole = xxh3_64()
    for part in parts:
        whole.update(part)
    return whole.intdigest()
