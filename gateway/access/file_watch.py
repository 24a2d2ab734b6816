"""Tells when files have changed on disk, by their inode, size and time; their content is not read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

_State: TypeAlias = tuple[tuple[int, int, int] | None, ...]


class FileWatch:
    """Watches ``paths``, which may be missing, for changes since their content was last read. A link counts as
    the file that it points to, so that mounted secrets, which are exchanged by renaming a link, count too."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = tuple(paths)
        self._known = self._seen = self._state()

    def changed(self) -> bool:
        """Whether a file differs from what it was when last read, and is the same as at the last call: a change
        is told one call late, so that no file is read while it is being written. Call it at intervals, and read
        the files if it is true: it counts them as read."""
        before, self._seen = self._seen, self._state()
        if self._seen != before or self._seen == self._known:
            return False
        self._known = self._seen
        return True

    def note(self) -> None:
        """Count the files as read in their present state. Call it just before reading them for another
        reason."""
        self._known = self._seen = self._state()

    def _state(self) -> _State:
        return tuple(map(_stamp, self._paths))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """A file's inode, size in bytes and time of modification in nanoseconds, at least one of which changes if
    it is replaced or written; None if it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
