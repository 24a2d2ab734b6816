"""Agents with a tool, of five libraries in their own environments, unmodified, against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from holdfast.gateway.server import Serving
from holdfast.gateway.settings import GatewaySettings
from holdfast.tests.threaded import POCKET, serving

from .calls import Calls

pytestmark = pytest.mark.anyio

MARISOL = "Nice to meet you, Marisol."
ROME = "It is 7 degrees and cloudy in Rome."
OSLO = "It is 7 degrees and cloudy in Oslo."
NAME = "Your name is Marisol."
ANA = "Nice to meet you, Ana."


@pytest.fixture
async def server(calls: Calls) -> AsyncIterator[Serving]:
    async with serving(GatewaySettings(port=0), POCKET) as server:
        yield server
        assert not any(live.running for live in server.service.sessions())


@pytest.mark.client("openai-agents")
async def test_openai_agents_with_its_chat_model(client_script: Callable[..., Any], server: Serving) -> None:
    told = await asyncio.to_thread(client_script, "openai_agents_chat.py", server.url, "pocket")
    tool = told["tool"]
    assert tool["said"] == [MARISOL, ROME, OSLO, NAME] and tool["ran"] == ["Rome", "Oslo"]
    assert "".join(tool["pieces"]) == OSLO and len(tool["pieces"]) > 1
    assert len(tool["cached"]) == 6, "a request for each answer and for each call"
    assert all(0 < cached < read for cached, read in zip(tool["cached"][1:], tool["input"][1:], strict=True))
    assert told["handoff"]["last"] == "Weather" and told["handoff"]["said"] == ROME
    assert told["handoff"]["ran"] == ["Rome"]
    assert told["memory"] == {"said": NAME, "trip": True}


@pytest.mark.client("pydantic-ai-slim")
@pytest.mark.parametrize("face", ["chat", "responses"])
async def test_pydantic_ai(script_in: Callable[..., Any], server: Serving, face: str) -> None:
    told = await asyncio.to_thread(script_in, "pydantic-ai", "pydantic_ai_run.py", server.url, "pocket", face)
    assert told["said"] == [MARISOL, ROME, OSLO, NAME] and told["pieces"] > 1
    assert told["ran"] == [["Rome"], ["Rome", "Oslo"]]
    assert 0 < told["cached"] < told["input"]
    assert told["typed"] == {"native": "Trip", "tool": "Trip"}


@pytest.mark.client("langchain-openai")
@pytest.mark.parametrize("face", ["chat", "responses"])
async def test_langchain(script_in: Callable[..., Any], server: Serving, face: str) -> None:
    told = await asyncio.to_thread(script_in, "langchain", "langchain_run.py", server.url, "pocket", face)
    agent, alone = told["agent"], told["alone"]
    assert agent["said"] == [MARISOL, ROME, NAME] and agent["pieces"] > 1 and agent["ran"] == ["Rome"]
    assert 0 < agent["usage"]["input_token_details"]["cache_read"] < agent["usage"]["input_tokens"]
    assert alone["said"] == ["Your dog is called Tamu."] * 3 and alone["many"][0] == ANA
    assert alone["bound"] == "get_weather"
    assert alone["typed"] == {"json_schema": "Trip", "function_calling": "Trip"}


@pytest.mark.client("litellm")
async def test_litellm(script_in: Callable[..., Any], server: Serving) -> None:
    told = await asyncio.to_thread(script_in, "litellm", "litellm_run.py", server.url, "pocket")
    chat, others = told["chat"], told["others"]
    assert chat["said"] == [MARISOL, ROME, NAME] and chat["ran"] == ["Rome"]
    assert chat["counted"] == "1, 2, 3, 4, 5, 6, 7, 8, 9." and chat["usage"] > 9
    assert chat["called"] == ["get_weather", {"city": "Oslo"}] and chat["typed"]["city"] in ("Oslo", "Rome")
    assert chat["logprobs"] == 3 and chat["many"] == 2
    assert others["at once"][0] == others["responses"] == others["messages"] == ANA and others["text"]
    assert others["messages call"] == ["get_weather", {"city": "Rome"}]
    assert told["errors"] == {
        "model": "NotFoundError",
        "field": "BadRequestError",
        "long": "ContextWindowExceededError",
    }


@pytest.mark.client("llama-index-llms-openai-like")
async def test_llama_index(script_in: Callable[..., Any], server: Serving) -> None:
    told = await asyncio.to_thread(script_in, "llama-index", "llama_index_run.py", server.url, "pocket")
    agent = told["agent"]
    assert agent["said"] == [MARISOL, ROME, NAME] and agent["pieces"] > 3 and agent["ran"] == ["Rome"]
    assert told["alone"] == {"said": [ANA] * 5, "typed": "Trip"}
