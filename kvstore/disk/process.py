"""Starts the disk process, restarts it and ends it: a thread in the process that outlives the engine.

The engine asks over a control socket, and gets a socket to a new disk process. By then the one before is dead
and reaped, so that its slots can be taken back. When the engine's end closes, the disk process has a moment
to write what it was given; then it is killed. Knows processes and descriptors, no records.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time

from ..system_limits import explained

GRACE = 2.0  # seconds that a disk process has to end once the engine is gone
STEADY = 10.0  # seconds after which a start counts as successful
FIRST = 0.1  # seconds before the first start after a death; each failed start doubles them
LONGEST = 30.0  # seconds between two starts, at most

CRASHES = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)
"""Signals that mean that LMDB met damaged pages in its map; the next process would meet them again."""

log = logging.getLogger(__name__)


class DiskProcess:
    """Serves one engine: ``theirs`` is its end of the control socket. ``memory``: the slots' memfd."""

    def __init__(self, memory: int) -> None:
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._memory = memory
        self._process: subprocess.Popen[bytes] | None = None
        self._crashed = False
        self._began = math.inf  # when the last process was started
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-disk-process", daemon=True)

    @property
    def pid(self) -> int | None:
        """The disk process's id, while there is one."""
        process = self._process  # read once: the thread replaces it
        return process.pid if process else None

    def start(self) -> None:
        """Begin to listen. This process's copy of the engine's end is closed: its death closes the socket."""
        self.theirs.close()
        self._thread.start()

    def stop(self) -> None:
        """The engine is gone: end the disk process, and wait until it is gone too."""
        self.theirs.close()
        self._leaving.set()
        if self._thread.is_alive():
            self._thread.join()
        self._ours.close()

    def _run(self) -> None:
        delay = 0.0
        while self._asked():
            if time.monotonic() - self._began > STEADY:
                delay = FIRST
            self._end(0.0)
            while not self._left_within(delay) and not self._spawned():
                delay = _longer(delay)
            delay = _longer(delay)
        self._end(GRACE)

    def _left_within(self, seconds: float) -> bool:
        """Wait so long, or until `stop`; returns whether the engine has left."""
        self._leaving.wait(seconds)
        try:
            return not self._ours.recv(16, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _asked(self) -> bool:
        try:
            return bool(self._ours.recv(16))
        except OSError:
            return False

    def _spawned(self) -> bool:
        """Start a disk process; whether that worked. The engine asks once only: the caller tries again."""
        self._began = time.monotonic()  # before the engine can know of the process, and of its death
        try:
            self._spawn()
        except OSError as error:  # the machine has no room for a process, or the engine left just now
            self._end(0.0)
            if not self._left_within(0.0):
                log.warning("%s; it is tried again", explained(error, "the disk process"))
            return False
        return True

    def _spawn(self) -> None:
        engine, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with engine, server:
            fds = [server.fileno(), self._memory]
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "holdfast.kvstore.disk",
                    "--fd",
                    str(fds[0]),
                    "--memory",
                    str(fds[1]),
                    *(["--anew"] if self._crashed else []),
                ],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=2,
                env={**os.environ, "PYTHONSAFEPATH": "1"},
            )
            socket.send_fds(self._ours, [b"disk"], [engine.fileno()])

    def _end(self, grace: float) -> None:
        """End the disk process; it is dead and reaped when this returns."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.wait(grace) if grace else process.kill()
        except subprocess.TimeoutExpired:
            process.kill()
        self._crashed = -process.wait() in CRASHES
        if self._crashed:
            log.warning(
                "a disk process died of %s: its records are thrown away",
                signal.Signals(-process.returncode).name,
            )


def _longer(delay: float) -> float:
    return min(LONGEST, 2 * delay) if delay else FIRST
