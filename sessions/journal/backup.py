"""A backup: a folder with a copy of a store's journals, which the next run brings up to date.

The folder is a store itself. A run writes the next state of the whole backup beside it (`NEXT`): logs that are
sealed and have not changed as second names of the files that are there, the others copied. When that is on the
disk it is renamed to `WHOLE`, in one step. From then on it counts instead of the rest (`current`), until
`finish` has put it in place. So whenever a run dies, the folder is the backup of before or the new one, and
what was erased in the store is gone when the run has ended.

A log that was sealed never changes, and its header has a random key of its own: an equal header, a sealed index
and an equal length mean equal bytes.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from pathlib import Path

from .folder import FOLDER, IDENTITY, Disk
from .logs import Log, LogFolder
from .segment import LOG_START, read_index

NEXT, WHOLE = "backup.next", "backup.whole"
MODELS = "model-*"
"""The folders, inside a store's, of the journals of other models."""
COPY_BYTES = 1 << 20


def current(root: Path) -> Path:
    """The folder with the journals that count as those of the store in ``root``: ``root``, or the backup in it
    that is whole and not in place yet."""
    return whole if (whole := root / WHOLE).is_dir() else root


def finish(root: Path, disk: Disk) -> None:
    """Put a backup in place that is whole, and remove one that is not. The caller holds the lock of ``root``.
    Whenever this dies, the next call does all of it. Raises ``OSError``."""
    whole = root / WHOLE
    if whole.is_dir():
        for folder in _journals(root):
            disk.remove_folder(folder / FOLDER)
            disk.remove(folder / IDENTITY)
        for folder in _journals(whole):
            there = root / folder.relative_to(whole)
            disk.make_folder(there / FOLDER)
            for file in [*sorted((folder / FOLDER).iterdir()), folder / IDENTITY]:
                disk.link(file, there / file.relative_to(folder))
            disk.sync_folder(there / FOLDER)
            disk.sync_folder(there)
        disk.sync_folder(root)
        disk.remove_folder(root / NEXT)
        disk.rename(whole, root / NEXT)
        disk.sync_folder(root)
    disk.remove_folder(root / NEXT)


def commit(root: Path, disk: Disk) -> None:
    """Let the backup in ``root`` that a run has written whole replace the one before. Raises
    ``OSError``."""
    disk.sync_folder(root / NEXT)
    disk.rename(root / NEXT, root / WHOLE)
    disk.sync_folder(root)
    finish(root, disk)


def copy_logs(logs: LogFolder, had: Path, folder: Path, anew: Container[str], disk: Disk) -> int:
    """Write the logs and their indexes, as of the moment at which ``logs`` was opened, into the new folder
    ``folder``. Returns how many were copied; the others are second names of files in ``had``, the folder of an
    earlier copy. ``anew``: names of logs that are damaged there. Raises ``OSError``."""
    copied = 0
    disk.make_folder(folder)
    for one in logs.logs.values():
        before = had / one.path.name
        if before.name not in anew and _is_same(logs, one, before, disk):
            disk.link(before, folder / before.name)
            disk.link(before.with_suffix(".index"), folder / one.index_path.name)
            continue
        copied += 1
        if index := disk.contents(one.index_path, one.index_end):
            disk.replace(folder / one.index_path.name, index)
        _copy(logs, one, folder / one.path.name, disk)
    disk.sync_folder(folder)
    return copied


def _is_same(logs: LogFolder, one: Log, before: Path, disk: Disk) -> bool:
    """Whether the file ``before``, of an earlier copy, is a copy of this log from the time after it was
    sealed."""
    header = disk.contents(before, LOG_START)
    if len(header) < LOG_START or header != disk.readable(logs.opened(one), LOG_START):
        return False
    index = read_index(disk.contents(before.with_suffix(".index")), one.header.frame)
    return index.sealed == one.end == before.stat().st_size


def _copy(logs: LogFolder, one: Log, path: Path, disk: Disk) -> None:
    fd = disk.create(path)
    try:
        for offset in range(0, one.end, COPY_BYTES):
            data = disk.readable(logs.opened(one), min(COPY_BYTES, one.end - offset), offset)
            disk.write(fd, data, offset)
        disk.sync(fd)
    finally:
        os.close(fd)


def _journals(root: Path) -> Iterator[Path]:
    """The folders of journals in a backup, also of those that are put in place or removed in part."""
    found = (root, *sorted(root.glob(MODELS)))
    return (folder for folder in found if (folder / FOLDER).exists() or (folder / IDENTITY).exists())
