"""``kill -9`` of the engine's process: a typed failure, a server that says so, and sessions that go on."""

from __future__ import annotations

import json

import pytest
from wires import get, text_of, wire

from holdfast.gateway.serve import Serving

pytestmark = pytest.mark.anyio


async def test_sessions_outlive_their_engine(server: Serving) -> None:
    engine = server.engine
    async with wire(server.url) as one, wire(server.url) as idle:
        await one.say("My name is Marisol.")
        await idle.say("My locker code is 4821.")
        first = engine.pid

        await one.send({"type": "response.create"})
        await one.until("response.output_text.delta")
        engine.kill()
        failed = (await one.until("response.done"))[-1]["response"]
        assert failed["status"] == "failed"
        assert failed["status_details"]["error"]["code"] == "engine_unavailable"
        status, body = await get(server.url, "/ready")
        assert status == 503 and json.loads(body)["status"] != "ready"
        assert (await get(server.url, "/health"))[0] == 200

        await engine.link.wait_ready()
        assert engine.pid != first
        assert (await get(server.url, "/ready"))[0] == 200
        again = await one.say("What is my name?")
        assert "Marisol" in text_of(again)
        assert again["kv"]["miss_reason"] == "engine_restarted" and again["kv"]["resident"] == 0
        other = await idle.say("What is my locker code?")
        assert "4821" in text_of(other)
        after = await idle.say("My name is Pablo.")
        assert after["kv"]["prefilled"] == after["kv"]["new"]


async def test_a_turn_asked_for_while_there_is_no_engine_fails_and_the_next_works(server: Serving) -> None:
    async with wire(server.url) as connection:
        await connection.say("My name is Marisol.")
        server.engine.kill()
        lost = await connection.say("My locker code is 4821.")
        assert lost["status"] == "failed" and lost["output"] == []
        await server.engine.link.wait_ready()
        assert "Marisol" in text_of(await connection.say("What is my name?"))
        code = await connection.say("What is my locker code?")
        assert "4821" in text_of(code), "what was said during the outage was kept"
