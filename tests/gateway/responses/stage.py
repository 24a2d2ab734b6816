"""A service with a scripted engine behind its routes, and requests to it without sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from holdfast.gateway.app import build_app
from holdfast.gateway.service import Service
from holdfast.gateway.settings import GatewaySettings
from holdfast.sessions.journal.journal import Journal
from holdfast.sessions.registry import SessionRegistry
from holdfast.sessions.settings import JournalSettings
from holdfast.sessions.text.language import Language
from holdfast.tests.gateway.scripted_service import END, Scripted, spoken
from holdfast.tests.sessions.text.chat_languages import ids, ours

Json = dict[str, Any]
LANGUAGE = Language.of(ours("chatml"))


@dataclass
class Answer:
    """An answer's status, headers and body."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Json]:
        """The events of a stream; each must be named as its type says."""
        *events, last = self.body.decode().strip().split("\n\n")
        assert last == "data: [DONE]", last
        found = []
        for event in events:
            name, data = event.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
        return found

    @property
    def error(self) -> Json:
        assert set(self.json) == {"error"}
        return self.json["error"]


async def never(*_: object) -> None:
    """Instead of a cancel."""


@dataclass
class Stage:
    """The routes of a service."""

    service: Service
    link: Scripted
    app: Any

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        key: str | None = None,
        leave: Callable[[bytes], bool] = lambda sent: False,
        left: asyncio.Event | None = None,
    ) -> Answer:
        """One request. ``leave``: the client leaves once what it was sent fulfils this, or when ``left`` is
        set."""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        path, _, query = path.partition("?")
        headers = [(b"host", b"127.0.0.1"), (b"content-length", b"%d" % len(data))]
        if key is not None:
            headers.append((b"authorization", f"Bearer {key}".encode()))
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "scheme": "http",
            "root_path": "",
        }
        answer, left, given = Answer(), left or asyncio.Event(), [data]

        async def receive() -> Json:
            if given:
                return {"type": "http.request", "body": given.pop(), "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Json) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            elif message["type"] == "http.response.body" and not left.is_set():
                answer.body += message.get("body", b"")
                if leave(answer.body):
                    left.set()
                    await asyncio.sleep(0)

        await self.app(scope, receive, send)
        return answer

    async def ended(self, response: str) -> Json:
        """The response, once it has ended and is kept."""
        while True:
            answer = await self.ask("GET", f"/v1/responses/{response}")
            if answer.status == 200 and answer.json["status"] not in ("queued", "in_progress"):
                return answer.json
            await asyncio.sleep(0)

    def unstoppable(self, response: str) -> None:
        """Let nothing cut this response of the only socket."""
        (socket,) = self.service._sockets.values()
        socket._served[response].running.cancel = never  # type: ignore[attr-defined]

    async def create(self, given: Any = "Hello!", **fields: Any) -> Json:
        """A response that must be answered."""
        answer = await self.ask("POST", "/v1/responses", {"input": given, **fields})
        assert answer.status == 200, answer.body
        return answer.json

    async def stream(self, given: Any = "Hello!", **fields: Any) -> list[Json]:
        """The events of a response."""
        answer = await self.ask("POST", "/v1/responses", {"input": given, "stream": True, **fields})
        assert answer.status == 200, answer.body
        return answer.events

    async def refused(self, method: str, path: str, body: Any = None, *, key: str | None = None) -> Any:
        """The status, code and param of a refusal."""
        answer = await self.ask(method, path, body, key=key)
        error = answer.error
        assert set(error) == {"type", "code", "message", "param"} and error["message"]
        return answer.status, error["code"], error["param"]


@asynccontextmanager
async def staged(
    store: Path | None = None,
    *,
    link: Scripted | None = None,
    settings: GatewaySettings | None = None,
    journal: JournalSettings | None = None,
) -> AsyncIterator[Stage]:
    """A service, to ask its routes. ``store``: the folder of its journal, with the settings ``journal``."""
    link = link or Scripted(spoken, END, max_context=1 << 16)
    service = Service(settings or GatewaySettings(), "fake", link)
    book = None
    if store is not None:
        shared = replace(journal or JournalSettings(reserve_bytes=0), tenants=service.tenants.journal())
        book = await Journal.open(store, b"model", shared)
    service.open(SessionRegistry(link, LANGUAGE, journal=book), book)
    try:
        yield Stage(service, link, build_app(service))
    finally:
        await service.close()
        if book is not None:
            await book.aclose()


def text_of(response: Json) -> str:
    """What a response says."""
    messages = [item for item in response["output"] if item["type"] == "message"]
    return "".join(part["text"] for item in messages for part in item["content"])


def told(*texts: str) -> Scripted:
    """An engine that says these texts, one after the other."""
    lines = [[*ids("chatml", text), END] for text in texts]
    turns: list[int] = []

    def model(tokens: Sequence[int]) -> int:
        turns.append(0)
        at = len(turns) - 1
        for line in lines:
            if at < len(line):
                return line[at]
            at -= len(line)
        return END

    return Scripted(model, END, max_context=1 << 16)
