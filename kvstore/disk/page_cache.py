"""What of a file lies in the kernel's memory, and how it gets there without being copied. Linux only."""

from __future__ import annotations

import ctypes
import functools
import os

PAGE = 4096
_CACHESTAT = 451  # the same number on every architecture; Linux 6.5

_syscall = ctypes.CDLL(None, use_errno=True).syscall


class _Range(ctypes.Structure):
    """``struct cachestat_range``: of the file, in bytes."""

    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    """``struct cachestat``: numbers of pages."""

    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently")
    )


def in_memory(fd: int, offset: int) -> bool:
    """Whether the page there is, or is on its way; asked without reading: the kernel would read ahead for that.

    Raises:
        OSError: nobody can say.
    """
    span, pages = _Range(offset // PAGE * PAGE, PAGE), _Pages()
    if _syscall(_CACHESTAT, fd, ctypes.byref(span), ctypes.byref(pages), 0) == 0:
        return bool(pages.cached)
    return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1  # an older kernel


def bring(fd: int, offset: int, length: int) -> bool:
    """Have these bytes in memory, and wait until they are; whether the file has so many.

    They are sent to where nothing takes them: what passes is pages, not their bytes.

    Raises:
        OSError: the medium refused.
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
