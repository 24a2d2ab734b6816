"""Starts an engine's process. This module imports little, so that the process can begin before its parent has
imported the rest."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

from .crash_report import CrashReport

PROGRAM = (sys.executable, "-m", "holdfast.runtime")
ENVIRONMENT = {"PYTHONSAFEPATH": "1", "GOMP_SPINCOUNT": "20000"}
"""Environment variables of each engine process."""
USUAL = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(128 << 20)}
"""Environment variables of each engine process, unless the operator has set them. By default glibc returns
the pages of a step's tensors (up to 32 MiB, its limit) to the kernel now and then and faults them in again
one by one: up to 50,000 page faults for a prompt of 2,048 tokens, and twice the time."""

DESCRIPTORS = b"d"
"""The first byte on an engine's socket. It carries descriptors: of the host tier's memory, if there is one, and
of the control socket of the disk process, if there is one. The settings follow."""
MOST_DESCRIPTORS = 2


@dataclass(slots=True)
class SpawnedEngine:
    """An engine's ``process`` that waits for its settings; ``sock``: this end of its socket; ``report``: its
    crash report. ``taken``: it was sent something; its process ends with the socket."""

    process: subprocess.Popen[bytes]
    sock: socket.socket
    report: CrashReport
    taken: bool = False

    @classmethod
    def of(cls, program: Sequence[str] = PROGRAM) -> SpawnedEngine:
        """Start a process. ``program``: its command line, to which the descriptors are added. Raises
        ``OSError`` if the machine is short of something."""
        with ExitStack() as undone:
            ours, theirs = socket.socketpair()
            undone.callback(ours.close)
            with theirs:
                report = CrashReport.new()
                undone.callback(report.close)
                process = subprocess.Popen(
                    [*program, "--fd", str(theirs.fileno()), "--crash-report", str(report.fd)],
                    pass_fds=[theirs.fileno(), report.fd],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # what a library prints is for the operator, too
                    env={**USUAL, **os.environ, **ENVIRONMENT},
                )
            undone.pop_all()
        return cls(process, ours, report)

    def close(self) -> None:
        """End a process that was sent nothing. Does nothing more if it is ``taken``, or was ended."""
        if self.taken:
            return
        self.taken = True
        self.sock.close()
        self.process.kill()
        self.process.wait()
        self.report.close()


@contextmanager
def spawned_early() -> Iterator[SpawnedEngine | None]:
    """Start an engine's process before its settings are known: it imports meanwhile. If it is not used in the
    block, it is ended. None if the machine is short of something, which the next start of one tells."""
    try:
        spawned = SpawnedEngine.of()
    except OSError:
        yield None
        return
    with closing(spawned):
        yield spawned
