"""A client that leaves in the middle of a reply ends that reply and nothing else, on every face."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.gateway.access.auth import ClientIdentity
from holdfast.gateway.net.channel import MemoryChannel, memory_pair
from holdfast.gateway.responses.face import ResponsesFace
from holdfast.gateway.responses.socket import ResponsesSocket
from holdfast.tests.gateway.responses.stage import Json, Stage, staged
from holdfast.tests.gateway.scripted_service import END, WORDS, Scripted

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "Hello!"}
STREAMED: dict[str, Json] = {
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 10_000},
    "/v1/completions": {"prompt": "Hello!", "max_tokens": 10_000},
    "/v1/responses": {"input": "Hello!", "max_output_tokens": 10_000},
    "/v1/messages": {"model": "fake", "max_tokens": 10_000, "messages": [USER]},
}
DELTAS = (b"output_text.delta", b"text_delta", b'"content":', b'"text":')
ITEM = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello!"}]}


def endless() -> Scripted:
    """An engine with replies that do not end by themselves, and repeat no cycle."""
    return Scripted(lambda tokens: WORDS[hash((len(tokens), 1)) % len(WORDS)], END, max_context=1 << 16)


async def running(stage: Stage, count: int) -> None:
    """Wait until so many turns run."""
    for _ in range(100_000):
        if sum(held.generation is not None for held in stage.link.held.values()) == count:
            return
        await asyncio.sleep(0)
    raise AssertionError(f"not {count} turns")


def stopped(link: Scripted) -> int:
    """Turns that the engine was told to stop."""
    return sum(verb == "stop" for verb, *_ in link.log)


class Socket:
    """The client's end of a WebSocket of either face."""

    def __init__(self, channel: MemoryChannel) -> None:
        self.channel = channel

    async def send(self, kind: str, **fields: Any) -> None:
        await self.channel.send(json.dumps({"type": kind, **fields}).encode())

    async def until(self, *kinds: str) -> Json:
        """The first event of these types."""
        while (event := json.loads(await self.channel.receive()))["type"] not in kinds:
            pass
        told: Json = event
        return told


@asynccontextmanager
async def socket(
    stage: Stage, *, lanes: ResponsesFace | None = None, resume: bool = False
) -> AsyncIterator[Socket]:
    """A socket of Realtime, or one of Responses on ``lanes``. At the end of the block the client leaves."""
    ours, theirs = memory_pair(64)
    identity = ClientIdentity(resume=resume)
    if lanes is None:
        serving = stage.service.converse(ours, identity)
    else:
        serving = stage.service.serve(ResponsesSocket(ours, lanes, identity), ours)
    task = asyncio.create_task(serving)
    try:
        yield Socket(theirs)
    finally:
        await theirs.close(1000, "")
        await task
        await ours.close(1000, "")


@asynccontextmanager
async def beside(stage: Stage) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Another client, which reads a reply the whole time. Yields what checks that it still comes."""
    async with socket(stage) as neighbour:
        await neighbour.send("response.create", items=[ITEM])
        await neighbour.until("response.output_text.delta")

        async def goes_on() -> None:
            for _ in range(200):  # more than what was sent before
                event = await neighbour.until("response.output_text.delta", "response.done", "error")
                assert event["type"] == "response.output_text.delta"

        yield goes_on


@pytest.mark.parametrize("path", STREAMED)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_an_http_client_that_leaves(path: str, stream: bool) -> None:
    async with staged(link=endless()) as stage, beside(stage) as goes_on:
        body, leaves = {**STREAMED[path], "stream": stream}, asyncio.Event()

        def seen(sent: bytes) -> bool:
            return sum(sent.count(mark) for mark in DELTAS) > 3

        asked = asyncio.create_task(stage.ask("POST", path, body, leave=seen, left=leaves))
        await running(stage, 2)
        if not stream:
            leaves.set()
        assert (await asked).status == (200 if stream else 499)
        await running(stage, 1)
        assert stopped(stage.link) == 1, "the engine was told to stop"
        await goes_on()
        short = {name: 3 for name in ("max_tokens", "max_output_tokens") if name in body}
        again = await stage.ask("POST", path, {**body, **short, "stream": False})
        assert again.status == 200, again.body
        await goes_on()


async def shown(stage: Stage, items: str, number: int) -> None:
    """Wait until this many items are listed."""
    while True:
        if len((await stage.ask("GET", items)).json["data"]) >= number:
            return
        await asyncio.sleep(0)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_conversation_goes_on_after_a_client_that_left_it(stream: bool) -> None:
    async with staged(link=endless()) as stage, beside(stage) as goes_on:
        name = (await stage.ask("POST", "/v1/conversations", {})).json["id"]
        body, leaves = {**STREAMED["/v1/responses"], "stream": stream, "conversation": name}, asyncio.Event()
        asked = asyncio.create_task(stage.ask("POST", "/v1/responses", body, left=leaves))
        await running(stage, 2)
        leaves.set()
        await asked
        await running(stage, 1)
        items = f"/v1/conversations/{name}/items?order=asc"
        await shown(stage, items, 2)
        response = await stage.create("And now?", conversation=name, max_output_tokens=3)
        assert response["kv"]["prefilled"] <= response["kv"]["new"], (
            "the KV of the reply that was cut is used"
        )
        listed = (await stage.ask("GET", items)).json["data"]
        assert [item["role"] for item in listed] == ["user", "assistant", "user", "assistant"]
        assert listed[1]["status"] == "incomplete"
        await goes_on()


async def test_a_client_of_lanes_that_leaves() -> None:
    async with staged(link=endless()) as stage, beside(stage) as goes_on:
        lanes = ResponsesFace(stage.service)
        async with socket(stage, lanes=lanes) as one, socket(stage, lanes=lanes) as other:
            await other.send("response.create", input="Hello!", stream_id="other")
            async with socket(stage, lanes=lanes) as leaver:
                for lane in ("left", "right"):
                    await leaver.send("response.create", input=lane, stream_id=lane)
                begun = (await leaver.until("response.created"))["response"]["id"]
                await leaver.until("response.output_text.delta")
                await running(stage, 4)
            await running(stage, 2)
            assert stopped(stage.link) == 2
            await goes_on()
            await other.until("response.output_text.delta")
            for _ in range(1_000):  # it is stored when it has ended
                if (await stage.ask("GET", f"/v1/responses/{begun}")).status == 200:
                    break
                await asyncio.sleep(0)
            await one.send("response.create", input="Go on.", previous_response_id=begun, max_output_tokens=3)
            assert (await one.until("response.incomplete"))["response"]["previous_response_id"] == begun


async def test_a_realtime_client_that_leaves(tmp_path: Path) -> None:
    async with staged(tmp_path, link=endless()) as stage, beside(stage) as goes_on:
        async with socket(stage) as leaver:
            handle = (await leaver.until("session.created"))["handle"]
            await leaver.send("response.create", items=[ITEM])
            await leaver.until("response.output_text.delta")
        await running(stage, 1)
        await goes_on()
        async with socket(stage, resume=True) as again:
            await again.send("session.resume", handle=handle)
            await again.until("session.resumed")
            await again.send("response.create", items=[ITEM], response={"max_output_tokens": 3})
            assert (await again.until("response.done"))["response"]["status_details"][
                "reason"
            ] == "max_output_tokens"
        await goes_on()


async def test_a_client_that_leaves_in_its_body_is_no_mistake_of_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with staged() as stage:
        heard = iter([{"type": "http.request", "body": b'{"in', "more_body": True}])
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/responses",
            "headers": [],
            "query_string": b"",
        }
        sent: list[Json] = []

        async def receive() -> Json:
            return next(heard, {"type": "http.disconnect"})

        async def send(message: Json) -> None:
            sent.append(message)

        await stage.app({**scope, "asgi": {"version": "3.0"}}, receive, send)
        assert sent[0]["status"] == 499
        assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"]
