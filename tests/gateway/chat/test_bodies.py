"""Bodies of Chat Completions that were bent are served or refused, and never a mistake of the server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.tests.gateway.bent_bodies import bent
from holdfast.tests.gateway.messages.messages_stage import stage
from holdfast.tests.gateway.scripted_service import spoken

TEXT = {"type": "text", "text": "Hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA, "strict": False}}
CHAT: dict[str, Any] = {
    "model": "scripted",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [TEXT], "name": "n"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
        {"role": "user", "content": "And?"},
    ],
    "tools": [TOOL],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "max_tokens": 3,
    "n": 2,
    "stop": ["five"],
    "seed": 7,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "logprobs": True,
    "top_logprobs": 2,
    "logit_bias": {"5": 1.0},
    "presence_penalty": 0.1,
    "stream": False,
    "stream_options": {"include_usage": True},
    "metadata": {"a": "b"},
}
COMPLETION: dict[str, Any] = {
    "model": "scripted",
    "prompt": [[5, 6], [7]],
    "max_tokens": 3,
    "n": 2,
    "echo": True,
    "stop": "x",
    "seed": 3,
    "temperature": 1.0,
    "stream": False,
}
WORDS = ["user", "assistant", "system", "tool", "function", "text", "json_object", "required", "none", "c1"]


async def check(http: Any, path: str, body: dict[str, Any]) -> None:
    response = await http.post(path, json=body)
    assert response.status_code in (200, 400, 404), (response.text, body)
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error" and error["code"] and error["message"]
    elif response.text.startswith("data:"):
        parts = [json.loads(part[6:]) for part in response.text.split("\n\n") if part.startswith("data: {")]
        refused = [part["error"]["code"] for part in parts if "error" in part]
        assert not {"internal_error", "engine_unavailable"} & set(refused), (refused, body)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(bent(CHAT, WORDS, ("functions", "guided_regex")), min_size=1, max_size=10),
    st.lists(bent(COMPLETION, WORDS, ("suffix", "logprobs")), min_size=1, max_size=10),
)
def test_bent_bodies_are_served_or_refused(chats: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    async def send_all() -> None:
        async with stage() as on:
            on.link.model = spoken
            for body in chats:
                await check(on.http, "/v1/chat/completions", body)
                await check(on.http, "/tokenize", {"messages": body.get("messages")})
            for body in others:
                await check(on.http, "/v1/completions", body)
            assert on.service.sessions() == [] or all(live.at_rest for live in on.service.sessions())

    asyncio.run(send_all())


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b"null", b'"x"', b"\xff", b'{"messages": "\\ud800"}', b"[" * 100_000, b"{}"]
)
def test_rubbish_is_refused(body: bytes) -> None:
    async def send() -> None:
        async with stage() as on:
            for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
                response = await on.http.post(path, content=body)
                assert response.status_code == 400, (path, response.text)
                assert response.json()["error"]["type"] == "invalid_request_error"

    asyncio.run(send())
