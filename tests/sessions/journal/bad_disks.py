"""Disks of the journal's tests: one that fails or dies at a call it is told, half done; and damage to
files."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from random import Random

from holdfast.sessions.journal.folder import Disk
from holdfast.sessions.journal.store import JournalStore

PAGE = 4096


class Crash(Exception):
    """The process dies here."""


class BadDisk(Disk):
    """Counts the calls that change something; the one with the number ``at`` fails, or is the last one.

    ``error``: its errno, for ``times`` calls in a row; 0: the process dies. Of a write that fails ``share``
    is done. A sync that fails loses what was written since the last one.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.at: int | None = None
        self.error = 0
        self.times = 1
        self.share = 0.5
        self._unsynced: dict[int, list[tuple[int, int]]] = {}

    def arm(self, at: int, error: int = 0, times: int = 1, share: float = 0.5) -> None:
        self.calls, self.at, self.error, self.times, self.share = 0, at, error, times, share

    def disarm(self) -> None:
        self.at = None

    def create(self, path: Path) -> int:
        self._step()
        fd = super().create(path)
        self._unsynced[fd] = []
        return fd

    def write(self, fd: int, data: bytes, offset: int) -> None:
        if self._fails():
            super().write(fd, data[: int(len(data) * self.share)], offset)
            self._raise()
        self._unsynced.setdefault(fd, []).append((offset, len(data)))
        super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        if self._fails():
            if self.error:
                for offset, length in self._unsynced.pop(fd, []):
                    os.pwrite(fd, bytes(max(0, min(length, self.size(fd) - offset))), offset)
            self._raise()
        self._unsynced[fd] = []

    def truncate(self, fd: int, length: int) -> None:
        self._step()
        super().truncate(fd, length)

    def rename(self, old: Path, new: Path) -> None:
        self._step()
        super().rename(old, new)

    def rename_new(self, old: Path, new: Path) -> None:
        self._step()
        os.link(old, new)
        self._step()
        os.unlink(old)

    def remove(self, path: Path) -> None:
        self._step()
        super().remove(path)

    def link(self, old: Path, new: Path) -> None:
        self._step()
        super().link(old, new)

    def make_folder(self, path: Path) -> None:
        self._step()
        super().make_folder(path)

    def remove_folder(self, path: Path) -> None:
        if not path.exists():
            return
        if self._fails():
            files = [one for one in sorted(path.rglob("*")) if one.is_file()]
            for one in files[: int(len(files) * self.share)]:
                one.unlink()
            self._raise()
        super().remove_folder(path)

    def sync_folder(self, folder: Path) -> None:
        self._step()

    def open(self, path: Path, *, write: bool = False) -> int:
        fd = super().open(path, write=write)
        self._unsynced[fd] = []
        return fd

    def _step(self) -> None:
        if self._fails():
            self._raise()

    def _fails(self) -> bool:
        if self.at is None:
            return False
        self.calls += 1
        dead = self.error == 0 and self.calls > self.at
        return dead or self.at <= self.calls < self.at + self.times

    def _raise(self) -> None:
        if self.error == 0:
            raise Crash
        raise OSError(self.error, os.strerror(self.error))


def killed(store: JournalStore) -> None:
    """What is left of a process that was killed: its files are closed, and nothing else is done."""
    logs = list(store.logs.logs.values())
    if store._merge is not None:
        logs.append(store._merge._out)
    for one in logs:
        store.logs._close_files(one)
    if (fd := store.logs._folder_fd) is not None:
        os.close(fd)
        store.logs._folder_fd = None


def zeroed(data: bytearray, rng: Random) -> None:
    """One page."""
    at = rng.randrange(0, len(data), PAGE)
    data[at : at + PAGE] = bytes(len(data[at : at + PAGE]))


def flipped(data: bytearray, rng: Random) -> None:
    """Some bits."""
    for _ in range(rng.randrange(1, 5)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def swapped(data: bytearray, rng: Random) -> None:
    """Two pages."""
    pages = len(data) // PAGE
    one, other = (PAGE * rng.randrange(pages) for _ in range(2))
    data[one : one + PAGE], data[other : other + PAGE] = data[other : other + PAGE], data[one : one + PAGE]


def cut(data: bytearray, rng: Random) -> None:
    """The end."""
    del data[rng.randrange(len(data)) :]


ERRORS = (errno.ENOSPC, errno.EIO)
