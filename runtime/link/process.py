"""The engine in a child process, watched and started again: the form behind ``holdfast serve``.

The child gets one socket and its settings as the first frame, and exits when the socket ends: a killed parent
leaves no orphan. Its stderr is the parent's. Knows processes and back-off; nothing of what crosses the link.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

import anyio
import anyio.to_thread

from ..errors import EngineDied, EngineGone, LinkClosed, RuntimeFault
from ..settings import EngineSettings
from .client import EngineLink
from .codec import frame
from .messages import Heartbeat
from .wire import Wire

GRACE = 2.0  # seconds a child has to leave after its socket ended
ENVIRONMENT = {"PYTHONSAFEPATH": "1", "GOMP_SPINCOUNT": "20000"}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds to wait before each start after a death: ``first``, then ``factor`` times the last.

    Never more than ``longest``; an engine that lived for ``steady`` seconds begins anew.
    """

    first: float = 0.1
    factor: float = 2.0
    longest: float = 30.0
    steady: float = 60.0

    def delays(self) -> Iterator[float]:
        """Without end."""
        delay = self.first
        while True:
            yield delay
            delay = min(self.longest, delay * self.factor)


class ChildEngine:
    """``async with ChildEngine(settings) as link``: entered when the engine is loaded, left when it is gone.

    Entering raises the fault that the child named (``ModelUnreadable``, ``SettingsInvalid``…), or
    ``EngineDied`` where it ended without one. Later deaths restart it behind the same link until it names a
    fault. ``heard`` gets every heartbeat, for a progress bar.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        backoff: Backoff | None = None,
        heard: Callable[[Heartbeat], None] = lambda beat: None,
    ) -> None:
        self.link = EngineLink()
        self._settings = settings
        self._backoff = backoff or Backoff()
        self._heard = heard
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The child's process id, while there is one."""
        return self._process.pid if self._process else None

    def kill(self) -> None:
        """End the child at once, as for one that hangs; it is started again."""
        if self._process is not None:
            self._process.kill()

    async def __aenter__(self) -> EngineLink:
        try:
            wire = await self._start()
        except BaseException:
            await self._leave()
            raise
        # A task, not a task group: a fixture may leave on another path of cancel scopes than it entered.
        self._watch = asyncio.create_task(self._supervise(wire), name="holdfast-engine")
        return self.link

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave()

    async def _leave(self) -> None:
        with anyio.CancelScope(shield=True):
            if self._watch is not None:
                self._watch.cancel()
                await asyncio.wait([self._watch])
            self.link.end(LinkClosed("this end closed the link"))
            await self._reap()

    async def _start(self) -> Wire:
        """One incarnation: spawn, hand over the settings, wait until it is loaded."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = _spawn(theirs)
            except OSError:
                ours.close()
                raise
        wire = Wire(self._heard)
        self.link.attach(wire)
        transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: wire, sock=ours)
        transport.write(frame(self._settings))
        self.link.welcome(await wire.hello)
        return wire

    async def _supervise(self, wire: Wire) -> None:
        delays = self._backoff.delays()
        while True:
            began = time.monotonic()
            await wire.lost.wait()
            log.warning("engine %d died: %s; %s", self.link.incarnation, wire.gone, await self._reap())
            if time.monotonic() - began > self._backoff.steady:
                delays = self._backoff.delays()
            restarted = await self._restart(delays)
            if restarted is None:
                return
            wire = restarted

    async def _restart(self, delays: Iterator[float]) -> Wire | None:
        while True:
            await anyio.sleep(next(delays))
            try:
                return await self._start()
            except EngineGone as fault:
                log.warning("engine did not start again: %s; %s", fault, await self._reap())
            except (RuntimeFault, OSError) as fault:
                log.error("engine cannot start again: %s", fault)
                self.link.end(EngineDied(f"the engine cannot start again: {fault}"))
                return None

    async def _reap(self) -> str:
        """Wait for a child whose socket has ended, by force if need be; says how it ended."""
        process, self._process = self._process, None
        ending = "no process"
        if process is not None:
            with anyio.CancelScope(shield=True):
                ending = await anyio.to_thread.run_sync(_ended, process)
        return ending


def _spawn(sock: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "holdfast.runtime.child", "--fd", str(sock.fileno())],
        pass_fds=[sock.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=2,  # what a library prints there is for the operator, too
        env={**os.environ, **ENVIRONMENT},
    )


def _ended(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
