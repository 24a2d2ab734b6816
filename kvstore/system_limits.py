"""Says which limit an operation has hit: an error of the system, and the file, becomes one sentence.

The system's own texts name neither: ``File too large`` is a limit of this process, ``Too many open files`` one
of this process or of the machine. Reads the process's limits; knows no tier and raises nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import sys
from pathlib import Path

NAMED = (
    errno.EFBIG,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EAGAIN,
)
"""Errors that have a limit behind them; looked for by their text where a library tells no number."""
OUT_OF_MEMORY = ("can't allocate memory", "can't start new thread", "failed to map segment")
"""The words of torch, Python and the dynamic linker for it."""
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


def explained(error: BaseException, what: str) -> str:
    """One sentence: ``what`` (such as "the KV file /kv/data.mdb"), and the limit that ``error`` comes from."""
    match errno_of(error):
        case errno.EFBIG:
            return f"{what} cannot grow: {_limit('RLIMIT_FSIZE', 'ulimit -f')}"
        case errno.EMFILE:
            return (
                f"{what} cannot get a file descriptor: {_limit('RLIMIT_NOFILE', 'ulimit -n', ' open files')}"
            )
        case errno.ENFILE:
            most = _read("/proc/sys/fs/file-max")
            return f"{what} cannot get a file descriptor: the machine has no more (fs.file-max is {most})"
        case errno.ENOMEM:
            return f"{what} gets no memory: {_memory()}"
        case errno.ENOSPC:
            return f"{what} cannot grow: no space is left on its disk"
        case errno.EDQUOT:
            return f"{what} cannot grow: the quota of this user on its disk is used up"
        case errno.EROFS:
            return f"{what} cannot be written: its file system is mounted read-only"
        case errno.EAGAIN if isinstance(error, BlockingIOError):
            return f"{what} cannot be started: {_limit('RLIMIT_NPROC', 'ulimit -u', ' processes')}"
    cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"{what}: {cause or type(error).__name__}"


def errno_of(error: BaseException) -> int | None:
    """The number of the error, by its text where it carries none; None for one that is not the system's."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    text = str(error)
    if any(words in text for words in OUT_OF_MEMORY):
        return errno.ENOMEM
    return next((number for number in NAMED if os.strerror(number) in text), None)


def open_files() -> int:
    """Descriptors that this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def file_bytes() -> int | None:
    """Bytes that a file of this process may have; None: no limit."""
    return _finite("RLIMIT_FSIZE")


def roam() -> None:
    """The first act of a thread that another has made: run wherever any thread of this process may, but not
    where the one that made it is bound to.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):  # a sandbox forbids it, or a thread has just ended
        threads = [int(path.name) for path in Path("/proc/self/task").iterdir()]
        allowed = set().union(*map(os.sched_getaffinity, threads))
        os.sched_setaffinity(0, allowed - os.sched_getaffinity(0) or allowed)


def _memory() -> str:
    """The limit on memory that is likely the one."""
    for name, option in (("RLIMIT_AS", "ulimit -v"), ("RLIMIT_DATA", "ulimit -d")):
        if _finite(name) is not None:
            return _limit(name, option)
    return "the machine, or this process's control group, has none left"


def _limit(name: str, option: str, unit: str = " bytes") -> str:
    most = _finite(name)
    return f"{name} is {'unlimited' if most is None else f'{most}{unit}'} ({option})"


def _finite(name: str) -> int | None:
    most = resource.getrlimit(getattr(resource, name))[0]
    return None if most == resource.RLIM_INFINITY else int(most)


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "unknown"
