"""The payloads of records: one file, cut into slots of one size. Where a slot lies is arithmetic. Linux only.

Knows bytes and slots; no keys. Space is given back by holes. The disk process writes the file; the engine reads
of it what lies in the page cache, by plain calls: a file that was cut reads short. Nothing here checks bytes.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from stat import S_ISREG

import numpy as np

FILE = "payloads"
"""Name of the file in a store's folder."""
STEP = 512
"""Slots begin at multiples of it, where that wastes no more than one part in ``WASTE``."""
WASTE = 10
PAGE = 4096
_CACHESTAT = 451  # the same number on every architecture; Linux 6.5
_PUNCH_HOLE, _KEEP_SIZE = 2, 1  # modes of fallocate(2), the same numbers on every Linux
_Span = ctypes.c_uint64 * 2
"""The C structure ``cachestat_range``: which part of a file is asked about, its offset and length in bytes."""
_Pages = ctypes.c_uint64 * 5
"""The C structure ``cachestat``: the answer, in numbers of pages; the first is of those in the page cache."""
_ZEROS = 1 << 20  # so many bytes are overwritten at once

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def stride_of(length: int) -> int:
    """Bytes from one slot to the next, for payloads of ``length`` bytes."""
    whole = -(-length // STEP) * STEP
    return whole if WASTE * (whole - length) <= length else length


class PayloadFile:
    """The file ``path`` with slots for payloads of ``length`` bytes. ``writable``: it is made if it is not
    there; else it is only read. Raises `OSError`, as all methods do, also for a link or anything else that is
    no file: a pipe might never answer, and what a link leads to is not ours to cut."""

    def __init__(self, path: Path, length: int, *, writable: bool = False) -> None:
        self.length = length
        self.stride = stride_of(length)
        mode = os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY
        self.fd = os.open(path, mode | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        if not S_ISREG(os.fstat(self.fd).st_mode):
            self.close()
            raise OSError(errno.EINVAL, "not a file")

    def offset_of(self, slot: int) -> int:
        """Where a slot begins, in bytes."""
        return slot * self.stride

    @property
    def slots(self) -> int:
        """How many slots the file reaches over, in whole or in part."""
        return -(-os.fstat(self.fd).st_size // self.stride)

    def write(self, slot: int, payload: memoryview) -> None:
        """Write a payload into a slot."""
        at = 0
        while at < len(payload):
            at += os.pwrite(self.fd, payload[at:], self.offset_of(slot) + at)

    def read(self, slot: int, into: memoryview) -> bool:
        """Copy a payload into ``into``. False: the file is too short."""
        return os.preadv(self.fd, [into], self.offset_of(slot)) == len(into)

    def read_cached(self, slot: int, parts: Sequence[memoryview]) -> int:
        """Fill ``parts`` with the file's bytes from a slot on, as far as they are in the page cache; never
        waits for the disk. Returns how many bytes came."""
        return os.preadv(self.fd, parts, self.offset_of(slot), os.RWF_NOWAIT)

    def is_cached(self, slot: int) -> bool:
        """Whether the first page of a slot is in the page cache, or on its way there. Brings nothing from the
        disk: a read would make the kernel read ahead."""
        offset = self.offset_of(slot)
        span, pages = _Span(offset // PAGE * PAGE, PAGE), _Pages()
        if _syscall(_CACHESTAT, self.fd, span, pages, 0) == 0:
            return pages[0] > 0
        return os.preadv(self.fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1  # an older kernel

    def cache(self, slot: int) -> bool:
        """Bring a payload into the page cache, and wait until it is there. False: the file is too short.

        Its pages are sent to the null device, which takes them and copies no bytes.
        """
        offset = self.offset_of(slot)
        end = offset + self.length
        while offset < end:
            sent = os.sendfile(_nowhere(), self.fd, offset, end - offset)
            if not sent:
                return False
            offset += sent
        return True

    def cut(self, slots: int) -> None:
        """Let the file end behind so many slots."""
        if slots < self.slots:
            os.ftruncate(self.fd, slots * self.stride)

    def punch(self, slots: Iterable[int]) -> int:
        """Make holes of these slots, which take no space and read as zeros. Returns by how many bytes the file
        takes less space then. Raises `OSError` with ``EOPNOTSUPP`` on a file system without holes."""
        before = os.fstat(self.fd).st_blocks
        for start, length in self._runs(slots):
            if _fallocate(self.fd, _PUNCH_HOLE | _KEEP_SIZE, start, length):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
        return 512 * max(0, before - os.fstat(self.fd).st_blocks)

    def clear(self, slots: Sequence[int]) -> None:
        """Make the bytes of these slots zeros; holes, where the file system can do that."""
        try:
            self.punch(slots)
            return
        except OSError as fault:
            if fault.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise
        for start, length in self._runs(slots):
            for at in range(start, start + length, _ZEROS):
                os.pwrite(self.fd, bytes(min(_ZEROS, start + length - at)), at)

    def _runs(self, slots: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Where these slots lie: the offset and the length in bytes of each run of them within the file."""
        numbers = np.sort(np.fromiter(slots, np.int64))
        for run in np.split(numbers, np.nonzero(np.diff(numbers) != 1)[0] + 1) if len(numbers) else ():
            yield self.offset_of(int(run[0])), len(run) * self.stride

    def sync(self) -> None:
        """Flush its bytes to the medium."""
        os.fdatasync(self.fd)

    def close(self) -> None:
        """Close the file."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@functools.cache
def _nowhere() -> int:
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
