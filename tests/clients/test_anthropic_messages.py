"""The unmodified `anthropic` package against a real server, as users write their clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.gateway.settings import GatewaySettings
from holdfast.tests.threaded import POCKET, serving

from .calls import Calls
from .conftest import needs

REX = "Got it, your dog is called Rex."
INVALID = ["BadRequestError", 400, "invalid_request_error"]


@pytest.fixture
def messages() -> None:
    """Skipped where the anthropic package is not installed."""
    needs("anthropic")


@pytest.mark.anyio
@pytest.mark.client("anthropic")
async def test_the_package_as_it_comes(
    client_script: Callable[..., Any], messages: None, calls: Calls
) -> None:
    settings = GatewaySettings(port=0, api_key="KEY")
    async with serving(settings, POCKET) as server:
        told = await asyncio.to_thread(client_script, "anthropic_messages.py", server.url, "pocket", "KEY")
    assert calls.total >= 15
    assert told["models"]["listed"] == ["pocket"] and told["models"]["one"] == "pocket"
    assert told["create"] == {"text": REX, "reason": "end_turn", "role": "assistant"}
    assert told["count"]["counted"] == told["count"]["read"] > 0
    assert told["system"]["same"] and told["system"]["text"]
    before = REX.partition("Rex")[0]
    assert told["stops"] == {
        "reason": "stop_sequence",
        "sequence": "Rex",
        "text": before,
        "short": ["max_tokens", 2],
    }
    raw = told["raw_stream"]
    assert raw[:2] == ["message_start", "content_block_start"]
    assert raw[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(raw[2:-3]) == {"content_block_delta"}
    assert told["text_stream"] == {"text": REX, "final": REX}
    assert told["event_stream"]["call"] == ["get_weather", {"city": "Rome"}]
    assert told["event_stream"]["reason"] == "tool_use" and "input_json" in told["event_stream"]["kinds"]
    assert told["tool_choice"] == {
        "named": ["tool_use", ["tool_use"]],
        "any": ["tool_use", ["tool_use"]],
        "none": ["text"],
    }
    assert told["tool_runner"]["ran"] == ["Rome", "Rome"]
    assert all("21" in said and "sunny" in said for said in told["tool_runner"]["said"])
    assert told["continued"] == " is called Rex."
    assert told["parse"]["valid"]
    assert told["thinking"] == REX
    assert told["headers"] is True
    assert told["async"] == {"said": [REX, REX.replace("Rex", "Bo")], "streamed": REX, "listed": ["pocket"]}
    assert told["errors"] == {
        "picture": [*INVALID, "unsupported_field", True],
        "server tool": [*INVALID, "unsupported_field", True],
        "no tokens": [*INVALID, "invalid_value", True],
        "no such model": ["NotFoundError", 404, "not_found_error", "model_not_found", True],
        "model": ["NotFoundError", 404, "not_found_error", "model_not_found", True],
        "batches": ["NotFoundError", 404, "not_found_error", "not_found", True],
        "key": ["AuthenticationError", 401, "authentication_error", "invalid_api_key", True],
        "long": [*INVALID, "context_length_exceeded", True],
        "stream": [*INVALID, "context_length_exceeded", True],
    }
    loop = told["tool_loop"]
    assert loop["calls"] == [["get_weather", {"city": "Rome"}]] and "Rex" in loop["said"]
    first, *later = loop["kv"]
    assert len(later) == 4
    for turn in later:
        assert turn["prefilled"] == turn["new"] and turn["recomputed"] == 0, loop["kv"]
        assert turn["resident"] >= first["new"], "the whole conversation before it is there"
