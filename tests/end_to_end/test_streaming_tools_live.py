"""A tool's output that is computed while the tool runs: token for token what is sent whole, and never lost."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from holdfast.benchmarks.faults.network import proxy
from holdfast.gateway.live.session import LiveSession
from holdfast.gateway.server import Serving
from holdfast.gateway.settings import GatewaySettings
from holdfast.runtime.settings import EngineSettings
from holdfast.sdk import Chat, Client, RunDone, connect, tool
from holdfast.sessions.conversation.items import FunctionCallOutput
from holdfast.tests.threaded import serving

from .test_resume import QUICK, begun, greeted, returning, served
from .test_streamed_input import PAUSES, in_pieces
from .wires import Wire, text_of, wire

pytestmark = pytest.mark.anyio

ASKED = "What is the weather in Oslo?"
OUTPUT = json.dumps({"temperature": 7, "sky": "cloudy", "told": [f"at {hour} o'clock" for hour in range(24)]})
BRIEF = {"max_output_tokens": 48}
"""It makes no sense to the pocket model, which would go on without end."""
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@tool
async def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return OUTPUT


def told(done: RunDone) -> tuple[str, int, int]:
    """What was said and how many tokens went in and came out."""
    assert done.calls == 1 and len(done.rounds) == 2
    return done.text, done.usage.input_tokens, done.usage.output_tokens


async def whole(client: Client, **fields: Any) -> tuple[str, int, int]:
    async with client.session(**BRIEF, **fields) as chat:
        return told(await chat.run(ASKED, [get_weather]).done())


def outputs(session: LiveSession) -> list[str]:
    return [item.output for item in session.session.history.items() if isinstance(item, FunctionCallOutput)]


# --- the same, and sooner ---


async def test_what_came_while_the_tool_ran_is_computed_when_it_ends(client: Client) -> None:
    async with client.session(tools=[WEATHER], **BRIEF) as chat:
        await chat.run(ASKED).done()
        await chat.answer(chat.last.calls[0], OUTPUT)
        wanted = await chat.run().text()
        usage = chat.last.usage
    for pause in PAUSES:
        async with client.session(tools=[WEATHER], **BRIEF) as chat:
            assert (await chat.run(ASKED).done()).stop == "caller"
            async with chat.output(chat.last.calls[0]) as out:
                await anyio.sleep(pause)
                for piece in in_pieces(OUTPUT, random.Random(3)):
                    await out.append(piece)
                await anyio.sleep(pause)
            committed = out.committed
            assert committed is not None
            assert await chat.run().text() == wanted
            assert chat.last.usage is not None and usage is not None and chat.last.kv is not None
            assert chat.last.usage.input_tokens == usage.input_tokens
            assert chat.last.kv.prefilled <= chat.last.kv.new, "nothing is computed twice"
            pending = 1  # the reply's last token, which was sampled and not computed
            assert committed.prefilled_tokens + committed.left_tokens + pending == chat.last.kv.new
        if committed.prefilled_tokens > 4 * committed.left_tokens > 0:
            return
    pytest.fail(f"nothing was computed within {pause} seconds")


async def test_what_stands_before_the_output_is_computed_while_the_tool_is_silent(client: Client) -> None:
    for pause in PAUSES:
        async with client.session(tools=[WEATHER], **BRIEF) as chat:
            await chat.run(ASKED).done()
            async with chat.output(chat.last.calls[0]) as out:
                await anyio.sleep(pause)
            assert out.committed is not None
            await chat.run().text()
            assert chat.last.kv is not None and chat.last.kv.prefilled <= chat.last.kv.new
        if out.committed.prefilled_tokens:
            return
    pytest.fail(f"nothing was computed within {pause} seconds")


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 0.8, "seed": 11}], ids=str)
async def test_a_run_that_streams_says_what_one_that_does_not_says(
    client: Client, fields: dict[str, Any]
) -> None:
    wanted = await whole(client, **fields)

    async def pieces(city: str, seed: int) -> AsyncIterator[str]:
        """Get the weather in a city."""
        for piece in in_pieces(OUTPUT, random.Random(seed)):
            yield piece
            await anyio.sleep(0.03)

    for seed in range(4):
        streaming = tool(name="get_weather")(partial(pieces, seed=seed))
        assert streaming.definition == get_weather.definition
        async with client.session(**BRIEF, **fields) as chat:
            assert told(await chat.run(ASKED, [streaming]).done()) == wanted


async def test_an_output_that_was_taken_back_is_forgotten(client: Client) -> None:
    async with (
        client.session(tools=[WEATHER], **BRIEF) as plain,
        client.session(tools=[WEATHER], **BRIEF) as chat,
    ):
        for one in (plain, chat):
            await one.run(ASKED).done()
        await plain.answer(plain.last.calls[0], '{"temperature": 21, "sky": "clear"}')
        with pytest.raises(KeyError):
            await broken_off(chat)
        await chat.answer(chat.last.calls[0], '{"temperature": 21, "sky": "clear"}')
        assert await chat.run().text() == await plain.run().text()


async def broken_off(chat: Chat) -> None:
    async with chat.output(chat.last.calls[0]) as out:
        await out.append(OUTPUT)
        await anyio.sleep(PAUSES[0])
        raise KeyError


# --- sockets and servers that fail ---


@pytest.fixture(scope="module")
async def kept(tmp_path_factory: pytest.TempPathFactory, pocket: EngineSettings) -> AsyncIterator[Serving]:
    """A server with a journal."""
    store = tmp_path_factory.mktemp("store")
    async with serving(GatewaySettings(port=0, store=store), pocket) as running:
        yield running


@pytest.mark.parametrize("seed", range(3))
async def test_a_socket_cut_at_any_byte_loses_and_doubles_no_piece(kept: Serving, seed: int) -> None:
    dice = random.Random(seed)
    async with connect(kept.url) as client:
        wanted = await whole(client)

    async def streaming(city: str) -> AsyncIterator[str]:
        """Get the weather in a city."""
        for at in range(0, len(OUTPUT), 20):
            yield OUTPUT[at : at + 20]
            await anyio.sleep(0.025)  # each in a frame of its own
            if dice.random() < 0.2:
                network.cut_all()

    async with (
        proxy(kept.url, lambda: dice.randrange(1, 7000)) as network,
        connect(network.url, patience=QUICK) as client,
        begun(client) as chat,
    ):
        run = chat.run(ASKED, [tool(name="get_weather")(streaming)], **BRIEF)
        assert told(await run.done()) == wanted
        (found,) = (one for one in kept.service.sessions() if one.id == chat.session.id)
        assert outputs(found) == [OUTPUT]


@pytest.mark.more
@pytest.mark.parametrize("settle", [0.0, 0.2], ids=["at once", "once it was written down"])
async def test_a_server_that_is_killed_in_mid_stream_is_gone_on_with(tmp_path: Path, settle: float) -> None:
    async with served(tmp_path) as (server, url):
        async with connect(url) as client:
            wanted = await whole(client)

        async def streaming(city: str) -> AsyncIterator[str]:
            """Get the weather in a city."""
            for at in range(0, len(OUTPUT), 100):
                yield OUTPUT[at : at + 100]
                await anyio.sleep(0.05)
                if at in (100, 300):
                    await anyio.sleep(settle)
                    await server.kill()
                    network.retarget(await server.start())

        async with (
            proxy(url) as network,
            connect(network.url, patience=QUICK) as client,
            client.session(**BRIEF) as chat,
        ):
            assert told(await chat.run(ASKED, [tool(name="get_weather")(streaming)]).done()) == wanted


async def calling(one: Wire) -> str:
    """Have the model call; the call's id."""
    await one.send({"type": "session.update", "session": {"tools": [WEATHER], "temperature": 0}})
    await one.until("session.updated")
    done = await one.say(ASKED)
    (call,) = [item for item in done["output"] if item["type"] == "function_call"]
    call_id: str = call["call_id"]
    return call_id


async def test_half_an_output_comes_back_with_its_session(tmp_path: Path, pocket: EngineSettings) -> None:
    settings = GatewaySettings(port=0, store=tmp_path)
    append = {"type": "input_text_buffer.append"}
    async with serving(settings, pocket) as running, greeted(running) as (one, handle):
        call_id = await calling(one)
        await one.send({**append, "text": "", "call_id": call_id, "event_id": "1"})
        await one.send({**append, "text": '{"temperature": 9', "event_id": "2"})
        await one.send({"type": "session.update", "session": {"seed": 3}, "event_id": "3"})
        await one.until("session.updated")
        await running.service.close()
    async with serving(settings, pocket) as running, returning(running) as new:
        await new.send({"type": "session.resume", "handle": handle})
        assert (await new.receive())["last_client_event"] == "3"
        await new.send({**append, "text": "x", "role": "user"})
        assert (await new.receive())["error"]["param"] == "role", "the buffer knows the role of its text"
        await new.send({"type": "input_text_buffer.replace", "from": 16, "text": '7, "sky": "cloudy"}'})
        await new.send({"type": "input_text_buffer.commit", "event_id": "5"})
        item = (await new.until("conversation.item.done"))[-1]["item"]
        assert (item["type"], item["call_id"]) == ("function_call_output", call_id)
        assert item["output"] == '{"temperature": 7, "sky": "cloudy"}'
        await new.send({"type": "response.create"})
        done = (await new.until("response.done"))[-1]["response"]
        assert text_of(done) == "It is 7 degrees and cloudy in Oslo."


# --- what may not come ---


async def test_pieces_of_no_call_are_refused_and_the_session_goes_on(server: Serving) -> None:
    async with wire(server.url) as one:
        call_id = await calling(one)
        append = {"type": "input_text_buffer.append", "text": "x"}
        bad: list[tuple[dict[str, Any], str, str]] = [
            ({**append, "call_id": "call_none"}, "invalid_tool_call_id", "call_id"),
            ({**append, "call_id": call_id, "role": "user"}, "invalid_value", "call_id"),
            ({**append, "call_id": ""}, "invalid_value", "call_id"),
            ({**append, "call_id": 7}, "invalid_type", "call_id"),
        ]
        for event, code, param in bad:
            await one.send(event)
            error = (await one.receive())["error"]
            assert (error["code"], error["param"]) == (code, param), event
        await one.send({**append, "text": '{"temperature": 7, "sky": "cloudy"}', "call_id": call_id})
        await one.send({"type": "input_text_buffer.commit"})
        await one.until("conversation.item.done")
        await one.send({**append, "call_id": call_id})
        assert (await one.receive())["error"]["code"] == "tool_call_already_answered"
        await one.send({"type": "response.create"})
        assert "Oslo" in text_of((await one.until("response.done"))[-1]["response"])
