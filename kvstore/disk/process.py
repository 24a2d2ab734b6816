"""Starts the disk process, restarts it and ends it: a thread in the process that outlives the engine.

The engine asks over a control socket and is sent a socket to a new disk process. The disk process before it is
dead and reaped by then, so that the engine can reuse the host slots that it was writing from. When the engine
closes its end, the disk process has ``GRACE`` seconds to write what it was given; then it is killed. This
module knows processes and file descriptors, not records.
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

import msgspec

from ..log_lines import LogSettings
from ..system_limits import explained

GRACE = 2.0  # seconds that a disk process has to end once the engine is gone
STEADY = 10.0  # seconds after which a start counts as successful
FIRST = 0.1  # seconds before the first start after a death; each failed start doubles them
LONGEST = 30.0  # seconds between two starts, at most

CRASHES = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)
"""Signals: death by one of these means that LMDB read damaged pages. The next process would read the same
pages."""

log = logging.getLogger(__name__)


class DiskProcess:
    """Runs the disk process of one engine: starts one each time the engine asks.

    ``theirs``: the engine's end of the control socket, over which it asks. ``memory``: the descriptor of the
    host tier's memory. ``logs``: the log settings of the disk process.
    """

    def __init__(self, memory: int, logs: LogSettings | None = None) -> None:
        self._logs = logs or LogSettings()
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._memory = memory
        self._process: subprocess.Popen[bytes] | None = None
        self._crashed = False
        self._began = math.inf  # when the last process was started
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-disk-process", daemon=True)

    @property
    def pid(self) -> int | None:
        """The process id of the disk process; None while there is none."""
        process = self._process  # read once: the thread replaces it
        return process.pid if process else None

    def start(self) -> None:
        """Begin to wait for the engine to ask for a disk process, in a thread. Closes this process's copy of
        ``theirs``, so that the engine's death closes that end."""
        self.theirs.close()
        self._thread.start()

    def stop(self) -> None:
        """End the disk process and wait until it is gone. Call this once the engine is gone."""
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
            spawned = False
            while not spawned and not self._left_within(delay):
                delay = min(LONGEST, max(FIRST, 2 * delay))
                spawned = self._spawned()
        self._end(GRACE)

    def _left_within(self, seconds: float) -> bool:
        """Wait for ``seconds``, or until `stop` is called. Returns whether the engine has closed its end of
        the socket."""
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
        """Start a disk process; returns whether it worked. If not, the caller retries: the engine asks once."""
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
            words = (msgspec.json.encode(one).decode() for one in (*fds, self._logs, self._crashed))
            self._process = subprocess.Popen(
                [sys.executable, "-m", "holdfast.kvstore.disk", *words],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=2,
                env={**os.environ, "PYTHONSAFEPATH": "1"},
            )
            socket.send_fds(self._ours, [b"disk"], [engine.fileno()])

    def _end(self, grace: float) -> None:
        """Wait ``grace`` seconds until the disk process ends, then kill it (0: kill it without waiting); it is
        dead and reaped when this returns. If it died of one of `CRASHES`, the next one throws the records
        away."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            process.kill()
        self._crashed = -process.wait() in CRASHES
        if self._crashed:
            cause = signal.Signals(-process.returncode).name
            log.warning("a disk process died of %s: its records are thrown away", cause)
