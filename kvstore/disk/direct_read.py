"""Records that lie in the page cache, read past the shelf: one copy, from the file's pages to where KV is used.

Through the shelf a record is copied twice, in two processes; where the device is a CPU both copies are of the
same memory, and while its disk works another reader would only wait. So what is in memory is read here, and
the kernel is never made to wait for the medium: what is not there comes through the shelf as ever. A file is
read by plain calls, never mapped: truncated, it reads short. A place is a hint that the shelf gave: bytes that
are not those that were stored are left to the shelf, which sees to the record. Knows places, bytes; no slots.
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

RUN_BYTES = 3 << 19  # of records in one call: what it brought is still near the core when it is checked
SHARED = 32  # of so many records a second thread reads as many as it can

Parts: TypeAlias = Sequence[memoryview]
"""The bytes of a block, one part behind the other."""


@dataclass(frozen=True, slots=True)
class RecordAt:
    """``offset``: of the payload in the file; ``tokens`` and xxh3 ``digest`` of the record."""

    offset: int
    tokens: int
    digest: int


class DirectRead:
    """Reads records of ``length`` bytes out of the file that a shelf keeps in ``folder``."""

    def __init__(self, folder: Path, length: int) -> None:
        self._path = folder / FILE
        self._fd: int | None = None
        self._known: dict[bytes, RecordAt] = {}
        self._stride = stride_of(length)
        self._most_in_run = max(1, RUN_BYTES // length)
        self._between = memoryview(bytearray(self._stride - length))  # what lies there is of no interest
        # Its thread begins with its first work.
        self._second = ThreadPoolExecutor(1, "holdfast-shortcut", roam)

    def __contains__(self, key: bytes) -> bool:
        """Whether it is known where it lies."""
        return key in self._known

    def learn(self, key: bytes, record: RecordAt) -> None:
        """A record is there; an offset of 0: nobody knows where."""
        if record.offset:
            self._known[key] = record

    def forget(self, key: bytes) -> None:
        """It is there no more, or is not to be read here."""
        self._known.pop(key, None)

    def close(self) -> None:
        """Let go of everything."""
        self.forget_all()
        self._second.shutdown(wait=False)

    def forget_all(self) -> None:
        """Let go of the file, too: another shelf may make another."""
        self._known.clear()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def has(self, key: bytes) -> bool:
        """Whether `read` is likely to succeed now: its first page is in memory."""
        record = self._known.get(key)
        if record is None:
            return False
        with contextlib.suppress(OSError):
            if in_memory(self._file(), record.offset):
                return True
        self._look_again()
        return False

    def read(self, keys: Sequence[bytes], parts_of: Callable[[int], Parts], first: int = 0) -> list[int]:
        """Fill blocks with records, in order, and check them there; tokens of the longest beginning that came.

        ``parts_of`` gives the parts of the first key's block for ``first``, those of the next for one more.

        What follows is not all in memory, or is not what was stored: its parts may hold anything, and the first
        such record is not tried again before it is learned again.
        """
        with contextlib.suppress(OSError):
            self._file()  # before there are two to open it
        runs, taking = self._runs(keys), Lock()
        came: dict[int, list[RecordAt]] = {}

        def work() -> None:
            while True:
                with taking:  # whoever is done with one takes the next
                    at, run = next(runs, (0, []))
                if not run:
                    return
                sound = self._read_run(run, [parts_of(first + at + each) for each in range(len(run))])
                came[at] = run[:sound]
                if sound < len(run):  # nothing that follows is of use
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
        """Records of which it is known where they lie, in groups that lie one behind the other, and the place
        of each group's first among ``keys``; the last are small, so that two who take them end together.
        """
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
        """How many of so many records one call brings at most."""
        return max(1, min(self._most_in_run, left // 4))

    def _read_run(self, run: list[RecordAt], blocks: Sequence[Parts]) -> int:
        """How many of them came whole."""
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
        """Where the shelf has begun another file, what was known of this one is of no use."""
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
