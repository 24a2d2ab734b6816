"""The engine in a child process, watched and restarted: the form behind ``holdfast serve``.

The child gets one socket and a crash report, and imports what it needs. Over the socket it is sent the
descriptors that its settings ask for, and the settings. It exits when the socket ends, so a killed parent
leaves no orphan. Its stderr is the parent's.

An engine hangs if its heartbeat is overdue for ``PATIENCE`` while this event loop was on time. Time in which
its device thread was runnable but had no core does not count, up to ``STARVED``: on a crowded machine
engines are late, and a kill would blame their sequences. The stacks of an engine that hangs go to the log;
then it is killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from ...kvstore.disk.process import DiskProcess
from ...kvstore.system_limits import explained
from ..errors import EngineDied, EngineGone, LinkClosed, RuntimeFault
from ..kv_placement.tier_setup import host_memory, make_room, with_secret
from ..settings import EngineSettings
from .child import DESCRIPTORS, PROGRAM, SpawnedEngine
from .client import EngineLink
from .crash_report import ASK, CrashReport, EngineDeath
from .gateway_end import GatewayEnd
from .messages import Heartbeat, frame

GRACE = 2.0  # seconds in which a child must exit after its socket ended
TICK = 0.25  # seconds between two checks of its heartbeat
PATIENCE = 1.0  # seconds that a heartbeat may be overdue
STARVED = 30.0  # the same, with the time in which the engine waited for a core
STACK_SECONDS = 1.0  # for a hung engine to write its stacks
DELAYS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0)  # seconds before each restart
STEADY = 60.0  # seconds after which an engine counts as one that started well
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

log = logging.getLogger(__name__)


class Lateness:
    """Counts for how long an engine's heartbeat has been overdue; `tick` is called every ``TICK`` seconds."""

    def __init__(self) -> None:
        self._own = self._all = self._waited = 0.0

    def tick(self, waited: float, *, overdue: bool) -> None:
        """Count one check of the heartbeat. ``waited``: for how many seconds in all the device thread was
        runnable without a core; 0 if the heartbeat is in time. ``overdue``: it is late; if not, counting
        begins anew."""
        starved, self._waited = min(TICK, max(0.0, waited - self._waited)), waited
        self._own, self._all = (self._own + TICK - starved, self._all + TICK) if overdue else (0.0, 0.0)

    @property
    def over(self) -> bool:
        """Whether the heartbeat has been overdue for so long that the engine counts as hung."""
        return self._own >= PATIENCE or self._all >= STARVED


class EngineProcess:
    """One engine process, from its start to its `EngineDeath`. Owns ``process`` and its crash ``report``;
    ``end``: the gateway's end of its link."""

    def __init__(self, process: subprocess.Popen[bytes], report: CrashReport, end: GatewayEnd) -> None:
        self._end = end
        self.process = process
        self._report = report
        self._hung = ""
        self._stopped = False

    async def watch(self) -> None:
        """Return when the process's link has ended. If the engine hangs before, write its stacks to the log
        and kill it."""
        late = Lateness()
        while not late.over:
            due = time.monotonic() + TICK
            with anyio.move_on_after(TICK):
                await self._end.lost.wait()
                return
            punctual = time.monotonic() - due < TICK  # else this loop itself was late
            overdue = bool(self._end.overdue) and punctual
            late.tick(waited_of(self.process.pid) if overdue else 0.0, overdue=overdue)
        await self._kill_hung()

    async def reap(self, engine_number: int) -> EngineDeath:
        """Wait for the process after its link has ended, and kill it after ``GRACE`` seconds. Returns its
        death, with what its crash report says; closes the report."""
        lost_at = self._end.last_heartbeat if self._hung else time.monotonic()
        with anyio.CancelScope(shield=True):
            ending, outside = await anyio.to_thread.run_sync(self._reaped)
        step, stacks = self._report.sequences(), self._report.stacks()
        self._report.close()
        cause = f"{self._hung or self._end.gone}; {ending}"
        return EngineDeath(engine_number, cause, outside, step, lost_at, stacks)

    async def _kill_hung(self) -> None:
        beat = self._end.heartbeat
        phase = "starting" if beat is None else f"{beat.phase} ({beat.detail})" if beat.detail else beat.phase
        self._stopped = _state_of(self.process.pid) in ("T", "t")
        self._hung = f"the engine hung while {phase}" + " (its process is stopped)" * self._stopped
        if not self._stopped:
            await self._ask_for_stacks()
        self.process.kill()
        self._end.close(EngineDied(self._hung))
        await self._end.lost.wait()

    async def _ask_for_stacks(self) -> None:
        """Send the signal at which faulthandler writes the engine's stacks into the crash report, and wait
        until they stop growing, at most `STACK_SECONDS`."""
        self.process.send_signal(ASK)
        written = ""
        with anyio.move_on_after(STACK_SECONDS):
            while not written or written != self._report.stacks():
                written = self._report.stacks()
                await anyio.sleep(0.05)

    def _reaped(self) -> tuple[str, bool]:
        """Wait for the process to end; after ``GRACE`` seconds, kill it. Returns how it ended, as text, and
        whether a signal from another process ended it."""
        try:
            code = self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return "it did not leave and was killed", False
        if code >= 0:
            return f"exit code {code}", False
        number = signal.Signals(-code)
        outside = self._stopped or (not self._hung and number in FROM_OUTSIDE)
        return f"signal {number.name}", outside


def waited_of(pid: int) -> float:
    """For how many seconds in all a process's first thread, which is the device thread, was runnable without
    a core; 0 if not known."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _state_of(pid: int) -> str:
    """The state letter of a process as in proc(5), `T` for a stopped one; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


class ChildEngine:
    """``async with ChildEngine(settings) as link``: entered when the engine is loaded, left when it is gone.

    Entering raises the fault that the child reported (``ModelUnreadable``, ``SettingsInvalid``…), or
    ``EngineDied`` if it reported none. An engine that dies later is restarted behind the same link, until
    one reports a fault. ``delays``: seconds to wait before each restart; the last of them before all later
    ones, until an engine has lived for `STEADY` seconds. ``on_heartbeat`` gets each heartbeat, for a progress
    bar. ``program``: the child's command line, to which the descriptors are added. ``first``: the first child,
    if it was started before; it is this object's when it is entered.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        delays: Sequence[float] = DELAYS,
        on_heartbeat: Callable[[Heartbeat], None] = lambda beat: None,
        program: Sequence[str] = PROGRAM,
        first: SpawnedEngine | None = None,
    ) -> None:
        self.link = EngineLink(one.name for one in settings.adapters)
        self._settings = settings
        self._memory: int | None = None
        self._disk: DiskProcess | None = None
        self._delays = delays
        self._on_heartbeat = on_heartbeat
        self._program = program
        self._first = first
        self._child: EngineProcess | None = None
        self._watch: asyncio.Task[None] | None = None
        self._leaving = False

    @property
    def pid(self) -> int | None:
        """The child's process id; None while there is no child."""
        return self._child.process.pid if self._child else None

    @property
    def disk_pid(self) -> int | None:
        """The process id of the disk tier's process; None while there is none."""
        return self._disk.pid if self._disk else None

    def kill(self) -> None:
        """Kill the child, if there is one; another one is started."""
        if self._child is not None:
            self._child.process.kill()

    async def __aenter__(self) -> EngineLink:
        # Every engine has the same secret, so that it finds the blocks of the one before.
        self._settings = await asyncio.to_thread(with_secret, self._settings)
        await asyncio.to_thread(make_room, self._settings)
        self._memory = host_memory(self._settings)
        try:
            child = await self._start()
        except BaseException:
            await self.__aexit__()
            raise
        # A task, not a task group: a fixture may leave on another path of cancel scopes than it entered.
        self._watch = asyncio.create_task(self._supervise(child), name="holdfast-engine")
        return self.link

    async def __aexit__(self, *_: object) -> None:
        self._leaving = True
        with anyio.CancelScope(shield=True):
            if self._watch is not None:
                self._watch.cancel()
                await asyncio.wait([self._watch])
            self.link.fail(LinkClosed("this end closed the link"))
            await self._reap()
            if self._memory is not None:
                os.close(self._memory)
                self._memory = None

    async def _start(self) -> EngineProcess:
        """Spawn a child, send it the settings, and wait until its engine is loaded; then the link uses it.
        Raises the fault that the child reported, or ``EngineDied``."""
        end = GatewayEnd(self._on_heartbeat)
        spawned, self._first = self._first or SpawnedEngine.of(self._program), None
        with ExitStack() as undone:
            undone.callback(spawned.close)
            undone.callback(self._stop_disk)
            self._send_descriptors(spawned.sock)
            spawned.taken = True
            undone.pop_all()
        self._child = child = EngineProcess(spawned.process, spawned.report, end)
        self.link.attach(end)
        transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: end, sock=spawned.sock)
        transport.write(frame(msgspec.structs.replace(self._settings, again=self.link.again())))
        watching = asyncio.create_task(child.watch())
        try:
            self.link.welcome(await end.hello)
        finally:
            watching.cancel()
            await asyncio.wait([watching])
        return child

    async def _supervise(self, child: EngineProcess | None) -> None:
        starts = 0
        while True:
            if child is not None:
                began = time.monotonic()
                await child.watch()
                death = await self._reap()
                assert death is not None, "there was a child to watch"
                self.link.deaths.append(death)
                if time.monotonic() - began > STEADY:
                    starts = 0
            await anyio.sleep(self._delays[min(starts, len(self._delays) - 1)])
            starts, child = starts + 1, None
            try:
                child = await self._start()
            except EngineGone:
                await self._reap()
            except OSError as fault:  # the machine is short of something; it may have more later
                log.error("%s; it is tried again", explained(fault, "the engine's process"))
            except RuntimeFault as fault:
                log.error("engine cannot start again: %s", fault)
                self.link.fail(EngineDied(f"the engine cannot start again: {fault}"))
                return

    def _stop_disk(self) -> None:
        """Stop the disk tier's process, if there is one: it is gone when this returns."""
        disk, self._disk = self._disk, None
        if disk is not None:
            disk.stop()

    async def _reap(self) -> EngineDeath | None:
        """Wait for the child to end, after its socket has ended, and log its death; stop its disk process.
        Returns the death; None if there is no child."""
        child = self._child
        if child is None:
            return None
        death = await child.reap(self.link.engine_number)
        self._child = None  # not before: if this is cancelled, as by leaving, it is still to be waited for
        await asyncio.to_thread(self._stop_disk)  # it must be gone before the next engine has its host slots
        if not self._leaving:
            log.warning("engine %d died: %s", death.engine_number, death.cause)
        if death.stacks:
            log.error("stacks of engine %d:\n%s", death.engine_number, death.stacks)
        return death

    def _send_descriptors(self, sock: socket.socket) -> None:
        """Send a child the memory of the host tier and the control socket of a new disk process, if there are
        such (`DESCRIPTORS`)."""
        fds = [] if self._memory is None else [self._memory]
        if self._memory is not None and self._settings.store is not None:
            self._disk = DiskProcess(self._memory, self._settings.logs)
            fds.append(self._disk.theirs.fileno())
        with suppress(ConnectionError):  # the child has died meanwhile, which the link tells
            socket.send_fds(sock, [DESCRIPTORS], fds)
        if self._disk is not None:
            self._disk.start()
