"""A client that leaves a stream ends its reply, whenever it leaves."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from holdfast.gateway.app import build_app
from holdfast.tests.gateway.messages.messages_stage import Stage, stage
from holdfast.tests.gateway.scripted_service import WORDS

pytestmark = pytest.mark.anyio

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello!"}], "stream": True},
    "/v1/completions": {"prompt": [5, 6], "stream": True, "max_tokens": 1000},
    "/v1/messages": {
        "model": "scripted",
        "max_tokens": 1000,
        "messages": [{"role": "user", "content": "Hello!"}],
        "stream": True,
    },
}


async def leave(on: Stage, path: str, after: int) -> None:
    """Post a request, and leave when ``after`` messages were sent."""
    body, sent = json.dumps(BODIES[path]).encode(), 0
    heard = iter([{"type": "http.request", "body": body}])
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1")],
        "asgi": {"spec_version": "2.4"},
    }

    async def receive() -> Any:
        if (message := next(heard, None)) is not None:
            return message
        return await asyncio.Event().wait()

    async def send(message: Any) -> None:
        nonlocal sent
        if sent == after:
            raise OSError("the client has left")
        sent += 1

    with pytest.raises(Exception):  # noqa: B017 - what the server framework makes of it
        await build_app(on.service)(scope, receive, send)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("after", [0, 1, 2, 3])
async def test_a_client_that_leaves_ends_its_reply(path: str, after: int) -> None:
    async with stage() as on:
        on.link.model = lambda tokens: WORDS[len(tokens) % len(WORDS)]  # it never ends by itself
        await leave(on, path, after)
        async with asyncio.timeout(5):
            for live in on.service.sessions():
                await live.idle()
        answer = await on.http.post(path, json={**BODIES[path], "max_tokens": 3, "stream": False})
        assert answer.status_code == 200, "the next request is served"
