"""The engine in a child process, watched and started again: the form behind ``holdfast serve``.

The child gets one socket, a black box, and its settings as the first frame; it exits when the socket ends: a
killed parent leaves no orphan. Its stderr is the parent's. One that hangs is killed, and its stacks go to the
log. Knows restarts and back-off; nothing of what crosses the link.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

import anyio

from ...kvstore.disk.process import DiskProcess
from ...kvstore.system_limits import explained
from ..errors import EngineDied, EngineGone, LinkClosed, RuntimeFault
from ..kv_placement.tier_setup import host_memory, make_room, with_secret
from ..settings import EngineSettings
from .client import EngineLink
from .codec import frame
from .crash_report import CrashReport, EngineDeath
from .engine_process import EngineProcess
from .gateway_end import GatewayEnd
from .messages import Heartbeat

PROGRAM = (sys.executable, "-m", "holdfast.runtime")
ENVIRONMENT = {"PYTHONSAFEPATH": "1", "GOMP_SPINCOUNT": "20000"}
"""Of a process that computes."""
USUAL = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(128 << 20)}
"""The same, unless an operator has set them. By itself glibc gives the pages of a step's tensors (of less than
32 MiB, its limit) back to the kernel now and then, and takes them again one by one: up to 50,000 faults for a
prompt of 2,048 tokens, and twice the time.
"""

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
    fault. ``heard`` gets every heartbeat, for a progress bar. ``program``: the child's command line, to which
    the descriptors are added.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        backoff: Backoff | None = None,
        heard: Callable[[Heartbeat], None] = lambda beat: None,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self.link = EngineLink()
        self._settings = settings
        self._memory: int | None = None
        self._shelf: DiskProcess | None = None
        self._backoff = backoff or Backoff()
        self._heard = heard
        self._program = program
        self._child: EngineProcess | None = None
        self._watch: asyncio.Task[None] | None = None
        self._leaving = False

    @property
    def pid(self) -> int | None:
        """The child's process id, while there is one."""
        return self._child.pid if self._child else None

    @property
    def shelf_pid(self) -> int | None:
        """The process id of the disk tier's shelf, while there is one."""
        return self._shelf.pid if self._shelf else None

    def kill(self) -> None:
        """End the child at once, as for one that hangs; it is started again."""
        if self._child is not None:
            self._child.kill()

    async def __aenter__(self) -> EngineLink:
        # Each engine_number names its blocks alike, so that it finds those that the one before it kept.
        self._settings = await asyncio.to_thread(with_secret, self._settings)
        await asyncio.to_thread(make_room, self._settings)
        self._memory = host_memory(self._settings)
        try:
            child = await self._start()
        except BaseException:
            await self._leave()
            raise
        # A task, not a task group: a fixture may leave on another path of cancel scopes than it entered.
        self._watch = asyncio.create_task(self._supervise(child), name="holdfast-engine")
        return self.link

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave()

    async def _leave(self) -> None:
        self._leaving = True
        with anyio.CancelScope(shield=True):
            if self._watch is not None:
                self._watch.cancel()
                await asyncio.wait([self._watch])
            self.link.end(LinkClosed("this end closed the link"))
            await self._bury()
            if self._memory is not None:
                os.close(self._memory)
                self._memory = None

    async def _start(self) -> EngineProcess:
        """One engine: spawn, hand over the settings, wait until it is loaded or has hung in it."""
        wire = GatewayEnd(self._heard)
        with ExitStack() as undone:
            ours, theirs = socket.socketpair()
            undone.callback(ours.close)
            with theirs:
                box = CrashReport.new()
                undone.callback(box.close)
                undone.callback(self._drop_keeper)
                process = self._spawn(theirs, box)
            undone.pop_all()
        self._child = child = EngineProcess(process, box, wire)
        self.link.attach(wire)
        transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: wire, sock=ours)
        transport.write(frame(self._settings))
        watching = asyncio.create_task(child.watch())
        try:
            self.link.welcome(await wire.hello)
        finally:
            watching.cancel()
            await asyncio.wait([watching])
        return child

    async def _supervise(self, child: EngineProcess) -> None:
        delays = self._backoff.delays()
        while True:
            began = time.monotonic()
            await child.watch()
            death = await self._bury()
            assert death is not None, "what was watched can be buried"
            self.link.bury(death)
            if time.monotonic() - began > self._backoff.steady:
                delays = self._backoff.delays()
            restarted = await self._restart(delays)
            if restarted is None:
                return
            child = restarted

    async def _restart(self, delays: Iterator[float]) -> EngineProcess | None:
        while True:
            await anyio.sleep(next(delays))
            try:
                return await self._start()
            except EngineGone:
                await self._bury()
            except OSError as fault:  # of the machine, which may have more later
                log.error("%s; it is tried again", explained(fault, "the engine's process"))
            except RuntimeFault as fault:
                log.error("engine cannot start again: %s", fault)
                self.link.end(EngineDied(f"the engine cannot start again: {fault}"))
                return None

    def _drop_keeper(self) -> None:
        """Of a child that could not be started: nothing asks it for a shelf."""
        shelf, self._shelf = self._shelf, None
        if shelf is not None:
            shelf.stop()

    async def _bury(self) -> EngineDeath | None:
        """The account of the child whose socket has ended, which the log gets too; None if there is none."""
        child, self._child = self._child, None
        shelf, self._shelf = self._shelf, None
        if child is None:
            return None
        death = await child.bury(self.link.engine_number)
        if shelf is not None:  # the next engine takes the slots that it may still have
            await asyncio.to_thread(shelf.stop)
        if not self._leaving:
            log.warning("engine %d died: %s", death.engine_number, death.cause)
        if death.stacks:
            log.error("stacks of engine %d:\n%s", death.engine_number, death.stacks)
        return death

    def _spawn(self, sock: socket.socket, box: CrashReport) -> subprocess.Popen[bytes]:
        command = [*self._program, "--fd", str(sock.fileno()), "--box", str(box.fd)]
        fds = [sock.fileno(), box.fd]
        if self._memory is not None:
            command += ["--memory", str(self._memory)]
            fds.append(self._memory)
            if self._settings.store is not None:
                self._shelf = DiskProcess(self._memory)
                command += ["--shelf", str(self._shelf.theirs.fileno())]
                fds.append(self._shelf.theirs.fileno())
        process = subprocess.Popen(
            command,
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a library prints there is for the operator, too
            env={**USUAL, **os.environ, **ENVIRONMENT},
        )
        if self._shelf is not None:
            self._shelf.start()
        return process
