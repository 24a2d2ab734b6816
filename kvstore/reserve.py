"""Bytes of a disk that a file holds, so that they are there when the disk is full otherwise.

Knows files, and not what the bytes are for.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import BinaryIO

NAME = "reserve"
"""The file's name in a store."""
PIECE = 256 << 10
"""So many bytes are given at once, at least. Not all: what is not needed yet another program could take."""
LAST = 4
EASE = 4
"""It is taken again when one part in so many more is free, so that the next bytes that are written do not need
it at once."""


class DiskReserve:
    """``size`` bytes of the disk, held by the file at ``path``. `give` makes some of them free, for the caller
    to write; `take` holds them all again."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self.whole = False
        """Whether all bytes are held, as far as the file system can do that."""

    @property
    def held(self) -> int:
        """How many bytes of the disk it holds now. Fewer than ``size`` on a file system that does not give a
        file its bytes before they are written."""
        return held_by(self.path)

    def take(self, free: int) -> None:
        """Hold all bytes, if ``free`` bytes of the disk are enough: then it is ``whole``."""
        held = self.held
        if held < self.size and free + held < self.size + self.size // EASE:
            return
        try:
            if not self.size:
                self.path.unlink(missing_ok=True)
            else:
                with self._opened() as file:
                    os.posix_fallocate(file.fileno(), 0, self.size)
                    file.truncate(self.size)
            self.whole = True
        except OSError:
            self.give(self.held - held)

    def give(self, wanted: int, *, last: bool = True) -> bool:
        """Make ``wanted`` bytes free, `PIECE` at least, or all that there are; unless ``last``, one part in
        `LAST` is kept back for what makes room. Returns whether there were any."""
        held, least = self.held, 0 if last else self.size // LAST
        if held <= least:
            return False
        self.whole = False
        try:
            with self._opened() as file:
                file.truncate(max(least, held - max(wanted, PIECE)))
        except OSError:
            return False
        return True

    def _opened(self) -> BinaryIO:
        return open(self.path, "ab", opener=partial(os.open, mode=0o600))


def held_by(path: Path | None) -> int:
    """How many bytes of the disk the file at ``path`` takes; holes do not count. 0 if there is none."""
    try:
        return 0 if path is None else path.stat().st_blocks * 512
    except OSError:
        return 0
