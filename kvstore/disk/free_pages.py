"""Finds the free pages of an LMDB file, and gives their space back to the file system.

An LMDB file never gets shorter: pages of deleted records go on a list, and later writes take them from there.
The list is read here from the file itself, by LMDB's rule: pages that transaction ``n`` freed may be
overwritten as soon as a later transaction is committed and no reader is older. Without ``writemap`` LMDB
reads such a page only after it has written it whole, so it may become a hole of the file. Linux only; the
format is that of LMDB 0.9 (``mdb.c``, data version 1) on a little-endian machine.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

PUNCH_HOLE, KEEP_SIZE = 2, 1  # modes of fallocate(2), the same numbers on every Linux
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_PAGE_HEADER = 16
_BRANCH, _LEAF, _OVERFLOW = 1, 2, 4  # flags of a page
_BIG_DATA = 1  # flag of a node: its data are on pages of their own
_META = struct.Struct("<IIQQ")  # magic, version, address, size of the map
_TREE = struct.Struct("<IHHQQQQQ")  # page size, flags, depth, three counts of pages, entries, root
_LAST = struct.Struct("<QQ")  # last page, transaction
_NODE = struct.Struct("<HHHH")  # low and high half of the size or child, flags, length of the key
_EMPTY = (1 << 64) - 1
_MOST_DEPTH = 32
ZEROS = 1 << 20  # so many bytes are overwritten at once

_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class ListUnreadable(Exception):
    """The file's list of free pages cannot be read, or is not valid."""


@dataclass(frozen=True, slots=True)
class _Meta:
    """The newer of a file's two meta pages: the size of a ``page``, the ``depth`` and ``root`` page of the
    tree of free pages, the number of the ``last`` page in use, and the last ``transaction``."""

    page: int
    depth: int
    root: int
    last: int
    transaction: int


def punch_free_pages(fd: int) -> int:
    """Turn all free pages of the LMDB file ``fd`` into holes. Returns by how many bytes the file takes less
    space then.

    The file must not be read or written through LMDB meanwhile, and no reader may be open. Raises
    `ListUnreadable`: the file is damaged; `OSError`: the file system cannot do that (``EOPNOTSUPP``), or the
    medium refused.
    """
    before = os.fstat(fd).st_blocks
    for start, length in free_runs(fd):
        punch(fd, start, length)
    return max(0, before - os.fstat(fd).st_blocks) * 512


def clear_free_pages(fd: int) -> int:
    """As `punch_free_pages`; on a file system without holes, the free pages are overwritten with zeros. What is
    zero already stays as it is."""
    try:
        return punch_free_pages(fd)
    except OSError as fault:
        if fault.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    for start, length in free_runs(fd):
        for at in range(start, start + length, ZEROS):
            size = min(ZEROS, start + length - at)
            if any(os.pread(fd, size, at)):
                os.pwrite(fd, bytes(size), at)
    return 0


def punch(fd: int, start: int, length: int) -> None:
    """Make ``length`` bytes of the file ``fd`` from offset ``start`` on a hole, which takes no space and
    reads as zeros. Raises ``OSError``."""
    if _fallocate(fd, PUNCH_HOLE | KEEP_SIZE, start, length):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def free_runs(fd: int) -> list[tuple[int, int]]:
    """Where the free pages of the LMDB file ``fd`` are: offset and length in bytes of each run of them, and
    of what lies behind the last page in use.

    Raises `ListUnreadable`: the file is damaged, or of another format; or `OSError`.
    """
    meta = _newest(fd)
    found = [pages for freed_by, pages in _entries(fd, meta) if freed_by < meta.transaction]
    pages = np.unique(np.concatenate(found)) if found else np.empty(0, np.uint64)
    if len(pages) and (pages[0] < 2 or pages[-1] > meta.last):
        raise ListUnreadable("a free page lies outside of the file")
    split = np.split(pages, np.nonzero(np.diff(pages) != 1)[0] + 1) if len(pages) else []
    runs = [(int(run[0]) * meta.page, len(run) * meta.page) for run in split]
    behind = (meta.last + 1) * meta.page
    if (end := os.fstat(fd).st_size) > behind:  # of a write that failed
        runs.append((behind, end - behind))
    return runs


def _newest(fd: int) -> _Meta:
    found = []
    first = os.pread(fd, 4096, 0)
    if len(first) < 4096:
        raise ListUnreadable("the file has no meta page")
    size = _TREE.unpack_from(first, _PAGE_HEADER + _META.size)[0]
    if size not in (4096, 8192, 16384, 32768, 65536):
        raise ListUnreadable(f"pages of {size} bytes")
    for at in (0, size):
        data = os.pread(fd, 4096, at)
        if len(data) < 4096:
            raise ListUnreadable("the file has no second meta page")
        magic, version, _, _ = _META.unpack_from(data, _PAGE_HEADER)
        if (magic, version) != (_MAGIC, _VERSION):
            raise ListUnreadable("a meta page is of another format")
        tree = _TREE.unpack_from(data, _PAGE_HEADER + _META.size)
        last, transaction = _LAST.unpack_from(data, _PAGE_HEADER + _META.size + 2 * _TREE.size)
        found.append(_Meta(size, tree[2], tree[7], last, transaction))
    return max(found, key=lambda meta: meta.transaction)


def _entries(fd: int, meta: _Meta) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the entries of the list of free pages: the number of a transaction, and the numbers of pages that
    it freed. Raises `ListUnreadable`."""
    waiting = [] if meta.root == _EMPTY else [(meta.root, 0)]
    if meta.depth > _MOST_DEPTH:
        raise ListUnreadable("the tree of free pages is too deep")
    seen = 0
    while waiting:
        number, depth = waiting.pop()
        seen += 1
        if number > meta.last or depth > _MOST_DEPTH or seen > meta.last:
            raise ListUnreadable("the tree of free pages leads out of the file")
        page = _read(fd, number * meta.page, meta.page)
        flags, lower = struct.unpack_from("<HH", page, 10)
        if lower > meta.page or lower < _PAGE_HEADER or not flags & (_BRANCH | _LEAF):
            raise ListUnreadable(f"page {number} does not belong to a tree")
        for (at,) in struct.iter_unpack("<H", page[_PAGE_HEADER:lower]):
            if at + _NODE.size > meta.page:
                raise ListUnreadable(f"page {number} has a node outside of itself")
            low, high, kind, key = _NODE.unpack_from(page, at)
            if flags & _BRANCH:
                waiting.append((low | high << 16 | kind << 32, depth + 1))
                continue
            begin, length = at + _NODE.size + key, low | high << 16
            if key != 8 or begin + (8 if kind & _BIG_DATA else length) > meta.page:
                raise ListUnreadable(f"page {number} has an entry that is no list")
            (freed_by,) = struct.unpack_from("<Q", page, at + _NODE.size)
            if kind & _BIG_DATA:
                (where,) = struct.unpack_from("<Q", page, begin)
                yield freed_by, _numbers(_read(fd, where * meta.page + _PAGE_HEADER, length))
            else:
                yield freed_by, _numbers(page[begin : begin + length])


def _numbers(data: bytes) -> np.ndarray:
    """The page numbers in ``data``, an entry of the list of free pages, which begins with their count. Raises
    `ListUnreadable`."""
    listed = np.frombuffer(data[: len(data) // 8 * 8], dtype="<u8")
    if not len(listed) or listed[0] >= len(listed):
        raise ListUnreadable("a list of free pages is longer than its entry")
    return listed[1 : 1 + int(listed[0])]


def _read(fd: int, offset: int, length: int) -> bytes:
    data = os.pread(fd, length, offset) if offset < 1 << 62 else b""
    if len(data) < length:
        raise ListUnreadable("the file ends before its free pages do")
    return data
