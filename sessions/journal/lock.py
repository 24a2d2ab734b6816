"""The store's lock: one server at a time, and the second one learns who the first is.

``flock`` on a file that names its holder: the kernel lets go of it when the holder dies, however it dies.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from ...kvstore.system_limits import explained
from ..errors import StoreHeld, StoreUnusable

POLL_SECONDS = 0.05


class StoreLock:
    """Holds ``folder/lock`` from ``acquire`` to ``release``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fd: int | None = None

    def acquire(self, seconds: float) -> StoreLock:
        """Wait up to ``seconds`` for it. Raises ``StoreHeld`` naming the holder, or ``StoreUnusable``."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            fd = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as fault:
            raise StoreUnusable(explained(fault, f"the store {self._folder}")) from None
        try:
            self._wait(fd, time.monotonic() + seconds)
        except BaseException:
            os.close(fd)
            raise
        _sign(fd)
        self._fd = fd
        return self

    def release(self) -> None:
        """Let the next one in."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> StoreLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _wait(self, fd: int, until: float) -> None:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= until:
                    holder = os.pread(fd, 32, 0).decode(errors="replace") or "unknown"
                    raise StoreHeld(f"the store {self._folder} is held by process {holder}") from None
            except OSError as fault:
                raise StoreUnusable(f"the store {self._folder} cannot be locked: {fault.strerror}") from None
            time.sleep(POLL_SECONDS)


def _sign(fd: int) -> None:
    """Name this process; on a full disk over the name that stands there, or not at all."""
    name = str(os.getpid()).encode()
    signed = 0
    with suppress(OSError):
        signed = os.pwrite(fd, name, 0)
    os.ftruncate(fd, signed)
