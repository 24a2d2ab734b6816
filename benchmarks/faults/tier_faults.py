"""Faults of a server with every KV tier on and little room on the device: engine or disk process killed or
stopped; servers killed, sockets cut behind one address; a disk that another program fills.

One function per row of the table of `bench`. Each reply must be the text of an undisturbed session, exactly
once.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from holdfast.gateway.server import Serving, serving
from holdfast.runtime.errors import EngineDied
from holdfast.runtime.kv_placement.tier_setup import file_bytes
from holdfast.runtime.link.process import ChildEngine
from holdfast.sdk import connect
from holdfast.sdk.connection.reconnect import Patience

from .crowd import FACTS, STORY, WEDGED_SECONDS, Crowd, FaultTally, Talk
from .engine_faults import POCKET, SERVED, SOON, Strike, struck
from .file_faults import small_disk
from .network import proxy
from .server_faults import command, launched

TIGHT = msgspec.structs.replace(POCKET, blocks=40, max_context=608, host_bytes=2 << 20, disk_bytes=64 << 20)
"""Engine settings with room for one talk and a little: the KV of the other talks goes down to lower tiers and
comes back."""
QUICK = Patience(first=0.002, longest=0.05, total=WEDGED_SECONDS)
WIDE = msgspec.structs.replace(POCKET, blocks=640, max_context=608, host_bytes=16 << 20, disk_bytes=200 << 20)
"""Engine settings with room for twenty talks; KV that is more than the host tier holds goes to disk."""
DISK = "240m"
CHUNK, CHUNK_SECONDS = 1 << 20, 0.01
"""The program that fills the disk writes so many bytes (``CHUNK``) at once, and then waits for
``CHUNK_SECONDS``."""
SLACK = 16 << 20  # bytes beyond the journal's reserve that would be free if there were no KV; it grows, too
LEAST_KV = 2 * SLACK  # on disk when it is filled: much of it has to go
EARLY = 0.5  # share of the kills that come before the first piece of text
MOST_EARLY = 2  # and so many in a row, so that each reply has its chance


@asynccontextmanager
async def tiered(folder: str) -> AsyncIterator[Serving]:
    settings = msgspec.structs.replace(TIGHT, store=folder)
    engine = ChildEngine(settings, delays=SOON)
    served = replace(SERVED, store=Path(folder))
    async with serving(served, settings, engine=engine) as running:
        yield running


async def disk_process_killed(engine: ChildEngine, rng: random.Random) -> None:
    """Kill the disk process (``kill -9``). ``rng`` is not used."""
    _signal_disk_process(engine, signal.SIGKILL)


async def disk_process_stopped(engine: ChildEngine, rng: random.Random) -> None:
    """Stop the disk process (SIGSTOP): it takes requests and answers none. ``rng`` is not used."""
    _signal_disk_process(engine, signal.SIGSTOP)


def _signal_disk_process(engine: ChildEngine, number: signal.Signals) -> None:
    if (pid := engine.disk_pid) is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


async def disturbed(fault: str, strike: Strike, tries: int, seed: int) -> FaultTally:
    """Let clients talk that need more KV than the device holds, ``tries`` times, each time with a fault at a
    random moment. ``fault``: its name in the table. ``strike``: causes it."""
    with tempfile.TemporaryDirectory() as folder:
        async with tiered(folder) as running:
            tally = await struck(running, fault, strike, tries, seed)
            figures = await _figures(running.engine)
    moved = {name: int(figures.get(name, 0)) for name in ("restored", "disk_stored", "disk_lost")}
    tally.notes.append(f"the last engine: {moved}")
    return tally


async def _figures(engine: ChildEngine) -> dict[str, float]:
    """The statistics of a live engine. If the last fault has killed it, waits for the next one."""
    while True:
        await engine.link.wait_ready()
        with suppress(EngineDied):
            return await engine.link.statistics()


async def filled(tries: int, seed: int) -> FaultTally:
    """Another program fills the disk while twenty sessions talk, until the journal's reserve needs all the room
    of the KV.

    Lost: a refused turn, or KV that does not go to disk again once there is room.
    """
    tally, rng = FaultTally("disk filled by another program"), random.Random(seed)
    names = ("Marisol", "Bella", "Tom", "Ana", "Otto")
    lines = [f"My name is {names[n % 5]}, and my locker code is {4000 + 37 * n}." for n in range(20)]
    with small_disk(DISK) as disk:
        if disk is None:
            tally.notes.append("may not mount a tmpfs: nothing tried")
            return tally
        store, ballast = disk / "store", disk / "ballast"
        settings = msgspec.structs.replace(WIDE, store=str(store))
        async with serving(replace(SERVED, store=store), settings) as running, connect(running.url) as client:
            fields = {"max_output_tokens": 40}
            talks = [Talk((f"{line} {FACTS}", STORY, "What is my locker code?"), fields) for line in lines]
            crowd = Crowd(client, talks)
            await crowd.rehearse()
            for _ in range(tries):
                await _stored(running, store, tally)
                talking = asyncio.create_task(crowd.talk(tally))
                await asyncio.sleep(rng.uniform(0.0, crowd.seconds))
                before = file_bytes(store)
                await asyncio.to_thread(_fill, ballast, store, SERVED.journal.reserve_bytes + SLACK)
                await talking
                await crowd.talk(tally)
                tally.notes.append(f"KV gave back {before - file_bytes(store) >> 20} of {before >> 20} MiB")
                ballast.unlink()
                tally.tries += 1
            await _stored(running, store, tally)
    return tally


async def _stored(running: Serving, store: Path, tally: FaultTally) -> None:
    """Take turns until there is much KV on disk; if that takes too long, count it in ``tally`` as lost."""
    deadline = time.monotonic() + WEDGED_SECONDS
    async with connect(running.url) as client:
        while file_bytes(store) < LEAST_KV:
            if time.monotonic() > deadline:
                tally.lost += 1
                tally.notes.append(f"try {tally.tries}: no KV goes to disk again")
                return
            async with client.session() as chat:
                await chat.say(f"{time.monotonic_ns()} {FACTS * 14}", max_output_tokens=1).text()
                await chat.settle("disk")


def _fill(ballast: Path, store: Path, leave: int) -> None:
    """Write into the file ``ballast`` until only ``leave`` bytes of the disk are free or used by KV. Tries
    again if the disk is full."""
    with ballast.open("wb", buffering=0) as file:
        deadline = time.monotonic() + WEDGED_SECONDS
        while time.monotonic() < deadline:
            found = os.statvfs(store)
            left = found.f_bavail * found.f_frsize + file_bytes(store) - leave
            if left <= 0:
                return
            with suppress(OSError):
                file.write(bytes(min(CHUNK, left)))
            time.sleep(CHUNK_SECONDS)


async def restarted(tries: int, seed: int) -> FaultTally:
    """Kill the whole server (``kill -9``) and start another one on the same store and port, so many times: the
    session goes on there.

    Some kills come in mid-reply, after the first piece of text; the others before it, while the server starts,
    loads, or resumes the session.
    """
    tally, rng = FaultTally("server killed: session resumed"), random.Random(seed)
    talk = Talk((STORY, "What is my name?"), {"temperature": 0.8, "seed": 5, "max_output_tokens": 60})
    url = f"http://127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as folder:
        async with command(folder) as (_, first), connect(first) as client:
            crowd = Crowd(client, [talk])
            await crowd.rehearse()
        async with proxy(url) as network, connect(network.url, patience=QUICK) as client:
            crowd.join(client)
            lives = Lives(crowd, tally, rng)
            while tally.tries < tries:
                async with launched(folder, urlsplit(url).port or 0) as server:
                    await lives.until_killed()
                    server.kill()
                    tally.tries += 1
            async with launched(folder, urlsplit(url).port or 0):
                await lives.last()
    return tally


class Lives:
    """Decides how long each of a row of servers lives before it is killed, while the clients of ``crowd``
    talk."""

    def __init__(self, crowd: Crowd, tally: FaultTally, rng: random.Random) -> None:
        self._crowd = crowd
        self._tally = tally
        self._rng = rng
        self._talking: asyncio.Task[None] | None = None
        self._silence = 0.0  # seconds from a server's start to its first piece of text, when last measured
        self._early = 0

    async def until_killed(self) -> None:
        """Called at a server's start: wait until the server is to be killed."""
        self._talking = self._talking or asyncio.create_task(self._crowd.talk(self._tally))
        if self._silence and self._early < MOST_EARLY and self._rng.random() < EARLY:
            self._early += 1
            await self._pass(self._rng.uniform(0.0, self._silence))
        else:
            self._early = 0
            await self._heard()
            await self._pass(self._rng.uniform(0.0, self._crowd.seconds))
        if self._talking.done():
            await self._talking
            self._talking = None

    async def last(self) -> None:
        if self._talking is not None:
            await self._talking

    async def _heard(self) -> None:
        """Wait until this server has sent a piece of text, or the talk has ended. Nothing for too long counts
        as lost."""
        assert self._talking is not None
        began = time.monotonic()
        self._crowd.stirred.clear()
        stirred = asyncio.create_task(self._crowd.stirred.wait())
        done, _ = await asyncio.wait(
            {self._talking, stirred}, timeout=WEDGED_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        stirred.cancel()
        self._silence = time.monotonic() - began
        if not done:
            self._tally.lost += 1
            self._tally.notes.append(f"try {self._tally.tries}: nothing heard in {WEDGED_SECONDS:.0f} s")

    async def _pass(self, seconds: float) -> None:
        assert self._talking is not None
        await asyncio.wait({self._talking}, timeout=seconds)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return int(bound.getsockname()[1])


async def cut(tries: int, seed: int) -> FaultTally:
    """Break the clients' sockets, each after a random number of bytes, until there were so many cuts."""
    tally, rng = FaultTally("socket cut at a random byte"), random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        async with (
            tiered(folder) as running,
            proxy(running.url, lambda: rng.randrange(300, 6000)) as network,
            connect(running.url) as undisturbed,
            connect(network.url, patience=QUICK) as client,
        ):
            crowd = Crowd(undisturbed)
            await crowd.rehearse()
            crowd.join(client)
            while network.cuts < tries:
                await crowd.talk(tally)
                tally.tries = network.cuts
    return tally
