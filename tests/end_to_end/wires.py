"""Raw connections to a server, for frames and requests that no client would send."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect

Json = dict[str, Any]

LONG: Json = {"min_output_tokens": 400}
"""Fields of a response that must still run when something happens to it, although this process is late."""


class Wire:
    """A WebSocket that sends what it is given and reads JSON."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def send(self, frame: Json | str | bytes) -> None:
        await self.socket.send(json.dumps(frame) if isinstance(frame, dict) else frame)

    async def receive(self) -> Json:
        return json.loads(await self.socket.recv())

    async def until(self, kind: str) -> list[Json]:
        """All events up to the first one of this type."""
        events = [await self.receive()]
        while events[-1]["type"] != kind:
            events.append(await self.receive())
        return events

    async def ask(self, text: str, **fields: Any) -> None:
        """Begin a turn; ``fields``: of its response."""
        part = {"type": "input_text", "text": text}
        item = {"type": "message", "role": "user", "content": [part]}
        await self.send({"type": "conversation.item.create", "item": item})
        await self.send({"type": "response.create", "response": fields})

    async def say(self, text: str, **fields: Any) -> Json:
        """One turn; its `response.done`'s response."""
        await self.ask(text, **fields)
        return (await self.until("response.done"))[-1]["response"]


@asynccontextmanager
async def wire(url: str, path: str = "/v1/realtime", **options: Any) -> AsyncIterator[Wire]:
    """A connection that has been greeted."""
    address = url.replace("http", "ws", 1) + path
    async with connect(address, compression=None, proxy=None, **options) as socket:
        opened = Wire(socket)
        await opened.until("conversation.created")
        yield opened


async def get(url: str, path: str, **headers: str) -> tuple[int, str]:
    """Status and body of a GET."""

    def ask() -> tuple[int, str]:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    return await asyncio.to_thread(ask)


def text_of(response: Json) -> str:
    """What a response said."""
    parts = [part for item in response["output"] for part in item.get("content", ())]
    return "".join(part["text"] for part in parts)


async def address_of(process: asyncio.subprocess.Process) -> str:
    """Where a `holdfast serve` serves, told when it is ready."""
    return (await started_with(process))[-1].split()[-1]


LOGGED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z [A-Z]+ holdfast( engine| disk)?(\[\w+\])?: ")


async def started_with(process: asyncio.subprocess.Process) -> list[str]:
    """The log of a `holdfast serve` up to the line that it is ready: what it starts, what that takes, where."""
    assert process.stderr is not None
    lines = [(await process.stderr.readline()).decode()]
    while "holdfast: pocket at http://" not in lines[-1]:
        assert LOGGED.match(lines[-1]), lines
        lines.append((await process.stderr.readline()).decode())
    order = ["holdfast: starting pocket, device ", "holdfast: weights ", "holdfast: sessions are kept in "]
    order.append("holdfast: pocket at ")
    found = [begin for line in lines for begin in order if begin in line]
    assert found == order and order[0] in lines[0], lines
    assert lines[0].split()[-1] == lines[-1].split()[-1], lines
    return lines


def cause_in(err: str) -> str:
    """The last line of a command that could not start; others tell how far it came."""
    lines = err.splitlines()
    assert all(LOGGED.match(line) for line in lines[:-1]) and lines[-1].startswith("holdfast: "), err
    return lines[-1]
