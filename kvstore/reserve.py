"""Bytes of a disk that a file holds, so that they are there when the disk is full otherwise.

Knows files, and not what the bytes are for.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

NAME = "reserve"
"""The file's name in a store."""
EASE = 4
"""It is taken when one part in so many more is free, so that the next bytes that are written do not need it
again at once."""


class DiskReserve:
    """``size`` bytes of the disk, held by the file at ``path`` from `take` to `release`."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self.taken = False
        """Whether the bytes are held, as far as the file system can do that."""

    @property
    def held(self) -> int:
        """How many bytes of the disk it holds now. Fewer than ``size`` on a file system that does not give a
        file its bytes before they are written."""
        return held_by(self.path)

    def take(self, free: int) -> bool:
        """Hold the bytes if they are not held; ``free``: those that are free on the disk. Returns whether they
        are held now."""
        if self.taken:
            return True
        if not self.size:
            self.release()
            self.taken = True
            return True
        held = self.held
        if held < self.size and free + held < self.size + self.size // EASE:
            return False
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, self.size)
                os.ftruncate(fd, self.size)
            finally:
                os.close(fd)
        except OSError:
            self.release()
            return False
        self.taken = True
        return True

    def release(self) -> bool:
        """Let go of the bytes. Returns whether there were any."""
        held, self.taken = self.held, False
        with contextlib.suppress(OSError):
            self.path.unlink()
            return held > 0
        return False


def held_by(path: Path) -> int:
    """How many bytes of the disk the file at ``path`` takes; 0 if there is none."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0
