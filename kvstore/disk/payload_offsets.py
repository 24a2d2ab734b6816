"""Where in the file each payload lies, and reading from there; what of a file is in the page cache. Linux only.

LMDB touches every page of a value as it is looked up, through a map of the file. With the kernel's readahead a
look into the B-tree reads eight times what was wanted (70 ms for 25 MB that a plain read has in 13); without it
a value comes one page at a time (400 ms). So the map is advised *random*, and a payload with a known offset is
read from the file there. A payload does not move while it is kept. Those of an earlier process are looked up in
the B-trees once. An offset is only a hint: a reader checks the bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .record import RecordHeader

FILE = "data.mdb"
"""Name of the file in a store's folder; LMDB gives it."""
HEADER = 16  # bytes of LMDB's own before a payload
PAGE = 4096
_CACHESTAT = 451  # the same number on every architecture; Linux 6.5
MADV_NORMAL, MADV_RANDOM = 0, 1  # the same numbers on every Linux

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_syscall = ctypes.CDLL(None, use_errno=True).syscall


@dataclass(frozen=True, slots=True)
class PayloadAt:
    """Where a record's payload is: its ``offset`` in the file, in bytes. ``header``: the record's header."""

    offset: int
    header: RecordHeader


class PayloadOffsets:
    """The known offsets of payloads in the LMDB file at ``path``, by key; reads payloads there, past LMDB.
    This process maps the file through LMDB."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        self._begin = self._end = 0
        self._known: dict[bytes, PayloadAt] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._known

    def mapped(self, *, anew: bool = True) -> None:
        """Find LMDB's map of the file again. Call it after LMDB has mapped the file, perhaps at another
        address. ``anew``: it may be another file, so all offsets are forgotten."""
        if anew:
            self.close()
            self._known.clear()
            with contextlib.suppress(OSError):
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        self._begin, self._end = _range_of(self._path)
        self._advise(MADV_RANDOM)

    def read(self, key: bytes, into: memoryview) -> RecordHeader | None:
        """Copy the payload from the file into ``into``, without a check. Returns the record's header; None if
        the offset is unknown or the file is too short.

        Raises `OSError`: the medium refused.
        """
        place = self._known.get(key)
        if place is None or self._fd is None:
            return None
        got = os.preadv(self._fd, [into], place.offset)
        return place.header if got == len(into) else None

    def load_pages(self, key: bytes, length: int) -> RecordHeader | None:
        """Bring the payload of ``length`` bytes into the page cache, for another process to read. Returns the
        record's header; None if the offset is unknown or the file is too short. Raises `OSError`."""
        place = self._known.get(key)
        if place is None or self._fd is None:
            return None
        return place.header if load_pages(self._fd, place.offset, length) else None

    def offset_of(self, key: bytes) -> int:
        """The payload's offset in the file, in bytes; 0 if it is unknown."""
        place = self._known.get(key)
        return 0 if place is None else place.offset

    @contextlib.contextmanager
    def searching(self, key: bytes) -> Iterator[None]:
        """A context for a look-up of ``key`` through LMDB: if its offset is unknown, the kernel reads ahead
        within it."""
        if key in self._known:
            yield
            return
        self._advise(MADV_NORMAL)
        try:
            yield
        finally:
            self._advise(MADV_RANDOM)

    def learn(self, key: bytes, payload: memoryview, header: RecordHeader) -> None:
        """Remember where ``payload`` lies in the file, and the record's header. ``payload``: a view that LMDB
        gave of its map; one that lies elsewhere is ignored."""
        address = np.frombuffer(payload, dtype=np.uint8).ctypes.data
        if self._begin <= address < self._end:
            self._known[key] = PayloadAt(address - self._begin, header)

    def forget(self, key: bytes) -> None:
        """Forget the key's offset."""
        self._known.pop(key, None)

    def close(self) -> None:
        """Close the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _advise(self, advice: int) -> None:
        if self._end > self._begin:
            _madvise(self._begin, self._end - self._begin, advice)


def stride_of(length: int) -> int:
    """How many bytes a payload of ``length`` bytes takes in the file: whole pages, with LMDB's header before
    it."""
    return -(-(length + HEADER) // PAGE) * PAGE


def _range_of(path: Path) -> tuple[int, int]:
    """The addresses, begin and end, at which this process maps the file from its first byte on; (0, 0) if it
    does not map it."""
    name = str(path.resolve())
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5] == name and not int(fields[2], 16):
                begin, _, end = fields[0].partition("-")
                return int(begin, 16), int(end, 16)
    return 0, 0


class _Range(ctypes.Structure):
    """The C structure ``cachestat_range``: which part of a file is asked about, in bytes."""

    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    """The C structure ``cachestat``: the answer, in numbers of pages."""

    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently")
    )


def in_memory(fd: int, offset: int) -> bool:
    """Whether the page at ``offset`` of the file ``fd`` is in the page cache, or on its way there. Brings
    nothing from the disk: a read would make the kernel read ahead. Raises `OSError`: the kernel cannot
    say."""
    span, pages = _Range(offset // PAGE * PAGE, PAGE), _Pages()
    if _syscall(_CACHESTAT, fd, ctypes.byref(span), ctypes.byref(pages), 0) == 0:
        return bool(pages.cached)
    return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1  # an older kernel


def load_pages(fd: int, offset: int, length: int) -> bool:
    """Bring ``length`` bytes of the file ``fd`` from ``offset`` on into the page cache, and wait until they
    are there. Returns False if the file is shorter.

    They are sent to the null device, which takes pages and copies no bytes. Raises `OSError`: the medium
    refused.
    """
    end = offset + length
    while offset < end:
        sent = os.sendfile(_nowhere(), fd, offset, end - offset)
        if not sent:
            return False
        offset += sent
    return True


@functools.cache
def _nowhere() -> int:
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
