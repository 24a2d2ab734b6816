"""Limits of the process and the machine: the one behind an error, in one sentence; and a thread's cores
(`roam`).

The system's own texts name no limit: ``File too large`` comes from one of this process, ``Too many open
files`` from one of this process or of the machine. Nothing here raises.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

LIMITS: dict[int, Callable[[], str]] = {
    errno.EFBIG: lambda: f"cannot grow: {_limit('RLIMIT_FSIZE', 'ulimit -f')}",
    errno.EMFILE: lambda: (
        f"cannot get a file descriptor: {_limit('RLIMIT_NOFILE', 'ulimit -n', ' open files')}"
    ),
    errno.ENFILE: lambda: (
        "cannot get a file descriptor: the machine has no more"
        f" (fs.file-max is {_read('/proc/sys/fs/file-max')})"
    ),
    errno.ENOMEM: lambda: f"gets no memory: {_memory()}",
    errno.ENOSPC: lambda: "cannot grow: no space is left on its disk",
    errno.EDQUOT: lambda: "cannot grow: the quota of this user on its disk is used up",
    errno.EROFS: lambda: "cannot be written: its file system is mounted read-only",
    errno.EAGAIN: lambda: f"cannot be started: {_limit('RLIMIT_NPROC', 'ulimit -u', ' processes')}",
}
"""What an error with a limit behind it says of a thing, by the error's number."""
NAMED = tuple(LIMITS)
"""These numbers. A library's error without a number is recognised by its text."""
OUT_OF_MEMORY = ("can't allocate memory", "can't start new thread", "failed to map segment")
"""What the error texts of torch, Python and the dynamic linker say when memory runs out."""
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


def explained(error: BaseException, what: str) -> str:
    """One sentence that says of ``what`` (such as "the KV file /kv/data.mdb") which limit ``error`` comes
    from; for an error that comes from none, ``what`` and the error's text."""
    number = errno_of(error)
    if number in LIMITS and (number != errno.EAGAIN or isinstance(error, BlockingIOError)):
        return f"{what} {LIMITS[number]()}"
    cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"{what}: {cause or type(error).__name__}"


def errno_of(error: BaseException) -> int | None:
    """The number (``errno``) of the system error behind ``error``, also if it only appears in the text; None
    if there is none."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    text = str(error)
    if any(words in text for words in OUT_OF_MEMORY):
        return errno.ENOMEM
    return next((number for number in NAMED if os.strerror(number) in text), None)


def file_bytes() -> int | None:
    """The most bytes that a file of this process may have (``ulimit -f``); None: no limit."""
    return _finite("RLIMIT_FSIZE")


def roam() -> None:
    """Let the calling thread run on any core of this process but those it may run on now. For a new thread
    that does not compute.

    The engine's thread may be bound to a core of its own (`kernels.cpu.cores`). A thread that it makes starts
    there, and would delay a step instead of running beside it. Does nothing but on Linux, and where the
    system forbids it.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):  # a sandbox forbids it, or a thread has just ended
        threads = [int(path.name) for path in Path("/proc/self/task").iterdir()]
        allowed = set().union(*map(os.sched_getaffinity, threads))
        os.sched_setaffinity(0, allowed - os.sched_getaffinity(0) or allowed)


def _memory() -> str:
    """The limit on memory that an error most likely comes from, as text: one of this process if it has any,
    else the machine's."""
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
