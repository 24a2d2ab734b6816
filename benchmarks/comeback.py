"""``holdfast bench comeback``: a server is killed under talking clients and started again: how soon it is
ready, and how soon the last client has its whole reply.

All clients ask at once. When a quarter of them have text, the server is killed (``kill -9``) and started at
once with the same store and port. The SDK's clients resume by themselves. Times count from the kill. In the
same run all clients take the same turn undisturbed, for comparison; both rounds must give the same texts.
Clients, gateway and engine share the machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from holdfast.sdk import Chat, Client, connect

from .crash_demo import STORY, ServerProcess
from .harness.options import RESULTS, run
from .report import Goal, percentile, show, table

READY, LAST = 3.0, 5.0
"""The goals, in seconds after the kill: the server is ready, and the last client has its reply."""
BEFORE = "My name is Marisol, and my locker code is 4821."


@dataclass
class Round:
    """One round: seconds until each client has its whole reply, in ``replies``, and until the server is
    ``ready``; ``texts``: of the replies. Undisturbed the seconds count from the question, otherwise from the
    kill."""

    ready: float = 0.0
    replies: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def told(self) -> dict[str, float]:
        return {
            "ready": self.ready,
            "first": min(self.replies),
            "median": median(self.replies),
            "p99": percentile(self.replies, 0.99),
            "last": max(self.replies),
        }


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="holdfast bench comeback", description=__doc__)
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--clients", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=24, help="of a reply, at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    chosen = parser.parse_args(words)
    return run("comeback", lambda: asyncio.run(_measure(chosen)))


async def _measure(chosen: argparse.Namespace) -> None:
    calm, killed = [], []
    for _ in range(chosen.rounds):
        one, other = await _rounds(chosen)
        calm.append(one)
        killed.append(other)
    differing = sum(
        mine != theirs
        for one, other in zip(calm, killed, strict=True)
        for mine, theirs in zip(one.texts, other.texts, strict=True)
    )
    columns = ("seconds", "ready", "first", "median", "p99", "last")
    shown = [("undisturbed", one) for one in calm] + [("killed", one) for one in killed]
    table(
        "until a client has its whole reply", columns, [(name, *one.told().values()) for name, one in shown]
    )
    goals = [
        Goal("ready after the kill", median(one.ready for one in killed), "s", READY, "lower"),
        Goal("last reply after the kill", median(max(one.replies) for one in killed), "s", LAST, "lower"),
        Goal("texts that differ", differing, "", 0, "lower"),
    ]
    figures = {
        "model": chosen.model,
        "clients": chosen.clients,
        "tokens": chosen.tokens,
        "undisturbed": [one.told() for one in calm],
        "killed": [one.told() for one in killed],
    }
    show("comeback", 0, figures, goals, chosen.out)


async def _rounds(chosen: argparse.Namespace) -> tuple[Round, Round]:
    """An undisturbed round and one in which the server is killed, on a new server and store."""
    async with AsyncExitStack() as stack:
        kept = tempfile.TemporaryDirectory(prefix="holdfast-comeback-", ignore_cleanup_errors=True)
        server = ServerProcess(chosen.model, Path(stack.enter_context(kept)))
        stack.push_async_callback(server.kill)
        await server.start()
        client = await stack.enter_async_context(connect(server.url))
        calm, killed = Round(), Round()
        for result in (calm, killed):
            async with AsyncExitStack() as sessions:
                chats = await _opened(sessions, client, chosen)
                await _round(server, chats, result, kill=result is killed)
        return calm, killed


async def _opened(stack: AsyncExitStack, client: Client, chosen: argparse.Namespace) -> list[Chat]:
    """So many sessions, in each of which one turn was taken."""
    fields = {"temperature": 0, "max_output_tokens": chosen.tokens}
    chats = [await stack.enter_async_context(client.session(**fields)) for _ in range(chosen.clients)]
    await asyncio.gather(*(chat.say(f"{number}. {BEFORE}").text() for number, chat in enumerate(chats)))
    return chats


async def _round(server: ServerProcess, chats: list[Chat], result: Round, *, kill: bool) -> None:
    talking, enough = 0, asyncio.Event()
    result.texts = [""] * len(chats)
    began = time.perf_counter()

    async def talk(number: int, chat: Chat) -> None:
        nonlocal talking
        async for piece in chat.say(STORY):
            if not result.texts[number]:
                talking += 1
                if talking * 4 >= len(chats):
                    enough.set()
            result.texts[number] += piece
        result.replies.append(time.perf_counter())

    clients = [asyncio.create_task(talk(number, chat)) for number, chat in enumerate(chats)]
    if kill:
        await enough.wait()
        began = time.perf_counter()
        await server.kill_and_start()
        result.ready = time.perf_counter() - began
    await asyncio.gather(*clients)
    result.replies = [at - began for at in result.replies]
