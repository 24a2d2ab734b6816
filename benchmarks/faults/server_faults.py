"""Faults of the whole server: killed (its children must end by themselves), and drained in mid-reply.

One function per row; the server is ``holdfast serve`` in a process of its own.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory

from holdfast.gateway.settings import GatewaySettings
from holdfast.sdk import Client, ConnectionFailed, ConnectionLost, connect
from holdfast.sdk.frames.client import ItemCreate, ResponseCreate
from holdfast.sdk.frames.items import MessageItem
from holdfast.sdk.frames.server import ResponseCreated, ResponseDone, ServerGoingAway
from holdfast.sdk.reconnect import Patience

from ..harness.servers import PROGRAM, children_of
from .crowd import STORY, FaultTally

SERVE = ["serve", "pocket", "--dtype", "float32", "--kv-bytes", "16MiB", "--max-context", "2048"]
ORPHAN_SECONDS = 60.0
"""A child that is still there was left, on a machine of any speed; how long they took is the gap."""
GOING_AWAY = 1012
NONE = Patience(total=-1.0)
"""No way back is looked for: the server is gone for good."""


@asynccontextmanager
async def command(store: str | None = None) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A server that is ready, and its address; killed at the end. ``store``: a fresh one by default."""
    with ExitStack() as stack:
        folder = store or stack.enter_context(TemporaryDirectory())
        async with launched(folder) as process:
            yield process, await address_of(process)


@asynccontextmanager
async def launched(store: str, port: int = 0) -> AsyncIterator[asyncio.subprocess.Process]:
    """A server from its start on, listening on ``port``."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, *SERVE, "--port", str(port), "--store", store),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def address_of(process: asyncio.subprocess.Process) -> str:
    """Its address, printed when it is ready."""
    assert process.stderr is not None
    line = ""
    while " at http://" not in line:
        line = (await process.stderr.readline()).decode()
        assert line, "the server ended before it told its address"
    return line.split()[-1]


async def orphaned(tries: int, seed: int) -> FaultTally:
    """``kill -9`` of the server while it computes: no child outlives it. Lost: children that did."""
    tally, rng = FaultTally("server killed: children left"), random.Random(seed)
    for _ in range(tries):
        async with command() as (server, url), connect(url, patience=NONE) as client:
            speaking = asyncio.create_task(spoken(client, HeardSocket()))
            await asyncio.sleep(rng.uniform(0.0, 0.5))
            children = children_of(server.pid)
            watching = [os.pidfd_open(child) for child in children]
            began = asyncio.get_running_loop().time()
            server.kill()
            gone = await asyncio.gather(*map(ended, watching))
            tally.lost += len(gone) - sum(gone)
            tally.gap = max(tally.gap, asyncio.get_running_loop().time() - began)
            tally.tries += 1
            tally.wrong += not children
            with suppress(ConnectionFailed):  # killed before it answered
                await speaking
    return tally


async def ended(pidfd: int) -> bool:
    """Whether the process ends within ``ORPHAN_SECONDS``."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, over.set)
    try:
        async with asyncio.timeout(ORPHAN_SECONDS):
            await over.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    return True


async def drained(tries: int, seed: int) -> FaultTally:
    """SIGTERM while a reply runs: an announcement, the end of the reply, close code 1012, exit code 0. A
    reply that does not end within the drain time is kept for the next server."""
    tally, rng = FaultTally("server asked to leave"), random.Random(seed)
    loop, allowed = asyncio.get_running_loop(), GatewaySettings().drain_seconds
    async with command() as (_, url), connect(url) as client, client.session() as chat:
        began = loop.time()
        await chat.say(STORY).text()
        seconds = loop.time() - began
    for _ in range(tries):
        async with command() as (server, url), connect(url, patience=NONE) as client:
            heard = HeardSocket()
            speaking = asyncio.create_task(spoken(client, heard))
            await heard.began.wait()
            await asyncio.sleep(rng.uniform(0.0, seconds))
            server.send_signal(signal.SIGTERM)
            signalled = loop.time()
            await speaking
            kept = loop.time() - signalled >= allowed
            code = await server.wait()
            tally.tries += 1
            tally.replies += 1
            lost = heard.status != "completed" and not kept
            wrong = (code, heard.close, heard.announced) != (0, GOING_AWAY, True)
            tally.lost += lost
            tally.wrong += wrong
            if lost or wrong:
                tally.notes.append(f"exit code {code}, heard {heard}")
    return tally


@dataclass
class HeardSocket:
    """What one client received: its reply's start and status, an announcement, its socket's close code.
    ``began`` is set at the latest when the socket closes."""

    began: asyncio.Event = field(default_factory=asyncio.Event)
    status: str | None = None
    announced: bool = False
    close: int | None = None


async def spoken(client: Client, heard: HeardSocket) -> None:
    """Ask for one reply; then read events until the socket closes."""
    try:
        async with client.session() as chat:
            await chat.send(ItemCreate(item=MessageItem.of("user", STORY)))
            await chat.send(ResponseCreate())
            async for event in chat.events():
                if isinstance(event, ResponseCreated):
                    heard.began.set()
                heard.announced |= isinstance(event, ServerGoingAway)
                if isinstance(event, ResponseDone):
                    heard.status = event.response.status
    except ConnectionLost as lost:
        heard.close = lost.close_code
    finally:
        heard.began.set()
