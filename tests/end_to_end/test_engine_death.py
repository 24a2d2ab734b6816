"""The engine process dies or stops in mid-reply: sockets stay open, the reply goes on, all clients are told."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
from collections.abc import AsyncIterator

import pytest

from holdfast.gateway.server import Serving, serving
from holdfast.gateway.settings import GatewaySettings
from holdfast.runtime.link import process
from holdfast.runtime.settings import EngineSettings
from holdfast.sdk import connect

from .wires import LONG, Json, Wire, get, text_of, wire

pytestmark = pytest.mark.anyio

STORY = "Tell me the story of the fox."


@pytest.fixture(scope="module")
async def server(pocket: EngineSettings) -> AsyncIterator[Serving]:
    """With its engine in a child process."""
    async with serving(GatewaySettings(port=0), pocket) as running:
        yield running


async def begin(connection: Wire, text: str) -> None:
    """Ask for a long reply and read its first words."""
    await connection.ask(text, **LONG)
    await connection.until("response.output_text.delta")


async def not_ready(url: str) -> Json:
    """What ``/ready`` says once it says that no turn could run."""
    while True:
        status, body = await get(url, "/ready")
        if status == 503:
            told: Json = json.loads(body)
            return told
        await asyncio.sleep(0.05)


async def test_a_reply_outlives_its_engine_and_every_session_is_told_once(server: Serving) -> None:
    engine = server.engine
    async with wire(server.url) as calm:
        undisturbed = await calm.say(STORY, **LONG)
    async with wire(server.url) as one, wire(server.url) as idle:
        await idle.say("My locker code is 4821.")
        first = engine.pid
        await begin(one, STORY)
        engine.kill()
        told = await not_ready(server.url)
        assert told["status"] == "not ready"
        assert (await get(server.url, "/health"))[0] == 200, "restarting the server would mend nothing"
        events = await one.until("response.done")
        done = events[-1]["response"]
        assert done["status"] == "completed" and text_of(done) == text_of(undisturbed)
        deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
        assert text_of(undisturbed).endswith("".join(deltas)), "the same stream goes on"
        assert done["usage"]["output_tokens"] == undisturbed["usage"]["output_tokens"]
        assert done["usage"]["input_tokens"] == undisturbed["usage"]["input_tokens"]
        kv = done["kv"]
        assert kv["recomputed"] < done["usage"]["input_tokens"], "the host tier outlived the engine"
        assert kv.get("miss_reason") == ("engine_restarted" if kv["recomputed"] else None)
        assert kv["prefilled"] + kv["resident"] == done["usage"]["input_tokens"]
        (recovered,) = [event for event in events if event["type"] == "session.recovered"]
        assert recovered["lost_ms"] > 0
        assert engine.pid != first and (await get(server.url, "/ready"))[0] == 200

        (waiting,) = await idle.until("session.recovered")
        assert waiting["lost_ms"] == recovered["lost_ms"]
        assert "4821" in text_of(await idle.say("What is my locker code?"))
        again = await one.say("My name is Pablo.")
        assert again["kv"]["prefilled"] == again["kv"]["new"]


@pytest.mark.more
async def test_what_is_asked_of_kv_waits_for_the_next_engine(server: Serving) -> None:
    async with connect(server.url) as client, client.session() as chat:
        await chat.say("My name is Marisol.").text()
        for ask in (lambda: chat.lease(ttl=60.0), chat.stage, lambda: chat.settle("host")):
            server.engine.kill()
            await not_ready(server.url)
            await ask()
        assert "Marisol" in await chat.say("What is my name?").text()


@pytest.mark.more
async def test_a_reply_goes_on_by_its_grammar_with_the_next_engine(server: Serving) -> None:
    bound = {"temperature": 1.0, "seed": 6, "grammar": {"type": "regex", "pattern": "([a-z]{3,5}, ){14}end"}}
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": STORY}]}

    async def begun(connection: Wire) -> None:
        await connection.send({"type": "conversation.item.create", "item": item})
        await connection.send({"type": "response.create", "response": bound})
        await connection.until("response.output_text.delta")

    async with wire(server.url) as calm, wire(server.url) as struck:
        await begun(calm)
        undisturbed = (await calm.until("response.done"))[-1]["response"]
        assert re.fullmatch("([a-z]{3,5}, ){14}end", text_of(undisturbed)) and len(text_of(undisturbed)) > 60
        await begun(struck)
        server.engine.kill()
        done = (await struck.until("response.done"))[-1]["response"]
        assert done["status"] == "completed" and text_of(done) == text_of(undisturbed)


@pytest.mark.more
async def test_a_turn_asked_for_while_there_is_no_engine_waits_for_the_next(server: Serving) -> None:
    async with wire(server.url) as connection:
        await connection.say("My name is Marisol.")
        server.engine.kill()
        held = await connection.say("What is my name?")
        assert held["status"] == "completed" and "Marisol" in text_of(held)
        assert held["kv"]["resident"] == 0, "what the host tier has not was computed again"


@pytest.mark.more
async def test_a_stopped_engine_is_not_ready_and_replaced_and_the_reply_goes_on(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with wire(server.url) as connection:
        undisturbed = await connection.say(STORY, **LONG)
    async with wire(server.url) as connection:
        await begin(connection, STORY)
        assert server.engine.pid is not None
        with monkeypatch.context() as patch:
            patch.setattr(process, "PATIENCE", math.inf)  # until we have looked
            os.kill(server.engine.pid, signal.SIGSTOP)
            told = await not_ready(server.url)
        assert told["status"] == "hung" and told["phase"] in ("stepping", "idle")
        done = (await connection.until("response.done"))[-1]["response"]
        assert text_of(done) == text_of(undisturbed)
    assert server.engine.link.deaths[-1].outside
