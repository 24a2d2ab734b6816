"""Who has a store's folder: one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

from ..errors import KVStoreError


class StoreHeld(KVStoreError):
    """Another process has this store."""


def hold(folder: Path) -> int:
    """Take the folder's lock, whose file names the process. Raises `StoreHeld`, naming who has it."""
    fd = os.open(folder / "holder", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        raise StoreHeld(f"{folder} is held by process {holder or 'unknown'}") from None
    signed = 0
    with contextlib.suppress(OSError):  # a full disk: over the name that stands there, or nameless
        signed = os.pwrite(fd, str(os.getpid()).encode(), 0)
    os.ftruncate(fd, signed)
    return fd


def clear(folder: Path) -> None:
    """Remove a namespace's records. Raises `StoreHeld` while a process has them."""
    if folder.is_dir():
        lock = hold(folder)
        shutil.rmtree(folder)
        os.close(lock)
