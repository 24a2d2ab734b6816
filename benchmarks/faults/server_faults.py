"""Faults of the whole server: killed (its child processes must end by themselves), and asked to leave in
mid-reply.

One function per row of the table of `bench`; the server is ``holdfast serve`` in a process of its own.
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
from holdfast.sdk.connection.reconnect import Patience
from holdfast.sdk.frames.client import ItemCreate, ResponseCreate
from holdfast.sdk.frames.items import MessageItem
from holdfast.sdk.frames.server import ResponseCreated, ResponseDone, ServerGoingAway

from ..harness.servers import PROGRAM, children_of
from .crowd import STORY, FaultTally

SERVE = ["serve", "pocket", "--dtype", "float32", "--kv-bytes", "16MiB", "--max-context", "2048"]
ORPHAN_SECONDS = 60.0
"""A child process that is still there after so many seconds counts as left behind, on a machine of any speed.
How long the children really took is reported as the gap."""
GOING_AWAY = 1012
NONE = Patience(total=-1.0)
"""The client's patience for reconnecting: none, because the server is gone for good."""


@asynccontextmanager
async def command(store: str | None = None) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A server that is ready: its process, and its address. It is killed at the end of the block. ``store``:
    the folder of its store; None: a fresh one."""
    with ExitStack() as stack:
        folder = store or stack.enter_context(TemporaryDirectory())
        async with launched(folder) as process:
            yield process, await address_of(process)


@asynccontextmanager
async def launched(store: str, port: int = 0) -> AsyncIterator[asyncio.subprocess.Process]:
    """A server's process from its start on, when it is not yet ready; killed at the end of the block. ``port``:
    0 takes a free one."""
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
    """Wait until a server is ready, and return its address, which it prints then."""
    assert process.stderr is not None
    line = ""
    while " at http://" not in line:
        line = (await process.stderr.readline()).decode()
        assert line, "the server ended before it told its address"
    return line.split()[-1]


async def orphaned(tries: int, seed: int) -> FaultTally:
    """Kill the server (``kill -9``) while it computes, so many times: no child process may outlive it. Lost:
    children that did."""
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
    """Wait until the process behind this descriptor ends, ``ORPHAN_SECONDS`` at most. Returns whether it has
    ended."""
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
    """Send SIGTERM while a reply runs, so many times. Expected: an announcement, the end of the reply, close
    code 1012, exit code 0. A reply that does not end within the drain time is kept for the next server."""
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
    """What one client received on its socket. ``began`` is set when its reply begins, at the latest when the
    socket closes. ``status``: of the reply that ended. ``announced``: the server said that it goes away.
    ``close``: the socket's close code."""

    began: asyncio.Event = field(default_factory=asyncio.Event)
    status: str | None = None
    announced: bool = False
    close: int | None = None


async def spoken(client: Client, heard: HeardSocket) -> None:
    """Ask for one reply, then read events until the socket closes, and record in ``heard`` what came."""
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
