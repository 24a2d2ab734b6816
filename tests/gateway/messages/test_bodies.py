"""Bodies that were bent in one or a few places are served or refused, and never a mistake of the server."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.tests.gateway.scripted_service import spoken

from ..bent_bodies import bent
from .messages_stage import WEATHER, stage

TEXT = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
WHOLE: dict[str, Any] = {
    "model": "scripted",
    "max_tokens": 5,
    "system": [TEXT],
    "messages": [
        {"role": "user", "content": "What is the weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [TEXT], "is_error": False},
                TEXT,
            ],
        },
    ],
    "tools": [{**WEATHER, "type": "custom", "description": "d", "strict": False}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "stop_sequences": ["five"],
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
    "output_config": {"effort": "low"},
    "metadata": {"user_id": "u"},
    "stream": False,
}

WORDS = [
    "user",
    "assistant",
    "system",
    "text",
    "tool_use",
    "tool_result",
    "image",
    "any",
    "tool",
    "none",
    "c1",
]


@settings(deadline=None, max_examples=60)
@given(st.lists(bent(WHOLE, WORDS, ("thread", "input")), min_size=1, max_size=20))
def test_bent_bodies_are_served_or_refused(bodies: list[dict[str, Any]]) -> None:
    async def send_all() -> None:
        async with stage() as on:
            on.link.model = spoken
            for body in bodies:
                for path in ("/v1/messages", "/v1/messages/count_tokens"):
                    response = await on.http.post(path, json=body)
                    assert response.status_code in (200, 400, 404), (response.text, body)
                    if response.status_code == 200 and not response.text.startswith("event:"):
                        continue
                    if response.status_code == 200:
                        assert "event: error" not in response.text, (response.text, body)
                    else:
                        told = response.json()
                        assert told["type"] == "error" and told["request_id"]

    asyncio.run(send_all())
