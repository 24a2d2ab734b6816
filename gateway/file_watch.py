"""Whether files have changed on disk. Reads no content."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

_State: TypeAlias = tuple[tuple[int, int, int] | None, ...]


class FileWatch:
    """Compares files with what they were. A link counts as the file that it points to, so that mounted secrets,
    which are exchanged by renaming a link, count too."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = tuple(paths)
        self._known = self._seen = self._state()

    def changed(self) -> bool:
        """Whether a file has changed since it was known, and not since the last call: a file that is still
        being written is not told of yet. It is known from then on."""
        before, self._seen = self._seen, self._state()
        if self._seen != before or self._seen == self._known:
            return False
        self._known = self._seen
        return True

    def note(self) -> None:
        """The files are known as they are now: their content is about to be read."""
        self._known = self._seen = self._state()

    def _state(self) -> _State:
        return tuple(map(_stamp, self._paths))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """What differs when a file was replaced or written; None if it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
