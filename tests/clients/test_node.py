"""The packages that JavaScript's users have, unmodified, against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.gateway.settings import GatewaySettings
from holdfast.tests.threaded import POCKET, serving

from .calls import Calls

pytestmark = pytest.mark.anyio

COUNTED = "1, 2, 3, 4, 5, 6, 7, 8, 9."
MARISOL = "Nice to meet you, Marisol."
ROME = "It is 7 degrees and cloudy in Rome."
OSLO = "It is 7 degrees and cloudy in Oslo."
NAME = "Your name is Marisol."


async def told_by(node_script: Callable[..., Any], script: str) -> Any:
    async with serving(GatewaySettings(port=0), POCKET) as server:
        told = await asyncio.to_thread(node_script, script, server.url, "pocket")
        assert not any(live.running for live in server.service.sessions())
    return told


@pytest.mark.client("openai (npm)")
async def test_the_openai_package(node_script: Callable[..., Any], calls: Calls) -> None:
    told = await told_by(node_script, "openai_calls.mjs")
    assert calls.total >= 15
    chat = told["chat"]
    assert chat["said"] == [MARISOL, NAME] and chat["cached"] > 0
    assert chat["streamed"] == chat["helper"] == COUNTED and chat["usage"] > 9
    assert chat["many"] == 2 and chat["logprobs"] == [2, 2, 2] and chat["parsed"]
    assert chat["afterACut"] == MARISOL
    assert told["tools"] == {
        "ran": ["Rome", "Rome"],
        "finish": "tool_calls",
        "answer": OSLO,
        "runner": ROME,
        "streamedRunner": ROME,
    }
    assert told["responses"] == {
        "said": [MARISOL, NAME],
        "streamed": COUNTED,
        "kinds": ["response.created", "response.completed"],
        "call": ["get_weather", {"city": "Rome"}],
        "answer": ROME,
        "same": True,
        "helper": "Nice to meet you, Ana.",
    }
    others = told["others"]
    assert others["models"] == ["pocket", "pocket"]
    assert others["text"] == f"Hello{others['streamed']}" and others["streamed"]
    assert others["errors"] == {
        "model": ["NotFoundError", 404, "model_not_found", None],
        "temperature": ["BadRequestError", 400, "invalid_value", "temperature"],
        "response": ["NotFoundError", 404, "response_not_found", None],
    }


@pytest.mark.client("ai (npm)")
async def test_the_ai_sdk(node_script: Callable[..., Any], calls: Calls) -> None:
    told = await told_by(node_script, "ai_sdk.mjs")
    assert calls.total >= 15
    for face in ("chat", "strict", "responses"):
        agent = told[face]
        assert agent["said"] == [MARISOL, ROME, OSLO, NAME], face
        assert agent["pieces"] > 1 and agent["ran"] == ["Rome", "Oslo"] and agent["steps"] == 2, face
        assert agent["finish"] == "stop" and agent["typed"] == [True, True], face
        usage = agent["usage"]
        assert 0 < usage["cachedInputTokens"] < usage["inputTokens"], face
        assert usage["outputTokens"] > 0 and agent["streamUsage"] > 0, face
    assert told["others"] == {
        "completed": 4,
        "error": [True, 404, False],
        "dog": "Your dog is called Tamu.",
    }
