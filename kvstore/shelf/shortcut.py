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
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, takewhile
from pathlib import Path
from typing import TypeAlias

from xxhash import xxh3_64, xxh3_64_intdigest

from .pagecache import in_memory
from .places import FILE, stride_of

MOST_IN_RUN = 4  # records in one call: what it brought is in a core's own cache when it is checked
SHARED = 32  # of so many records a second thread reads as many as it can

Parts: TypeAlias = Sequence[memoryview]
"""The bytes of a block, one part behind the other."""


@dataclass(frozen=True, slots=True)
class Lying:
    """``offset``: of the payload in the file; ``tokens`` and xxh3 ``digest`` of the record."""

    offset: int
    tokens: int
    digest: int


class Shortcut:
    """Reads records of ``length`` bytes out of the file that a shelf keeps in ``folder``."""

    def __init__(self, folder: Path, length: int) -> None:
        self._path = folder / FILE
        self._fd: int | None = None
        self._lying: dict[bytes, Lying] = {}
        self._stride = stride_of(length)
        self._between = memoryview(bytearray(self._stride - length))  # what lies there is of no interest
        self._second = ThreadPoolExecutor(1, "holdfast-shortcut")  # its thread begins with its first work

    def __contains__(self, key: bytes) -> bool:
        """Whether it is known where it lies."""
        return key in self._lying

    def learn(self, key: bytes, lying: Lying) -> None:
        """A record is there; an offset of 0: nobody knows where."""
        if lying.offset:
            self._lying[key] = lying

    def forget(self, key: bytes) -> None:
        """It is there no more, or is not to be read here."""
        self._lying.pop(key, None)

    def close(self) -> None:
        """Let go of everything."""
        self.forget_all()
        self._second.shutdown(wait=False)

    def forget_all(self) -> None:
        """Let go of the file, too: another shelf may make another."""
        self._lying.clear()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def has(self, key: bytes) -> bool:
        """Whether `read` is likely to succeed now: its first page is in memory."""
        lying = self._lying.get(key)
        if lying is None:
            return False
        with contextlib.suppress(OSError):
            return in_memory(self._file(), lying.offset)
        return False

    def read(self, keys: Sequence[bytes], blocks: Sequence[Parts]) -> list[int]:
        """Fill each of ``blocks``, its parts in order, with a record and check it there; tokens of the longest
        beginning that came.

        What follows is not all in memory, or is not what was stored: its parts may hold anything, and the first
        such record is not tried again before it is learned again.
        """
        with contextlib.suppress(OSError):
            self._file()  # before there are two to open it
        runs = list(self._runs(keys))
        sound = [0] * len(runs)
        starts = list(accumulate(map(len, runs), initial=0))
        turns = deque(range(len(runs)))  # whoever is done with one takes the next

        def work() -> None:
            with contextlib.suppress(IndexError):
                while True:
                    at = turns.popleft()
                    sound[at] = self._read_run(runs[at], blocks[starts[at] : starts[at + 1]])
                    if sound[at] < len(runs[at]):
                        turns.clear()  # nothing that follows is of use

        if len(keys) < SHARED:
            work()
        else:
            other = self._second.submit(work)
            work()
            other.result()
        short = next((at for at, run in enumerate(runs) if sound[at] < len(run)), None)
        came = starts[-1] if short is None else starts[short] + sound[short]
        if came < len(keys):
            self.forget(keys[came])
        return [lying.tokens for run in runs for lying in run][:came]

    def _runs(self, keys: Sequence[bytes]) -> Iterator[list[Lying]]:
        """Records of which it is known where they lie, in groups that lie one behind the other."""
        run: list[Lying] = []
        for lying in takewhile(bool, map(self._lying.get, keys)):
            assert lying is not None
            if run and (len(run) == MOST_IN_RUN or lying.offset != run[-1].offset + self._stride):
                yield run
                run = []
            run.append(lying)
        if run:
            yield run

    def _read_run(self, run: list[Lying], blocks: Sequence[Parts]) -> int:
        """How many of them came whole."""
        parts = [part for block in blocks for part in (*block, self._between)]
        got = 0
        with contextlib.suppress(OSError):  # not in memory; or no such file, medium or kernel
            got = os.preadv(self._file(), parts, run[0].offset, os.RWF_NOWAIT)
        whole = (got + len(self._between)) // self._stride
        pairs = zip(run[:whole], blocks, strict=False)
        return sum(1 for _ in takewhile(lambda pair: _digest(pair[1]) == pair[0].digest, pairs))

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
