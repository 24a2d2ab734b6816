"""The unmodified `openai` and `openai-agents` packages against a real server: Responses and Conversations."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.gateway.settings import GatewaySettings
from holdfast.tests.threaded import POCKET, serving

from .calls import Calls
from .conftest import needs

pytestmark = pytest.mark.anyio


@pytest.fixture
def agents() -> None:
    """Skipped if the openai-agents package is not installed."""
    needs("agents")


@pytest.mark.client("openai")
async def test_the_openai_package_makes_its_calls(
    client_script: Callable[..., Any], tmp_path: Path, calls: Calls
) -> None:
    settings = GatewaySettings(port=0, store=tmp_path / "store")
    async with serving(settings, POCKET) as server:
        told = await asyncio.to_thread(client_script, "openai_responses.py", server.url, "pocket")
    assert calls.total >= 40
    plain = told["plain"]
    assert "Marisol" in plain["said"][1]
    assert plain["kinds"][:2] == ["response.created", "response.in_progress"]
    assert plain["kinds"][-1] == "response.completed"
    assert plain["numbers"] == list(range(len(plain["numbers"])))
    assert plain["same"] and plain["rest"] == plain["numbers"][4:]
    assert plain["items"] == ["My name is Marisol.", plain["said"][0], "What is my name?"]
    assert plain["counted"][0] == plain["counted"][1]
    assert plain["cached"][0] == 0 < plain["cached"][1]
    assert plain["kv"][1]["prefilled"] == plain["kv"][1]["new"]
    assert plain["gone"] == "response_not_found"
    tools = told["tools"]
    assert (
        tools["call"] == ["get_weather", {"city": "Rome"}]
        and tools["unknown"] == "previous_response_not_found"
    )
    assert tools["allowed"] == ["get_time"]
    assert all("21" in said and "sunny" in said for said in tools["said"])
    assert all(kv["prefilled"] <= kv["new"] for kv in tools["kv"])
    assert "response.function_call_arguments.done" in tools["streamed"]
    assert told["background"] == {
        "status": ["in_progress", "completed", "completed"],
        "cancelled": "cancelled",
    }
    typed = told["typed"]
    assert typed["trip"] == ["Trip", True]
    assert typed["helper"][0] == "response.created" and typed["helper"][1] == "response.completed"
    assert typed["object"][0] == "completed" and isinstance(json.loads(typed["object"][1]), dict)
    talk = told["conversations"]
    assert "Marisol" in talk["said"][1] and talk["items"] == ["message"] * 4 and talk["same"]
    assert talk["cached"]["prefilled"] <= talk["cached"]["new"]
    assert talk["metadata"] == [{"topic": "names"}, {"topic": "dogs"}, {"topic": "dogs"}]
    assert talk["deleted"] == [True, "conversation.deleted"]
    assert told["compaction"] == {"kinds": ["compaction"], "status": "completed"}
    socket = told["socket"]
    assert socket["warmed"] == ["Nice to meet you, Marisol.", 0], "its prompt was computed before"
    assert socket["said"][0] == "" and "Marisol" in socket["said"][2]
    assert socket["kv"]["prefilled"] <= socket["kv"]["new"]
    assert socket["lanes"] == ["left", "right"]
    assert socket["unknown"] == [400, "previous_response_not_found"]
    assert socket["steered"] == ["incomplete", "steered"] and socket["successor"] == [True, True]


@pytest.mark.client("openai-agents")
async def test_agents_with_a_tool_run_over_http_and_over_the_socket(
    client_script: Callable[..., Any], agents: None
) -> None:
    async with serving(GatewaySettings(port=0), POCKET) as server:
        told = await asyncio.to_thread(client_script, "openai_agents_responses.py", server.url, "pocket")
    for name, one in told["runs"].items():
        first, second, third = one["said"]
        assert "Marisol" in first and "Marisol" in third, name
        assert "21" in second and "sunny" in second, name
        assert one["ran"] == ["Rome"], name
        assert all(cached > 0 for cached in one["cached"][1:]), name
    for name, one in told["handoffs"].items():
        assert one["last"] == "Weather" and one["said"], name
        assert one["agents"] in ([], ["Desk", "Weather"], ["Weather"]), name
        if "chained" in name:  # the model reads the handoff as the answer of a tool
            assert one["handed over"], name
        else:
            assert one["ran"] == ["Rome"] and "21" in one["said"] and "sunny" in one["said"], name
