"""The unmodified `openai` package against a real server: two turns and a tool call, as users write them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.gateway.server import serving
from holdfast.gateway.settings import GatewaySettings
from holdfast.runtime.settings import EngineSettings


@pytest.mark.anyio
async def test_two_turns_with_a_tool_call(client_script: Callable[..., Any]) -> None:
    async with serving(GatewaySettings(port=0), EngineSettings(model="pocket")) as server:
        told = await asyncio.to_thread(client_script, "openai_conversation.py", server.url, "pocket")
    assert told["model"] == "pocket"
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
