"""What one body can make the server do is bounded by the model's context, before it is read; what takes long is
done beside the event loop, so that others are answered meanwhile."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from holdfast.gateway.app import build_app
from holdfast.tests.gateway.messages.messages_stage import Stage, stage
from holdfast.tests.gateway.test_bad_input import BODIES

pytestmark = pytest.mark.anyio
WORDS = "one two three and more of them " * 6_000
"""Text of 186,000 characters: more than any context here holds, and less than a body may have."""
USER = {"role": "user", "content": WORDS}


async def told(on: Stage, path: str, length: int) -> tuple[int, dict[str, Any]]:
    """The answer to a request of which the head tells this length, and of which nothing may be read."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        raise AssertionError("the body was read")

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"127.0.0.1"), (b"content-length", b"%d" % length)]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    await build_app(on.service)({**scope, "client": ("127.0.0.1", 1)}, receive, send)
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent[1:]))


@pytest.mark.parametrize("path", BODIES)
async def test_a_body_that_is_too_large_is_refused_before_it_is_read(path: str) -> None:
    async with stage() as on:
        context = on.service.context or 0
        small = path in ("/tokenize", "/detokenize")
        most = (1 << 16 if small else 1 << 20) + (16 if path == "/detokenize" else 64) * context
        for size in (most + 1, on.service.settings.limits.body_bytes):
            status, body = await told(on, path, size)
            assert status == 400, body
            error = body["error"]
            assert "is too long: " in error["message"] and f"{context}" in error["message"]
            assert error.get("code", "context_length_exceeded") == "context_length_exceeded"
        status, _ = await told(on, path, on.service.settings.limits.body_bytes + 1)
        assert status == 413
        assert on.link.log == []


@pytest.mark.parametrize("path", BODIES)
async def test_a_body_of_too_many_values_is_refused_before_it_is_decoded(path: str) -> None:
    async with stage() as on:
        values = (1 << 17 if path == "/v1/completions" else 1 << 15) + 4 * (on.service.context or 0)
        for piece in (b"1,", b"[],", b"{},", b'"a",'):
            data = b'{"x":[' + piece * (values + 2) + b"0]}"
            answer = await on.http.post(path, content=data)
            assert answer.status_code in (400, 413), piece
            assert "values" in answer.text or "too long" in answer.text
        text = json.dumps({"x": ", [" * values}).encode()  # in a text they are no values
        assert "values" not in (await on.http.post(path, content=text)).text


LONG = {
    "/tokenize": {"prompt": WORDS},
    "/tokenize of a conversation": {"messages": [USER]},
    "/v1/completions": {"prompt": ["one two " * 3_000] * 12, "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}] * 4_000},
    "/v1/messages/count_tokens": {
        "model": "scripted",
        "messages": [{"role": "user", "content": "a"}] * 4_000,
    },
    "/v1/responses": {"input": [{"role": "user", "content": "a"}] * 4_000},
    "/v1/responses/input_tokens": {"input": WORDS},
    "/v1/conversations": {"items": [{"type": "message", "role": "user", "content": WORDS}] * 6},
}
"""Bodies that take long, by their path."""


@pytest.mark.parametrize("name", LONG)
async def test_others_are_answered_while_a_long_body_is_served(name: str) -> None:
    async with stage() as on:
        ended: list[str] = []

        async def post() -> None:
            await on.http.post(name.partition(" ")[0], json=LONG[name])
            ended.append("long")

        async def get() -> None:
            assert (await on.http.get("/version")).status_code == 200
            ended.append("short")

        await asyncio.gather(post(), get())
        assert ended == ["short", "long"]


async def test_others_are_answered_while_the_values_of_an_export_are_counted() -> None:
    async with stage() as on:
        ended: list[str] = []

        async def post() -> None:
            answer = await on.http.post("/v1/sessions", content=b"[1,\n" * (1 << 21))
            assert answer.status_code == 413 and "values" in answer.text
            ended.append("long")

        async def get() -> None:
            for _ in range(9):
                assert (await on.http.get("/version")).status_code == 200
            ended.append("short")

        await asyncio.gather(post(), get())
        assert ended == ["short", "long"]


@pytest.mark.parametrize("what", ["retrieve", "go on", "delete"])
async def test_others_are_answered_while_a_long_stored_response_is_read(what: str) -> None:
    async with stage(*["Well."] * 4) as on:
        body: dict[str, Any] = {"input": LONG["/v1/responses"]["input"], "truncation": "auto"}
        made = await on.http.post("/v1/responses", json=body)
        assert made.status_code == 200, made.text
        name = made.json()["id"]
        ended: list[str] = []

        async def read() -> None:
            if what == "go on":
                more = {"input": "More.", "previous_response_id": name, "truncation": "auto"}
                answer = await on.http.post("/v1/responses", json=more)
            else:
                method = "GET" if what == "retrieve" else "DELETE"
                answer = await on.http.request(method, f"/v1/responses/{name}")
            assert answer.status_code == 200, answer.text
            ended.append("long")

        async def get() -> None:
            assert (await on.http.get("/version")).status_code == 200
            ended.append("short")

        await asyncio.gather(read(), get())
        assert ended == ["short", "long"]
