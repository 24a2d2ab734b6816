"""The unmodified `openai` package against Chat Completions and Completions, with the pocket model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.gateway.settings import GatewaySettings
from holdfast.tests.threaded import POCKET, serving

from .calls import Calls

INVALID = ["BadRequestError", 400]


@pytest.mark.anyio
@pytest.mark.client("openai")
async def test_each_call_of_the_openai_package(client_script: Callable[..., Any], calls: Calls) -> None:
    async with serving(GatewaySettings(port=0), POCKET) as server:
        told = await asyncio.to_thread(client_script, "openai_chat.py", server.url, "pocket")
        assert not any(live.running for live in server.service.sessions())
    assert calls.total >= 60
    chat = told["chat"]
    assert chat["plain"] == chat["ignored"] == "Nice to meet you, Marisol."
    assert chat["second"] == "Your name is Marisol."
    assert chat["kv"]["prefilled"] == chat["kv"]["new"] < chat["cached"]
    assert chat["parts"] == told["async"]["at once"][1] and chat["parts"].startswith("Hello")
    assert chat["system"] == chat["developer"] == "Your dog is called Tamu."
    counted = "1, 2, 3, 4, 5, 6, 7, 8, 9."
    assert chat["streamed"] == chat["helper text"] == counted == chat["n streamed"]["0"]
    assert chat["finish"] == "stop" and chat["no choices"] == [] and chat["stream usage"] > 9
    assert chat["max_tokens"] == "length" and chat["max_completion_tokens"] == 3
    assert chat["ignore_eos"] == [40, "length"] and told["completions"]["ignore_eos"] == 40
    assert chat["stop"] == "1, 2, 3, 4, " and chat["stops"] == "1, 2, 3, "
    assert chat["n"] == chat["seeded"] and len(chat["n"]) == 3
    assert "".join(token for token, *_ in chat["logprobs"]) == chat["logprobs text"]
    assert all(score == [True, 2] for _, *score in chat["logprobs"]) and chat["logprobs alone"] == [0, 0]
    tools = told["tools"]
    assert tools["call"] == ["get_weather", {"city": "Oslo"}] and tools["finish"] == "tool_calls"
    assert tools["answer"] == "It is 7 degrees and cloudy in Oslo." and tools["new"] < 40
    assert tools["streamed call"] == [["get_weather"], {"0": {"city": "Oslo"}}]
    assert tools["allowed"] == ["get_time"]
    assert tools["forced"] == "get_weather" and tools["required"] and tools["none"] and tools["one call"] == 1
    assert told["formats"] == {
        "json_schema": ["city"],
        "parse": "City",
        "json_object": True,
        "choice": True,
        "regex": True,
    }
    completions = told["completions"]
    assert completions["echo"] == "Hello" and completions["indexes"] == [0, 1, 2, 3]
    assert completions["tokens"] == 3 and completions["lists"] == 2 and completions["streamed"]
    first, tokens, offset, top = completions["echoed"]
    assert first is None and top is None and tokens >= 3 and offset == 0
    assert completions["logprobs"] == [3, 3, 3] and completions["stopped"] == "stop"
    assert told["models"] == ["pocket", "pocket"]
    assert told["async"]["after a cut"] == "Nice to meet you, Marisol."
    check_refusals(told["errors"])


def check_refusals(errors: dict[str, Any]) -> None:
    """Each has a code, and names its field."""
    assert errors == {
        "model": ["NotFoundError", 404, "model_not_found", None],
        "image": [*INVALID, "unsupported_field", "messages[0].content[0].type"],
        "ignore_eos": [*INVALID, "invalid_value", "ignore_eos"],
        "unknown": [*INVALID, "unknown_parameter", "foo"],
        "temperature": [*INVALID, "invalid_value", "temperature"],
        "n": [*INVALID, "invalid_value", "n"],
        "no messages": [*INVALID, "invalid_value", "messages"],
        "lone output": [*INVALID, "invalid_value", "messages[1].tool_call_id"],
        "top_logprobs": [*INVALID, "invalid_value", "top_logprobs"],
        "long": [*INVALID, "context_length_exceeded", None],
        "schema": [*INVALID, "invalid_grammar", "response_format.json_schema.schema"],
        "vocabulary": [*INVALID, "invalid_value", "prompt"],
        "retrieve": ["NotFoundError", 404, "model_not_found", None],
    }
