"""Unmaps pages of a file from another process's memory, so that they can leave the page cache.

``posix_fadvise(DONTNEED)`` skips mapped pages, ``process_madvise(MADV_PAGEOUT)`` does not (Linux 5.10). It
needs CAP_SYS_NICE; without it there is no cold measurement, and an error says so.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

_PROCESS_MADVISE = 440  # the same number on every architecture
_MADV_PAGEOUT = 21

_syscall = ctypes.CDLL(None, use_errno=True).syscall


class _IoVector(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def page_out(pid: int, path: Path) -> None:
    """Take the pages of ``path`` out of the memory of process ``pid``.

    Raises:
        OSError: not allowed, or not known to this kernel.
    """
    handle = os.pidfd_open(pid)
    try:
        for begin, end in _mapped(pid, path):
            span = _IoVector(begin, end - begin)
            done = _syscall(_PROCESS_MADVISE, handle, ctypes.byref(span), 1, _MADV_PAGEOUT, 0)
            if done < 0:
                number = ctypes.get_errno()
                raise OSError(number, f"process_madvise: {os.strerror(number)}")
    finally:
        os.close(handle)


def _mapped(pid: int, path: Path) -> Iterator[tuple[int, int]]:
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if line.endswith(str(path)):
            begin, _, end = line.split()[0].partition("-")
            yield int(begin, 16), int(end, 16)
