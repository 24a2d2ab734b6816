"""The lock of a folder: one process at a time has it, and can tell when it has it no longer.

Locked are the folder itself, which cannot be removed while it holds files, and a file in it, for file systems
that lock no folders. A lock belongs to what is open, not to a path: a folder can be renamed, replaced or
mounted over while a process works in it, a file can be removed. So `FolderLock.lost` compares what is open with
what the path leads to. Some file systems only seem to lock, such as network file systems in some modes. So the
process also signs the file with words of its own: if it finds other words there, a later process has taken the
folder.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path

from .errors import FolderHeld
from .system_limits import explained

log = logging.getLogger(__name__)

SIGNED_BYTES = 192
POLL_SECONDS = 0.05
NO_FOLDER_LOCKS = (errno.EBADF, errno.EINVAL, errno.EISDIR, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""The system's errors where a file system locks files but no folders, as NFS."""

OWN = re.compile(
    r"(lock|holder|identity|reserve|secret|payloads|data\.mdb|lock\.mdb)(\..*)?|(about|costs)\..*"
    r"|((compacted|merged)-)?[0-9a-f]{8,}\.(log|index|unreadable)(\..*)?"
    r"|journal(\..*)?|backup\..*|kv|[0-9a-f]{32}|model-.*|lost\+found"
)
"""The names of a store's files, in all its folders, with those that are being made or are kept aside; and the
names of its folders."""


class FolderLock:
    """The lock of ``folder``, from `acquire` to `release`; ``name``: of the file. The kernel frees it when the
    process ends, and processes that it started do not inherit it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder.absolute()  # as seen now: the process may go elsewhere
        self._path = self.folder / name
        self._folder_fd: int | None = None  # the folder
        self._fd: int | None = None  # the file in it
        self._keeps_out = False  # the folder is locked, too
        self._words = b""

    def acquire(self, seconds: float = 0.0) -> FolderLock:
        """Wait up to ``seconds`` for the lock, sign the file, and return this object. Makes the folder if
        needed, and lets no other user into it. Raises ``FolderHeld`` naming the holder, or ``OSError``."""
        until = time.monotonic() + seconds
        try:
            make_private(self.folder)
            self._folder_fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self._wait(self._folder_fd, until)
                self._keeps_out = True
            except OSError as fault:
                if fault.errno not in NO_FOLDER_LOCKS:
                    raise
            self._fd = self._opened(os.O_RDWR | os.O_CREAT)
            self._wait(self._fd, until)
            self._sign()
        except BaseException:
            self.release()
            raise
        return self

    def release(self) -> None:
        """Free the lock."""
        for fd in (self._fd, self._folder_fd):
            if fd is not None:
                os.close(fd)
        self._fd = self._folder_fd = None

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def lost(self) -> str:
        """Why the folder is not this process's any more, to follow its name in a sentence; "" if it is. Asked
        between writing and acknowledging: what is acknowledged then was on disk before another process could
        read the folder.

        A lock file that was removed is made again, unless another process can have had the folder meanwhile.
        """
        assert self._folder_fd is not None
        assert self._fd is not None
        if moved := elsewhere(self.folder, self._folder_fd):
            return moved
        try:
            fd = self._opened(os.O_RDONLY)  # anew: a network file system looks again then
            try:
                same = os.path.sameopenfile(fd, self._fd)
                words = os.pread(fd, SIGNED_BYTES, 0)
            finally:
                os.close(fd)
        except FileNotFoundError:
            return self._made_again()
        except OSError as fault:
            return f"cannot be looked at: {explained(fault, str(self._path))}"
        if same and words == self._words:
            return ""
        return f"was taken by {_holder(words)}"

    def _opened(self, flags: int) -> int:
        """Open the file in the folder that this process has, wherever the path leads now."""
        return os.open(self._path.name, flags | os.O_CLOEXEC, 0o600, dir_fd=self._folder_fd)

    def _wait(self, fd: int, until: float) -> None:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise FolderHeld(f"{self.folder} is held by {self._signed()}") from None
            time.sleep(POLL_SECONDS)

    def _signed(self) -> str:
        """The name of the process that signed the file."""
        with suppress(OSError):
            return _holder(self._path.read_bytes()[:SIGNED_BYTES])
        return "another process"

    def _sign(self) -> None:
        """Write this process's name and random words into the file, over what is there, so that it works on a
        full disk, too. What is read back is what counts, once it is flushed: on a network file system only then
        another host sees it. Raises ``OSError`` if it cannot be written and the folder is not locked."""
        assert self._fd is not None
        name = f"process {os.getpid()} on {socket.gethostname()}\n{secrets.token_hex(16)}\n"
        try:
            os.pwrite(self._fd, name.encode(errors="replace")[:SIGNED_BYTES].ljust(SIGNED_BYTES), 0)
            os.fsync(self._fd)
        except OSError:
            if not self._keeps_out:
                raise
            os.ftruncate(self._fd, 0)  # the name of an earlier holder would mislead
        self._words = os.pread(self._fd, SIGNED_BYTES, 0)

    def _made_again(self) -> str:
        """Make the file again after it was removed. Returns why the folder is lost, or ""."""
        assert self._fd is not None
        try:
            fd = self._opened(os.O_RDWR | os.O_CREAT | os.O_EXCL)
            os.dup2(fd, self._fd, inheritable=False)
            os.close(fd)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._sign()
        except (FileExistsError, BlockingIOError):
            return f"was taken by {self._signed()}"
        except OSError as fault:
            if self._keeps_out:  # a full disk
                return ""
            return f"has no lock any more, and none can be made: {fault.strerror}"
        log.warning("%s was removed, and is made again: leave it there while the server runs", self._path)
        return ""


def elsewhere(path: Path, fd: int) -> str:
    """What happened to the folder or file that is open as ``fd`` and was at ``path``: "is gone", "was
    replaced"; "" if it is still there."""
    try:
        there = os.stat(path)
    except OSError:
        return "is gone"
    return "" if os.path.samestat(there, os.fstat(fd)) else "was replaced"


def make_private(folder: Path) -> None:
    """Make the folder if it is not there, and let no other user into it or read a store's files there (`OWN`),
    as far as this user may change that. Files of other names stay as they are, and so does a folder that has
    such. Raises ``OSError``."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with os.scandir(folder) as entries:
        own = {one.name: one.is_file(follow_symlinks=False) for one in entries if OWN.fullmatch(one.name)}
    paths = [(folder / name, 0o600) for name, is_file in own.items() if is_file]
    if len(own) == len(os.listdir(folder)):
        paths.append((folder, 0o700))
    for path, mode in paths:
        with suppress(FileNotFoundError, PermissionError):  # another user's, such as a mounted volume
            if path.stat().st_mode & 0o077:
                path.chmod(mode)


def strangers(folder: Path) -> list[str]:
    """The names of the files in a folder that has none of a store's (`OWN`); hidden ones, as systems make them
    anywhere, do not count."""
    with suppress(OSError):
        names = [name for name in sorted(os.listdir(folder)) if name != "lost+found" and name[0] != "."]
        return [] if any(map(OWN.fullmatch, names)) else names
    return []


def _holder(words: bytes) -> str:
    """The name of the process that wrote these words into a lock's file."""
    name = words.decode(errors="replace").split("\n")[0].strip()
    return f"process {name}" if name.isdigit() else name or "another process"
