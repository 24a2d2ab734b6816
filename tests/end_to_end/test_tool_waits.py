"""While a tool runs no step is computed for its session, its KV is back before it, and both times are kept."""

from __future__ import annotations

import anyio
import pytest

from holdfast.gateway.server import Serving
from holdfast.sdk import RunEvent, StepFinished, WaitFinished, connect, tool
from holdfast.sdk.frames.client import SessionSettle

from .wires import get

pytestmark = pytest.mark.anyio

EXPECTED = 4.0
"""Seconds. Of less than one no hint is given, and KV comes up half a second before."""


async def test_kv_is_brought_up_before_a_tool_is_expected_back(server: Serving) -> None:
    link = server.engine.link
    replied = anyio.Event()
    seen: dict[str, float] = {}

    @tool(expected=EXPECTED, timeout=60.0)
    async def get_weather(city: str) -> str:
        """Get the weather in a city."""
        await replied.wait()
        await chat.send(SessionSettle(tier="host"))
        resting = await link.statistics()
        seen["running"] = resting["running"]
        while not (now := await link.statistics())["restored"] > resting["restored"]:
            continue
        seen.update(
            {name: now[name] - resting[name] for name in ("restored", "steps", "computed", "sampled")}
        )
        return '{"temperature": 7, "sky": "cloudy"}'

    def trace(event: RunEvent) -> None:
        if isinstance(event, StepFinished):
            replied.set()

    async with connect(server.url) as client, client.session(temperature=0) as chat:
        await chat.say("My name is Marisol.").text()
        run = chat.run("What is the weather in Oslo?", [get_weather], trace=[trace])
        events = [event async for event in run]
        kv = chat.last.kv
    assert chat.last.text == "It is 7 degrees and cloudy in Oslo."
    assert seen["running"] == 0
    assert (seen["computed"], seen["sampled"]) == (0, 0), "its steps carry KV up and nothing else"
    assert seen["restored"] > 16
    assert kv is not None and kv.prefilled == kv.new and kv.recomputed == 0

    (wait,) = [event for event in events if isinstance(event, WaitFinished)]
    assert wait.expected is not None and 0 < wait.expected <= EXPECTED
    kept = (await server.service.snapshot()).gateway
    assert abs(kept["waits_expected_seconds"] - wait.expected) < 1e-6
    assert 0 < kept["waits_real_seconds"] <= wait.seconds + 60
    metrics = (await get(server.url, "/metrics"))[1]
    assert "holdfast_waits_ended 1.0" in metrics and "holdfast_waits_real_seconds" in metrics


async def test_a_session_that_waits_for_a_tool_gets_a_return_hint_by_itself(server: Serving) -> None:
    link = server.engine.link
    replied = anyio.Event()

    @tool
    async def get_weather(city: str) -> str:
        """Get the weather in a city."""
        await replied.wait()
        while not (await link.statistics())["idle_expected"]:
            continue
        return '{"temperature": 7, "sky": "cloudy"}'

    def trace(event: RunEvent) -> None:
        if isinstance(event, StepFinished):
            replied.set()

    async with connect(server.url) as client, client.session(temperature=0) as chat:
        assert await chat.run("What is the weather in Oslo?", [get_weather], trace=[trace]).text()
        assert not (await link.statistics())["idle_expected"], "it is back"
