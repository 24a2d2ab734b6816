"""Where in the file each payload lies, so that what will be wanted can be read ahead of its use.

LMDB touches every page of a value as it is looked up, through a map of the file. With the kernel's readahead
each look into the B-tree also reads whatever lies around it (eight fold what was wanted, as measured, 70 ms for
25 MB that a plain read has in 13); without it a value comes one page at a time (400 ms). So the map is advised
*random*, and the pages of the payloads that come next are asked for by their place in the file; a payload does
not move while it is kept. Those whose place is not known yet, of an earlier process, are looked up as ever.
Only hints: a wrong place costs time, never a byte. Knows keys and offsets; no transactions.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

PAGE = 4096
MOST_AHEAD = 512 << 10  # bytes the kernel is asked for at a time: of more it may take a part only
MADV_NORMAL, MADV_RANDOM = 0, 1  # the same numbers on every Linux

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Places:
    """Offsets of payloads in the file at ``path``, which this process maps."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        self._begin = self._end = 0
        self._offsets: dict[bytes, int] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._offsets

    def mapped(self, *, anew: bool = True) -> None:
        """The file was mapped, at another address perhaps; ``anew``: it may be another file, too."""
        if anew:
            self.close()
            self._offsets.clear()
            with contextlib.suppress(OSError):
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        self._begin, self._end = _range_of(self._path)
        self._advise(MADV_RANDOM)

    def expect(self, keys: Iterable[bytes], length: int) -> None:
        """Have the kernel read these payloads of ``length`` bytes, as far as they are known; does not wait."""
        for key in keys:
            offset = self._offsets.get(key)
            if offset is None or self._fd is None:
                continue
            for at in range(offset // PAGE * PAGE, offset + length, MOST_AHEAD):
                with contextlib.suppress(OSError):
                    size = min(MOST_AHEAD, offset + length - at)
                    os.posix_fadvise(self._fd, at, size, os.POSIX_FADV_WILLNEED)

    @contextlib.contextmanager
    def searching(self, key: bytes) -> Iterator[None]:
        """A payload is looked up meanwhile: read ahead of it where nobody could ask for its pages before."""
        if key in self._offsets:
            yield
            return
        self._advise(MADV_NORMAL)
        try:
            yield
        finally:
            self._advise(MADV_RANDOM)

    def learn(self, key: bytes, payload: memoryview) -> None:
        """It lies here, inside the map."""
        address = np.frombuffer(payload, dtype=np.uint8).ctypes.data
        if self._begin <= address < self._end:
            self._offsets[key] = address - self._begin

    def forget(self, key: bytes) -> None:
        """It lies nowhere any more."""
        self._offsets.pop(key, None)

    def close(self) -> None:
        """Let go of the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _advise(self, advice: int) -> None:
        if self._end > self._begin:
            _madvise(self._begin, self._end - self._begin, advice)


def _range_of(path: Path) -> tuple[int, int]:
    """Addresses at which this process maps the file from its beginning on; (0, 0) where it does not."""
    name = str(path.resolve())
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5] == name and not int(fields[2], 16):
                begin, _, end = fields[0].partition("-")
                return int(begin, 16), int(end, 16)
    return 0, 0
