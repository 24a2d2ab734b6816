"""Nothing that a turn does in the gateway's process grows with the sessions that are open or stored: it is
counted beside some, and beside eight times as many, in the event loop and in the journal's thread."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median

import pytest

from holdfast.gateway.embedded import in_memory
from holdfast.sdk import Chat, Client
from holdfast.tests.gateway.responses.stage import Json, Stage, staged
from holdfast.tests.operations import Lines, Operations

pytestmark = pytest.mark.anyio

TIMES, ROUNDS = 8, 3
SOME = 16
"""So many sessions of each kind."""


class Crowd:
    """A service with ``size`` times `SOME` stored conversations and sessions that are not open, as many
    conversations that are open, and as many open sessions, half of them with a connection."""

    def __init__(self, stage: Stage, client: Client, lines: Lines) -> None:
        self.stage = stage
        self.client = client
        self.lines = lines
        self.number = 0
        self.asked: list[list[Json]] = []
        self.handles: list[str] = []
        self.responses: list[str] = []

    def text(self) -> str:
        self.number += 1
        return f"Number {self.number} says hello."

    async def chat(self, messages: list[Json], **more: object) -> list[Json]:
        """One turn; the conversation after it."""
        body = {"messages": messages, "max_tokens": 4, **more}
        answer = await self.stage.ask("POST", "/v1/chat/completions", body)
        assert answer.status == 200, answer.body
        if more:
            return messages
        return [*messages, {"role": "assistant", "content": answer.json["choices"][0]["message"]["content"]}]

    def said(self) -> list[Json]:
        return [{"role": "user", "content": self.text()}]

    async def fill(self, count: int, stack: AsyncExitStack | None = None) -> None:
        """Hold so many conversations, sessions and responses. ``stack``: keeps half of the sessions open."""
        for at in range(count):
            self.asked.append(await self.chat(self.said()))
            self.responses.append((await self.stage.create(self.text(), max_output_tokens=4))["id"])
            async with AsyncExitStack() as passing:
                kept = stack if stack is not None and at % 2 else passing
                chat = await kept.enter_async_context(self.client.session(max_output_tokens=4))
                await chat.say(self.text()).text()
                assert chat.handle is not None
                self.handles.append(chat.handle)


@asynccontextmanager
async def crowd(size: int, store: Path) -> AsyncIterator[Crowd]:
    lines = Lines()
    async with staged(store) as stage:
        before = Crowd(stage, in_memory(stage.service), lines)
        await before.fill(SOME * size)
    with lines.everywhere():
        async with staged(store) as stage, AsyncExitStack() as stack:
            now = Crowd(stage, in_memory(stage.service), lines)
            now.number = before.number
            await now.fill(SOME * size, stack)
            now.asked, now.handles, now.responses = before.asked, before.handles, before.responses
            yield now


# --- what is counted ----------------------------------------------------------------------------------------


async def chat(here: Crowd) -> None:
    again = await here.chat(here.said())
    await here.chat([*again, *here.said()])


async def chat_streamed(here: Crowd) -> None:
    await here.chat(here.said(), stream=True)


async def chat_that_is_stored(here: Crowd) -> None:
    await here.chat([*here.asked.pop(), *here.said()])


async def completions(here: Crowd) -> None:
    await here.stage.ask("POST", "/v1/completions", {"prompt": here.text(), "max_tokens": 4})


async def messages(here: Crowd) -> None:
    body = {"model": "fake", "messages": here.said(), "max_tokens": 4}
    await here.stage.ask("POST", "/v1/messages", body)


async def responses(here: Crowd) -> None:
    first = await here.stage.create(here.text(), max_output_tokens=4)
    then = await here.stage.create(here.text(), previous_response_id=first["id"], max_output_tokens=4)
    await here.stage.create(here.text(), previous_response_id=here.responses.pop(), max_output_tokens=4)
    assert (await here.stage.ask("GET", f"/v1/responses/{then['id']}")).status == 200
    assert (await here.stage.ask("DELETE", f"/v1/responses/{then['id']}")).status == 200


async def session(here: Crowd) -> None:
    async with here.client.session(max_output_tokens=4) as one:
        await one.say(here.text()).text()
        await edited(here, one)


async def edited(here: Crowd, one: Chat) -> None:
    (fork,) = await one.fork(1)
    await fork.say(here.text()).text()
    await one.tree()
    await one.prune(fork)
    await one.rewind(0)


async def session_resumed(here: Crowd) -> None:
    async with here.client.session(max_output_tokens=4) as one:
        await one.say(here.text()).text()
        handle = one.handle
    async with here.client.resume(handle or "") as one:
        await one.say(here.text()).text()


async def session_that_is_stored(here: Crowd) -> None:
    async with here.client.resume(here.handles.pop()) as one:
        await one.say(here.text()).text()


async def looks(here: Crowd) -> None:
    """What is asked again and again while nothing happens."""
    assert here.stage.service.turns.running == 0
    for path in ("/health", "/ready", "/v1/models"):
        await here.stage.ask("GET", path)


ACTS = (
    chat,
    chat_streamed,
    chat_that_is_stored,
    completions,
    messages,
    responses,
    session,
    session_resumed,
    session_that_is_stored,
    looks,
)


# --- counting -----------------------------------------------------------------------------------------------

Act = Callable[[Crowd], Awaitable[None]]


async def operations_of(act: Act, here: Crowd) -> Operations:
    """What ``act`` does usually, in all threads."""
    await act(here)
    counts, sizes = [], []
    for _ in range(ROUNDS):
        before = here.lines.count
        with here.lines.of_walks():
            here.lines.begin()
            await act(here)
            here.lines.end()
        counts.append(here.lines.count - before)
    tracemalloc.start()
    try:
        for _ in range(ROUNDS):
            begun = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            await act(here)
            sizes.append(tracemalloc.get_traced_memory()[1] - begun)
    finally:
        tracemalloc.stop()
    return Operations(median(counts), median(sizes))


async def longest_of(act: Act, here: Crowd) -> int:
    """The most lines for which ``act`` holds the event loop at once."""
    longest = 0

    async def watch() -> None:
        nonlocal longest
        while True:
            before = here.lines.count
            await asyncio.sleep(0)
            longest = max(longest, here.lines.count - before)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    with here.lines.of_walks():
        here.lines.begin()
        await act(here)
        await asyncio.sleep(0)
        here.lines.end()
    watching.cancel()
    return longest


async def scraped(here: Crowd) -> None:
    answer = await here.stage.ask("GET", "/metrics")
    assert answer.status == 200 and json.dumps(answer.body.decode())


async def test_nothing_grows_with_the_sessions_that_are_open_or_stored(tmp_path: Path) -> None:
    found: dict[int, dict[str, Operations]] = {}
    scrapes: dict[int, int] = {}
    for size in (1, TIMES):
        async with crowd(size, tmp_path / str(size)) as here:
            found[size] = {act.__name__: await operations_of(act, here) for act in ACTS}
            scrapes[size] = await longest_of(scraped, here)
    grown = {
        name: (few, found[TIMES][name])
        for name, few in found[1].items()
        if not found[TIMES][name].within(few)
    }
    assert not grown
    assert scrapes[TIMES] <= 2 * scrapes[1]
