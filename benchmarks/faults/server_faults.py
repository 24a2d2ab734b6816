"""Faults of the whole server: killed (its children must go by themselves), and asked to leave in mid-reply.

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
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from holdfast.sdk import Client, ConnectionFailed, ConnectionLost, connect
from holdfast.sdk.frames.client import ItemCreate, ResponseCreate
from holdfast.sdk.frames.items import MessageItem
from holdfast.sdk.frames.server import ResponseCreated, ResponseDone, ServerGoingAway
from holdfast.sdk.resume import Patience

from .crowd import STORY, Tally

SERVE = (
    "serve",
    "pocket",
    "--port",
    "0",
    "--dtype",
    "float32",
    "--kv-bytes",
    "16MiB",
    "--max-context",
    "2048",
)
CODE = "from holdfast.gateway.cli import main; main()"
ORPHAN_SECONDS = 60.0
GOING_AWAY = 1012
NONE = Patience(total=-1.0)
"""No way back is looked for: the server is gone for good."""


@asynccontextmanager
async def command(store: str | None = None) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A server and its address; killed at the end if it is still there. ``store``: a fresh one by default."""
    with ExitStack() as stack:
        folder = store or stack.enter_context(TemporaryDirectory())
        async with _command(folder) as started:
            yield started


@asynccontextmanager
async def _command(store: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CODE, *SERVE, "--store", store), stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        line = ""
        while " at http://" not in line:
            line = (await process.stderr.readline()).decode()
            assert line, "the server ended before it told its address"
        yield process, line.split()[-1]
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def orphaned(tries: int, seed: int) -> Tally:
    """``kill -9`` of the server while it computes: no child outlives it. Lost: children that did."""
    tally, rng = Tally("server killed: children left"), random.Random(seed)
    for _ in range(tries):
        async with command() as (server, url), connect(url, patience=NONE) as client:
            speaking = asyncio.create_task(spoken(client))
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
            with suppress(ConnectionFailed):  # killed before it had answered
                await speaking
    return tally


def children_of(pid: int) -> list[int]:
    """Processes that this one started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


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


async def drained(tries: int, seed: int) -> Tally:
    """SIGTERM while a reply runs: it is announced, the reply has an end, 1012, exit 0."""
    tally, rng = Tally("server asked to leave"), random.Random(seed)
    for _ in range(tries):
        async with command() as (server, url), connect(url, patience=NONE) as client:
            began = asyncio.Event()
            speaking = asyncio.create_task(spoken(client, began))
            await began.wait()
            await asyncio.sleep(rng.uniform(0.0, 0.4))
            server.send_signal(signal.SIGTERM)
            heard = await speaking
            code = await server.wait()
            tally.tries += 1
            tally.replies += heard.began
            tally.lost += heard.began and heard.status != "completed"
            tally.wrong += (code, heard.close, heard.announced) != (0, GOING_AWAY, True)
            if tally.lost or tally.wrong:
                tally.notes.append(f"exit code {code}, heard {heard}")
    return tally


@dataclass
class Heard:
    """What one client heard: its reply's beginning and status, an announcement, its socket's close code."""

    began: bool = False
    status: str | None = None
    announced: bool = False
    close: int | None = None


async def spoken(client: Client, began: asyncio.Event | None = None) -> Heard:
    """One reply is asked for; then whatever comes until the socket closes.

    ``began``: set when the reply has begun, or never will.
    """
    heard = Heard()
    try:
        async with client.session() as chat:
            await chat.send(ItemCreate(item=MessageItem.of("user", STORY)))
            await chat.send(ResponseCreate())
            async for event in chat.events():
                heard.began |= isinstance(event, ResponseCreated)
                if heard.began and began is not None:
                    began.set()
                heard.announced |= isinstance(event, ServerGoingAway)
                if isinstance(event, ResponseDone):
                    heard.status = event.response.status
    except ConnectionLost as lost:
        heard.close = lost.close_code
    finally:
        if began is not None:
            began.set()
    return heard
