"""Reads records that lie in the page cache straight from the store's file, with one copy, to where KV is used.

The read never waits for the disk: what is not in memory comes through the disk process. Bytes that are not
those that were stored are left to that process, which drops such a record. Knows slots of the file and bytes;
no keys.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from xxhash import xxh3_64_intdigest

from ..system_limits import roam
from .messages import RecordAt
from .payload_file import FILE, PayloadFile, stride_of

RUN_BYTES = 3 << 19  # of records in one call: they are still in the core's cache when they are checked
SHARED = 32  # records from which on a second thread helps


class DirectRead:
    """Reads records of ``length`` bytes from the page cache, out of the file that a disk process keeps in
    ``folder``."""

    def __init__(self, folder: Path, length: int) -> None:
        self._path = folder / FILE
        self._length = length
        self._file: PayloadFile | None = None
        self._stride = stride_of(length)
        self._most_in_run = max(1, RUN_BYTES // length)
        self._between = memoryview(bytearray(self._stride - length))  # takes what lies between two records
        # The thread starts with its first work.
        self._second = ThreadPoolExecutor(1, "holdfast-direct-read", roam)

    def leave(self) -> None:
        """Close the file: the next disk process may make another."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def close(self) -> None:
        """Close the file and end the second thread."""
        self.leave()
        self._second.shutdown(wait=False)

    def has(self, record: RecordAt) -> bool:
        """Whether `read` is likely to succeed now: the first page of the record's payload is in the page
        cache."""
        with contextlib.suppress(OSError):
            return self._opened().is_cached(record.slot)
        return False

    def read(self, records: Sequence[RecordAt], blocks: Sequence[memoryview]) -> int:
        """Fill ``blocks`` with records, one each in order, and check the bytes there. Returns how many came:
        the longest beginning that is in the page cache and sound. The blocks of records that did not come may
        hold anything then."""
        with contextlib.suppress(OSError):
            self._opened()  # once, before two threads need it
        runs, taking = self._runs(records), Lock()
        came: dict[int, int] = {}

        def work() -> None:
            while True:
                with taking:  # a thread that is done with one run takes the next
                    at, run = next(runs, (0, []))
                if not run:
                    return
                came[at] = self._read_run(run, blocks[at : at + len(run)])
                if came[at] < len(run):  # what follows is useless
                    with taking:
                        runs.close()
                    return

        if len(records) < SHARED:
            work()
        else:
            other = self._second.submit(work)
            work()
            other.result()
        found = 0
        while count := came.get(found, 0):
            found += count
        return found

    def _runs(self, records: Sequence[RecordAt]) -> Generator[tuple[int, list[RecordAt]], None, None]:
        """Yield the records in runs that lie one behind the other in the file, each with the number of its
        first record. The last runs are small, so that two threads end together."""
        at, run = 0, list[RecordAt]()
        for record in records:
            most = max(1, min(self._most_in_run, (len(records) - at) // 4))
            if run and (len(run) == most or record.slot != run[-1].slot + 1):
                yield at, run
                at, run = at + len(run), []
            run.append(record)
        if run:
            yield at, run

    def _read_run(self, run: list[RecordAt], blocks: Sequence[memoryview]) -> int:
        """Read records that lie one behind the other in the file, with one call, into ``blocks`` (one each).
        Returns how many of them came whole and passed their check, counted from the first."""
        parts = [part for block in blocks for part in (block, self._between)]
        got = 0
        with contextlib.suppress(OSError):  # not in memory; or no such file, medium or kernel
            got = self._opened().read_cached(run[0].slot, parts)
        whole = (got + len(self._between)) // self._stride
        for at in range(whole):
            if xxh3_64_intdigest(blocks[at]) != run[at].digest:
                return at
        return whole

    def _opened(self) -> PayloadFile:
        if self._file is None:
            self._file = PayloadFile(self._path, self._length)
        return self._file
