"""Faults with every tier on and little room on the device: engine or shelf killed or stopped; servers killed,
sockets cut behind one address.

One function per row. What is said must be what an undisturbed session says, exactly once.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec

from holdfast.gateway.serve import Serving, serving
from holdfast.gateway.settings import GatewaySettings
from holdfast.runtime.errors import EngineDied
from holdfast.runtime.link.process import ChildEngine
from holdfast.sdk import connect
from holdfast.sdk.resume import Patience

from .crowd import STORY, Crowd, Talk, Tally
from .engine_faults import POCKET, SOON
from .network import proxy
from .server_faults import command

TIGHT = msgspec.structs.replace(POCKET, blocks=40, max_context=608, host_bytes=2 << 20, disk_bytes=64 << 20)
"""Room for one talk and a little: the others' KV goes down and comes back."""
QUICK = Patience(first=0.002, longest=0.05, total=60.0)

NOWHERE = "http://127.0.0.1:9"

Strike = Callable[[ChildEngine], None]


@asynccontextmanager
async def tiered(folder: str) -> AsyncIterator[Serving]:
    """A server with a journal, a host tier and a disk."""
    settings = msgspec.structs.replace(TIGHT, store=folder)
    engine = ChildEngine(settings, backoff=SOON)
    async with serving(GatewaySettings(port=0, store=Path(folder)), settings, engine=engine) as running:
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
    if engine.shelf_pid is not None:
        with suppress(ProcessLookupError):
            os.kill(engine.shelf_pid, number)


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
    """``kill -9`` of the whole server in mid-reply, another on the same store: the session goes on there."""
    tally, rng = Tally("server killed: session resumed"), random.Random(seed)
    talk = Talk((STORY, "What is my name?"), {"temperature": 0.8, "seed": 5, "max_output_tokens": 60})
    with tempfile.TemporaryDirectory() as folder:
        async with command(folder) as (_, url), connect(url) as client:
            crowd = Crowd(client, [talk])
            await crowd.rehearse()
        async with proxy(NOWHERE) as network, connect(network.url, patience=QUICK) as client:
            crowd.join(client)
            talking: asyncio.Task[None] | None = None
            while tally.tries < tries:
                async with command(folder) as (server, url):
                    network.retarget(url)
                    talking = talking or asyncio.create_task(crowd.talk(tally))
                    await asyncio.wait({talking}, timeout=rng.uniform(0.3, 1.0))
                    if talking.done():
                        await talking
                        talking = None
                    server.kill()
                    tally.tries += 1
            async with command(folder) as (_, url):
                network.retarget(url)
                if talking is not None:
                    await talking
    return tally


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
