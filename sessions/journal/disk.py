"""The calls that the journal makes on files, in one place: a test puts a disk here that fails when told to.

Raises ``OSError`` with the path's name. Knows no formats.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class Disk:
    """The machine's own."""

    def create(self, path: Path) -> int:
        """A new file, or an empty one in its place; a descriptor to read and write."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def open(self, path: Path, *, write: bool = False) -> int:
        """A descriptor of a file that is there."""
        return os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC)

    def write(self, fd: int, data: bytes, offset: int) -> None:
        """All of it, at ``offset``."""
        view = memoryview(data)
        while view:
            written = os.pwrite(fd, view, offset)
            if not written:
                raise OSError(5, "nothing was written")
            view, offset = view[written:], offset + written

    def read(self, fd: int, length: int, offset: int) -> bytes:
        """Up to ``length`` bytes: fewer at the file's end."""
        pieces: list[bytes] = []
        while length and (piece := os.pread(fd, length, offset)):
            pieces.append(piece)
            length, offset = length - len(piece), offset + len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def size(self, fd: int) -> int:
        """The file's length."""
        return os.fstat(fd).st_size

    def sync(self, fd: int) -> None:
        """What was written is on the disk."""
        os.fdatasync(fd)

    def truncate(self, fd: int, length: int) -> None:
        """Cut the file there."""
        os.ftruncate(fd, length)

    def rename(self, old: Path, new: Path) -> None:
        """In the place of what has the name."""
        os.rename(old, new)

    def remove(self, path: Path) -> None:
        """Gone, if it was there."""
        with suppress(FileNotFoundError):
            os.unlink(path)

    def sync_folder(self, folder: Path) -> None:
        """Names that were made or taken are on the disk."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
