"""What stands in the files of a store, also of one that is open."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def contents(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Yield all files below a folder with their bytes, without those that are removed meanwhile.

    A store that is open writes what it keeps into new files and removes the old ones at any time.
    """
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                yield path, path.read_bytes()
        except FileNotFoundError:
            continue


def bytes_below(folder: Path) -> bytes:
    """The bytes of all files below a folder."""
    return b"".join(data for _, data in contents(folder))


def strike(root: Path, text: str) -> None:
    """Damage the records below ``root`` that have this text."""
    for path in sorted(path for path in root.rglob("journal/*") if path.is_file()):
        path.write_bytes(path.read_bytes().replace(text.encode(), text[::-1].encode()))
