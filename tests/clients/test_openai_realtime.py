"""The unmodified `openai` and `openai-agents` packages against a real server, as users write their clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.gateway.settings import GatewaySettings
from holdfast.tests.threaded import POCKET, serving

from .calls import Calls
from .conftest import needs

ANA = "Nice to meet you, Ana."


@pytest.fixture
def agents() -> None:
    """Skipped where the openai-agents package is not installed."""
    needs("agents")


@pytest.mark.anyio
@pytest.mark.client("openai")
async def test_two_turns_with_a_tool_call_and_the_other_verbs(
    client_script: Callable[..., Any], calls: Calls
) -> None:
    async with serving(GatewaySettings(port=0), POCKET) as server:
        spoken = await asyncio.to_thread(client_script, "openai_realtime.py", server.url, "pocket")
    assert calls.total >= 30
    assert spoken["blocking"] == ANA
    check_verbs(spoken["verbs"])
    told = spoken["talk"]
    assert told["model"] == "pocket"
    limits = {"post_instructions": 5000}
    ratio = {"type": "retention_ratio", "retention_ratio": 0.8, "token_limits": limits}
    assert told["truncation"] == ["auto", ratio]
    first, second = told["said"]
    assert "Rex" in first
    assert "21" in second
    assert "sunny" in second
    (call,) = told["calls"]
    assert call["name"] == "get_weather"
    assert json.loads(call["arguments"]) == {"city": "Rome"}
    events = told["events"]
    assert events[:2] == ["session.created", "conversation.created"]
    assert events.count("response.created") == events.count("response.done") == 3
    assert [usage["input_tokens"] > 0 for usage in told["usage"]] == [True] * 3


def check_verbs(told: dict[str, Any]) -> None:
    assert told["added"] == "name" and told["first"] is None
    assert told["retrieved"] == "The user's dog is called Tamu." and told["deleted"] == "dog"
    assert told["said"] == ["Nice to meet you, Marisol.", "Your name is Marisol.", "Your name is Marisol."]
    assert told["aside"] == [ANA, None, {"topic": "names"}]
    assert told["short"] == ["incomplete", "max_output_tokens", 2]
    assert told["forced"] == ["get_weather"] and told["instructions"] == "Be brief."
    assert told["cut"] == [True, "cancelled", "client_cancelled"]
    assert told["refused"] == {
        "cancel": ["response_cancel_not_active", None, "a"],
        "retrieve": ["item_not_found", "item_id", "b"],
        "unknown": ["item_not_found", "previous_item_id", "c"],
        "sound": ["unsupported_field", "type", "d"],
        "picture": ["unsupported_field", "item.content[0].type", "e"],
    }


@pytest.mark.anyio
@pytest.mark.client("openai-agents")
@pytest.mark.parametrize("modality", ["text", "audio"])
async def test_a_realtime_agent_with_a_tool_runs_as_it_comes(
    client_script: Callable[..., Any], agents: None, modality: str
) -> None:
    """Its `session.update` names audio, a voice, turn detection and tracing beside its tools."""
    async with serving(GatewaySettings(port=0), POCKET) as server:
        url = server.url.replace("http", "ws", 1) + "/v1/realtime"
        told = await asyncio.to_thread(client_script, "openai_agents_realtime.py", url, "pocket", modality)
    assert told["errors"] == []
    assert told["ran"] == ["Rome"]
    assert "21" in told["said"] and "sunny" in told["said"]
    assert [tool["name"] for tool in told["session"]["tools"]] == ["get_weather"]
    assert told["session"]["output_modalities"] == ["text"] and "audio" not in told["session"]
    named = {"audio", "tracing"} | ({"output_modalities"} if modality == "audio" else set())
    assert set(told["unserved"]) == named


@pytest.mark.anyio
@pytest.mark.client("openai-agents")
async def test_a_realtime_agent_hands_over_to_another_one(
    client_script: Callable[..., Any], agents: None
) -> None:
    """The session gets the other agent's tools, and the conversation goes on."""
    async with serving(GatewaySettings(port=0), POCKET) as server:
        url = server.url.replace("http", "ws", 1) + "/v1/realtime"
        told = await asyncio.to_thread(client_script, "openai_agents_realtime.py", url, "pocket", "handoff")
    assert told["errors"] == [] and told["handoffs"] == [["Desk", "Pocket"]]
    assert told["ran"] == ["Rome"] and "21" in told["said"] and "sunny" in told["said"]
    (tool,) = told["session"]["tools"]
    assert tool["parameters"]["required"] == ["city"], "the agent's own tool, and not the handoff"
