"""One process of the engine, from its start to the account of its death.

Hung is an engine whose heartbeat is overdue for ``PATIENCE`` while this end's own loop was on time. Time in
which its device thread wanted a core and had none does not count, up to ``STARVED``: a crowded machine makes
engines late, and killing one of those brings its sequences under a suspicion they have not earned. Its stacks
are asked for, it is killed and waited for. Knows signals and ``/proc``; not what restarts it, nor what crosses
the link.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from ..errors import EngineDied
from .crash_report import ASK, CrashReport, EngineDeath
from .gateway_end import GatewayEnd

GRACE = 2.0  # seconds a child has to leave after its socket ended
TICK = 0.25  # seconds between two looks at its heartbeat
PATIENCE = 1.0  # seconds an overdue heartbeat may still be on its way
STARVED = 30.0  # and those that it may in all, where the engine waits for a core
STACK_SECONDS = 1.0  # for the stacks of a hung engine to be written
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Lateness:
    """How long a heartbeat has been overdue, looked at every ``TICK``."""

    def __init__(self) -> None:
        self._own = self._all = self._waited = 0.0

    def tick(self, waited: float, *, overdue: bool) -> None:
        """``waited``: seconds that the device thread has waited for a core so far; asked of a late one only."""
        starved, self._waited = min(TICK, max(0.0, waited - self._waited)), waited
        self._own, self._all = (self._own + TICK - starved, self._all + TICK) if overdue else (0.0, 0.0)

    @property
    def over(self) -> bool:
        """Whether patience is."""
        return self._own >= PATIENCE or self._all >= STARVED


class EngineProcess:
    """Owns ``process`` and ``box``; ``wire`` is its link."""

    def __init__(self, process: subprocess.Popen[bytes], box: CrashReport, wire: GatewayEnd) -> None:
        self.wire = wire
        self._process = process
        self._box = box
        self._hung = ""
        self._stopped = False

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    async def watch(self) -> None:
        """Until its link has ended; an engine that hangs is examined and killed."""
        lost: asyncio.Future[Any] = asyncio.ensure_future(self.wire.lost.wait())
        hung: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._look_again(Lateness(), hung)
        try:
            await asyncio.wait({lost, hung}, return_when=asyncio.FIRST_COMPLETED)
            if not lost.done():
                await self._give_up()
        finally:
            lost.cancel()
            hung.cancel()

    def _look_again(self, late: Lateness, hung: asyncio.Future[None]) -> None:
        asyncio.get_running_loop().call_later(TICK, self._look, late, hung, time.monotonic() + TICK)

    def _look(self, late: Lateness, hung: asyncio.Future[None], due: float) -> None:
        """Every ``TICK``, by no task of its own, until it is ``hung`` or nobody watches any more."""
        if hung.done():
            return
        punctual = time.monotonic() - due < TICK  # else it may have been our turn to be late
        overdue = bool(self.wire.overdue) and punctual
        late.tick(waited_of(self.pid) if overdue else 0.0, overdue=overdue)
        if late.over:
            hung.set_result(None)
        else:
            self._look_again(late, hung)

    async def bury(self, engine_number: int) -> EngineDeath:
        """Wait for the process, whose link has ended, by force if need be, and read what it left."""
        lost_at = self.wire.last_heartbeat if self._hung else self.wire.gone_at
        with anyio.CancelScope(shield=True):
            ending, outside = await anyio.to_thread.run_sync(self._reaped)
        step, stacks = self._box.sequences(), self._box.stacks()
        self._box.close()
        cause = f"{self._hung or self.wire.gone}; {ending}"
        return EngineDeath(engine_number, cause, outside, step, lost_at, stacks)

    async def _give_up(self) -> None:
        beat = self.wire.heartbeat
        phase = (
            f"{beat.phase} ({beat.detail})" if beat and beat.detail else beat.phase if beat else "starting"
        )
        self._stopped = _state_of(self.pid) in ("T", "t")
        self._hung = f"the engine hung while {phase}" + " (its process is stopped)" * self._stopped
        if not self._stopped:
            await self._ask_for_stacks()
        self._process.kill()
        self.wire.give_up(EngineDied(self._hung))
        await self.wire.lost.wait()

    async def _ask_for_stacks(self) -> None:
        """A signal's handler writes them, whatever holds the interpreter; wait until they stop growing."""
        self._process.send_signal(ASK)
        written = ""
        with anyio.move_on_after(STACK_SECONDS):
            while not written or written != self._box.stacks():
                written = self._box.stacks()
                await anyio.sleep(0.05)

    def _reaped(self) -> tuple[str, bool]:
        """How the process ended, and whether somebody else ended it."""
        try:
            code = self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return "it did not leave and was killed", False
        if code >= 0:
            return f"exit code {code}", False
        number = signal.Signals(-code)
        outside = self._stopped or (not self._hung and number in FROM_OUTSIDE)
        return f"signal {number.name}", outside


def waited_of(pid: int) -> float:
    """Seconds that the process's first thread, the device's, could run and had no core; 0 where nobody says."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _state_of(pid: int) -> str:
    """The process's state letter as in proc(5), `T` for a stopped one; empty for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
