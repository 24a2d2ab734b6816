"""The lock of a store: one server at a time has it, and notices within a second when it has it no longer.

Locked are the store's folder itself, which cannot be removed while it holds files, and the file ``lock`` in it,
for file systems that lock no folders. A lock belongs to what is open, not to a path: a folder can be renamed,
replaced or mounted over while its server runs, a file can be removed. So `StoreLock.lost` compares what is open
with what the path leads to. Some file systems only seem to lock, such as network file systems in some modes. So
a server also signs the file with words of its own: a server that finds other words there has lost the store to
a later one.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path

from ...kvstore.system_limits import explained
from ..errors import StoreHeld, StoreUnusable

log = logging.getLogger(__name__)

FILE = "lock"
SIGNED_BYTES = 192
POLL_SECONDS = 0.05
NO_FOLDER_LOCKS = (errno.EBADF, errno.EINVAL, errno.EISDIR, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""The system's errors where a file system locks files but no folders, as NFS."""


class StoreLock:
    """The lock of the store in ``folder``, from `acquire` to `release`. The kernel frees it when the process
    ends, and processes that it started do not inherit it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()  # as seen now: the process may go elsewhere
        self._place: int | None = None  # the folder
        self._fd: int | None = None  # the file in it
        self._keeps_out = False  # the folder is locked, too
        self._words = b""

    def acquire(self, seconds: float) -> StoreLock:
        """Wait up to ``seconds`` for the lock, sign its file, and return this object. Makes the folder if
        needed, and lets no other user into it. Raises ``StoreHeld`` naming the holder, or ``StoreUnusable``."""
        until = time.monotonic() + seconds
        try:
            make_private(self._folder)
            self._place = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._keeps_out = self._locked_folder(until)
            self._fd = os.open(self._folder / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._wait(self._fd, until)
            self._sign()
        except OSError as fault:
            self.release()
            raise StoreUnusable(explained(fault, f"the store {self._folder}")) from None
        except BaseException:
            self.release()
            raise
        return self

    def release(self) -> None:
        """Free the lock."""
        for fd in (self._fd, self._place):
            if fd is not None:
                os.close(fd)
        self._fd = self._place = None

    def __enter__(self) -> StoreLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def lost(self) -> str:
        """Why the store is not this process's any more, as a sentence; "" if it is. Asked between writing and
        acknowledging: what is acknowledged then was on disk before another server could read the store.

        A lock file that was removed is made again, as long as no other server can have had the store meanwhile.
        """
        assert self._place is not None
        assert self._fd is not None
        if moved := elsewhere(self._folder, self._place):
            return f"the store {self._folder} {moved}"
        try:
            # Opened anew: a network file system looks again then.
            fd = os.open(self._folder / FILE, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return self._made_again()
        except OSError as fault:
            return explained(fault, f"the lock of the store {self._folder}")
        try:
            there, ours = os.fstat(fd), os.fstat(self._fd)
            same = (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)
            words = os.pread(fd, SIGNED_BYTES, 0)
        except OSError as fault:
            return explained(fault, f"the lock of the store {self._folder}")
        finally:
            os.close(fd)
        if same and words == self._words:
            return ""
        return (
            f"the store {self._folder} was taken by {_holder(words)}: restart this server if it is to have it"
        )

    def _locked_folder(self, until: float) -> bool:
        """Lock the folder; returns False on a file system that locks none. Raises ``StoreHeld``,
        ``OSError``."""
        assert self._place is not None
        try:
            self._wait(self._place, until)
        except OSError as fault:
            if fault.errno in NO_FOLDER_LOCKS:
                return False
            raise
        return True

    def _wait(self, fd: int, until: float) -> None:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise StoreHeld(f"the store {self._folder} is held by {self._signed()}") from None
            except OSError as fault:
                if fd == self._place:
                    raise
                raise StoreUnusable(
                    f"the store {self._folder} cannot be locked ({fault.strerror}):"
                    " give it a folder on a file system with locks"
                ) from None
            time.sleep(POLL_SECONDS)

    def _signed(self) -> str:
        """The name of the process that signed the lock file."""
        with suppress(OSError):
            return _holder((self._folder / FILE).read_bytes()[:SIGNED_BYTES])
        return "another process"

    def _sign(self) -> None:
        """Write this process's name and random words into the file, over what is there, so that it works on a
        full disk, too. What is read back is what counts."""
        assert self._fd is not None
        name = f"process {os.getpid()} on {socket.gethostname()}\n{secrets.token_hex(16)}\n"
        try:
            os.pwrite(self._fd, name.encode(errors="replace")[:SIGNED_BYTES].ljust(SIGNED_BYTES), 0)
        except OSError:
            os.ftruncate(self._fd, 0)  # the name of an earlier holder would mislead
        self._words = os.pread(self._fd, SIGNED_BYTES, 0)

    def _made_again(self) -> str:
        """Make the lock file again after it was removed. Returns why the store is lost, or ""."""
        path = self._folder / FILE
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as fault:
            if self._keeps_out and not isinstance(fault, FileExistsError):  # a full disk
                return ""
            return (
                f"the lock of the store {self._folder} was removed and cannot be made again: {fault.strerror}"
            )
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return f"the store {self._folder} was taken by {self._signed()}"
        old, self._fd = self._fd, fd
        if old is not None:
            os.close(old)
        self._sign()
        log.warning("%s was removed, and is made again: leave it there while the server runs", path)
        return ""


def elsewhere(path: Path, fd: int) -> str:
    """What happened to the folder or file that is open as ``fd`` and was at ``path``: "is gone", "was
    replaced"; "" if it is still there."""
    try:
        there = os.stat(path)
    except OSError:
        return "is gone"
    ours = os.fstat(fd)
    return "" if (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino) else "was replaced"


def make_private(folder: Path) -> None:
    """Make the folder if it is not there, and let no other user into it, as far as this user may change that.
    Raises ``OSError``."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_mode & 0o077:
        with suppress(PermissionError):  # another user's folder, such as a mounted volume
            folder.chmod(0o700)


def _holder(words: bytes) -> str:
    """The name of the process that wrote these words into the lock file."""
    name = words.decode(errors="replace").split("\n")[0].strip()
    return f"process {name}" if name.isdigit() else name or "another process"
