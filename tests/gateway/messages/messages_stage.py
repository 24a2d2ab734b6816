"""A service over a scripted engine, and a client that speaks Messages to it without sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import msgspec

from holdfast.gateway.app import build_app
from holdfast.gateway.service import Service
from holdfast.gateway.settings import GatewaySettings
from holdfast.sessions.registry import SessionRegistry
from holdfast.sessions.settings import SessionSettings
from holdfast.sessions.text.language import Language
from holdfast.sessions.tools.forms import ReasoningForm
from holdfast.tests.gateway.scripted_service import END, Scripted
from holdfast.tests.sessions.scripted_link import Recital
from holdfast.tests.sessions.text.chat_languages import ids, ours

WEATHER = {
    "name": "get_weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def call_text(city: str) -> str:
    """A call as the scripted model writes it."""
    return f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


@dataclass
class Stage:
    """The client, and the engine's side."""

    http: httpx2.AsyncClient
    link: Scripted
    service: Service

    async def create(self, *messages: Any, **fields: Any) -> httpx2.Response:
        """``POST /v1/messages``. A text is a user's message."""
        asked = [{"role": "user", "content": one} if isinstance(one, str) else one for one in messages]
        body = {"model": "scripted", "max_tokens": 100, "messages": asked, **fields}
        return await self.http.post("/v1/messages", json=body)


@asynccontextmanager
async def stage(
    *said: str | list[int],
    settings: GatewaySettings | None = None,
    sessions: SessionSettings | None = None,
    reasoning: ReasoningForm | None = None,
    **more: Any,
) -> AsyncIterator[Stage]:
    """A service with a model that says these replies, one after each prompt. A negative id breaks it."""
    texts = [ids("chatml", one) if isinstance(one, str) else one for one in said]
    link = Scripted(Recital(*texts, end=END), END, **more)
    service = Service(settings or GatewaySettings(), "scripted", link)
    service.open(SessionRegistry(link, Language.of(ours("chatml"), reasoning=reasoning), sessions))
    transport = httpx2.ASGITransport(app=build_app(service))
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        try:
            yield Stage(http, link, service)
        finally:
            await service.close()


def streamed(response: httpx2.Response) -> list[tuple[str, Any]]:
    """The events of a stream: each one's name and body."""
    events = []
    for part in response.text.removesuffix("\n\n").split("\n\n"):
        first, second = part.split("\n")
        events.append((first.removeprefix("event: "), msgspec.json.decode(second.removeprefix("data: "))))
    return events


async def exchange(on: Stage, path: str, asked: Any, told: Callable[[bytes], bool]) -> bytes:
    """A stream, sent piece by piece: ``told`` gets what came so far; the client leaves when it returns true."""
    body = json.dumps({**asked, "stream": True}).encode()
    waiting, leaves, came = [{"type": "http.request", "body": body}], asyncio.Event(), b""

    async def receive() -> Any:
        if waiting:
            return waiting.pop()
        await leaves.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal came
        came += message.get("body", b"")
        if told(came):
            leaves.set()

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
    await build_app(on.service)({**scope, "asgi": {"version": "3.0", "spec_version": "2.3"}}, receive, send)
    return came
