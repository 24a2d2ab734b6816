"""Faults with every tier on and little room on the device: engine or shelf killed or stopped; servers killed,
sockets cut behind one address.

One function per row. What is said must be what an undisturbed session says, exactly once.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from holdfast.gateway.serve import Serving, serving
from holdfast.runtime.errors import EngineDied
from holdfast.runtime.link.process import ChildEngine
from holdfast.sdk import connect
from holdfast.sdk.resume import Patience

from .crowd import STORY, WEDGED_SECONDS, Crowd, Talk, Tally
from .engine_faults import POCKET, SERVED, SOON
from .network import proxy
from .server_faults import command, launched

TIGHT = msgspec.structs.replace(POCKET, blocks=40, max_context=608, host_bytes=2 << 20, disk_bytes=64 << 20)
"""Room for one talk and a little: the others' KV goes down and comes back."""
QUICK = Patience(first=0.002, longest=0.05, total=WEDGED_SECONDS)
EARLY = 0.5  # of the kills of a server so many come before anything was heard of it
MOST_EARLY = 2  # and so many in a row, so that each reply has its chance

Strike = Callable[[ChildEngine], None]


@asynccontextmanager
async def tiered(folder: str) -> AsyncIterator[Serving]:
    """A server with a journal, a host tier and a disk."""
    settings = msgspec.structs.replace(TIGHT, store=folder)
    engine = ChildEngine(settings, backoff=SOON)
    served = replace(SERVED, store=Path(folder))
    async with serving(served, settings, engine=engine) as running:
        yield running


def engine_killed(engine: ChildEngine) -> None:
    """``kill -9``."""
    engine.kill()


def shelf_killed(engine: ChildEngine) -> None:
    """``kill -9``."""
    _signal_shelf(engine, signal.SIGKILL)


def shelf_stopped(engine: ChildEngine) -> None:
    """SIGSTOP: it takes requests and answers none."""
    _signal_shelf(engine, signal.SIGSTOP)


def _signal_shelf(engine: ChildEngine, number: signal.Signals) -> None:
    if (pid := engine.shelf_pid) is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


async def disturbed(fault: str, strike: Strike, tries: int, seed: int) -> Tally:
    """A crowd too large for the device talks, and something is struck at a random moment."""
    tally, rng = Tally(fault), random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        async with tiered(folder) as running, connect(running.url) as client:
            crowd = Crowd(client)
            await crowd.rehearse()
            for _ in range(tries):
                talking = asyncio.create_task(crowd.talk(tally))
                await asyncio.sleep(rng.uniform(0.0, crowd.seconds))
                strike(running.engine)
                await talking
                await running.engine.link.wait_ready()
                tally.tries += 1
            figures = await _figures(running.engine)
            moved = {name: int(figures.get(name, 0)) for name in ("restored", "disk_stored", "disk_lost")}
            tally.notes.append(f"the last engine: {moved}")
    return tally


async def _figures(engine: ChildEngine) -> dict[str, float]:
    """Of an engine that lives: the last strike may have come when all had been said."""
    while True:
        await engine.link.wait_ready()
        with suppress(EngineDied):
            return await engine.link.statistics()


async def restarted(tries: int, seed: int) -> Tally:
    """``kill -9`` of the whole server, another on the same store and port: the session goes on there.

    A part of the kills comes in mid-reply, after the session was heard of again; the others at any moment
    before that, while the server starts, loads, or takes the session up.
    """
    tally, rng = Tally("server killed: session resumed"), random.Random(seed)
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
    """How long each server may live that a crowd talks with."""

    def __init__(self, crowd: Crowd, tally: Tally, rng: random.Random) -> None:
        self._crowd = crowd
        self._tally = tally
        self._rng = rng
        self._talking: asyncio.Task[None] | None = None
        self._silence = 0.0  # seconds from a server's start until something was heard, when last waited for
        self._early = 0

    async def until_killed(self) -> None:
        """From a server's start to the moment at which it is to be killed."""
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
        """What is being said is heard to its end."""
        if self._talking is not None:
            await self._talking

    async def _heard(self) -> None:
        """Until a piece of text came of this server, or the talk was over."""
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
        """So much time, or less if the talk is over."""
        assert self._talking is not None
        await asyncio.wait({self._talking}, timeout=seconds)


def free_port() -> int:
    """A port of loopback on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return int(bound.getsockname()[1])


async def cut(tries: int, seed: int) -> Tally:
    """Sockets break after a random number of bytes until there were so many cuts."""
    tally, rng = Tally("socket cut at a random byte"), random.Random(seed)
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
