"""The client without `async` against a server, and replies out of band of one chat side by side."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from anyio import to_thread

from holdfast.benchmarks.faults.network import proxy
from holdfast.gateway.server import Serving
from holdfast.sdk import CallFinished, Patience, RunDone, ServerError, connect
from holdfast.sdk.frames.items import MessageItem
from holdfast.sdk.frames.server import TextDelta
from holdfast.sdk.sync import connect as connect_sync

pytestmark = pytest.mark.anyio


def get_weather(city: str) -> str:
    """The weather in a city, as JSON."""
    return '{"degrees": 7, "sky": "cloudy"}'


def converse(url: str) -> None:
    """A conversation with each of the verbs, from a thread without an event loop."""
    with connect_sync(url) as client:
        with client.session(temperature=0, tools=[get_weather]) as chat:
            pieces = list(chat.say("My name is Marisol."))
            assert len(pieces) > 1 and "".join(pieces) == chat.last.text
            here = chat.last.response.output[-1]
            assert "Marisol" in chat.say("What is my name?").finish().text
            assert "cloudy" in chat.say("What is the weather in Oslo?").finish().text
            events = list(chat.run("What is the weather in Rome?"))
            assert any(isinstance(event, CallFinished) for event in events)
            assert isinstance(events[-1], RunDone)
            (fork,) = chat.fork()
            assert chat.blocks().blocks.shared > 0
            chat.rewind(here)
            assert any(isinstance(event, TextDelta) for event in chat.respond())
            assert "Marisol" in fork.say("What is my name?").finish().text
            short = chat.compact(1, request="What is my name?", max_output_tokens=30)
            assert "Marisol" in short.say("What is my name?").finish().text
            with pytest.raises(ServerError):
                chat.rewind("no such item")
            assert chat.update(temperature=0.5).temperature == 0.5
            story = chat.say("Tell me the story of the fox.", min_output_tokens=100)
            heard = next(story)
            assert chat.interrupt(heard) == heard
            assert repr(chat).startswith(f"<Sync <Chat {chat.session.id} with pocket")
            handle = chat.handle
        with client.resume(handle or "") as again:
            assert "Marisol" in again.say("What is my name?").finish().text


async def test_a_conversation_without_async(server: Serving) -> None:
    await to_thread.run_sync(converse, server.url)


async def test_replies_out_of_band_of_one_chat_run_beside_a_turn(server: Serving) -> None:
    async with connect(server.url) as client, client.session(temperature=0) as chat:
        await chat.say("My name is Marisol.")
        turn = chat.say("Tell me the story of the fox.", min_output_tokens=200, max_output_tokens=240)
        first = await anext(turn)
        texts: list[str] = []

        async def ask() -> None:
            context = [MessageItem.of("user", "My locker code is 4821. What is my locker code?")]
            finished = await chat.respond(conversation="none", input=context, max_output_tokens=30)
            assert finished.response.metadata is None and finished.response.conversation_id is None
            texts.append(finished.text)

        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(ask)
        assert len(set(texts)) == 1 and texts[0]
        finished = await turn
        assert finished.status in ("completed", "incomplete") and finished.text.startswith(first)
        assert "Marisol" in (await chat.say("What is my name?")).text


async def test_replies_out_of_band_outlive_cut_sockets(server: Serving) -> None:
    fields: dict[str, Any] = {"min_output_tokens": 60, "max_output_tokens": 80}
    context = [MessageItem.of("user", "Tell me the story of the fox.")]
    patience = Patience(first=0.01, longest=0.1)
    async with (
        proxy(server.url, lambda: 6000) as network,
        connect(network.url, patience=patience) as client,
        client.session(temperature=0) as chat,
    ):
        whole = (await chat.respond(conversation="none", input=context, **fields)).text
        texts: list[str] = []

        async def ask() -> None:
            events = [event async for event in chat.respond(conversation="none", input=context, **fields)]
            pieces = "".join(event.delta for event in events if isinstance(event, TextDelta))
            texts.append(pieces)

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(ask)
        assert network.cuts >= 3 and texts == [whole] * 3
        assert (await chat.say("My name is Marisol.")).status == "completed"
