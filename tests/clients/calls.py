"""The calls that clients make: counted where the server takes them in, shown as a table at the end of a run.

A call is an HTTP request, or an event that a client sends over a WebSocket.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.gateway.clients import CHAT, COMPLETIONS, IGNORED, MESSAGES, RESPONSES

ROOT = Path(__file__).resolve().parent.parent.parent
ENVIRONMENTS = {
    "openai": ".venv-clients",
    "openai-agents": ".venv-clients",
    "anthropic": ".venv-clients",
    "pydantic-ai-slim": ".venv-clients-pydantic-ai",
    "langchain-openai": ".venv-clients-langchain",
    "litellm": ".venv-clients-litellm",
    "llama-index-llms-openai-like": ".venv-clients-llama-index",
    "openai (npm)": ".venv-clients-node",
    "ai (npm)": ".venv-clients-node",
    "@openai/codex (npm)": ".venv-clients-agents",
    "@anthropic-ai/claude-code (npm)": ".venv-clients-agents",
    "opencode-ai (npm)": ".venv-clients-agents",
    "@qwen-code/qwen-code (npm)": ".venv-clients-agents",
    "aider-chat": ".venv-clients-aider",
    "llm": ".venv-clients-llm",
}
"""The packages that the tests drive, and the environment of each."""


FACES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
}


class Calls:
    """The calls to the servers of one test. ``routes``: how many there were of each, by method and path; an
    event by its WebSocket's path and its type. ``bodies``: what was sent, each with its path."""

    def __init__(self) -> None:
        self.routes: Counter[str] = Counter()
        self.bodies: list[tuple[str, Any]] = []

    def unsent(self, client: str) -> list[str]:
        """The fields that `IGNORED` says that ``client`` sends, of the faces that it called, and that were in
        no body."""
        sent = {(FACES[path], field) for path, body in self.bodies if path in FACES for field in paths(body)}
        called = {face for face, _ in sent}
        told = {(row.face, row.path) for row in IGNORED if client in row.clients and row.face in called}
        return [f"{face}: {field}" for face, field in sorted(told - sent)]

    @property
    def total(self) -> int:
        """All calls."""
        return self.routes.total()

    def around(self, app: ASGIApp) -> ASGIApp:
        """The app, with its calls counted here."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            path = scope["path"]
            if scope["type"] == "http":
                self.routes[f"{scope['method']} {_pattern(path)}"] += 1
                body = bytearray()

                async def read() -> Message:
                    message = await receive()
                    body.extend(message.get("body", b""))
                    if body and message["type"] == "http.request" and not message.get("more_body"):
                        self._keep(path, bytes(body))
                        body.clear()
                    return message

                await app(scope, read, send)
                return

            async def heard() -> Message:
                message = await receive()
                if message["type"] == "websocket.receive":
                    event = self._keep(path, message.get("text") or message["bytes"])
                    self.routes[f"WS {path} {event['type']}"] += 1
                return message

            await app(scope, heard, send)

        return counted

    def _keep(self, path: str, data: str | bytes) -> Any:
        try:
            sent = json.loads(data)
        except ValueError:
            return None
        self.bodies.append((path, sent))
        return sent


def paths(value: Any, path: str = "") -> Iterator[str]:
    """The paths of all fields in decoded JSON, with ``[]`` for any index."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield f"{path}{name}"
            yield from paths(inner, f"{path}{name}.")
    elif isinstance(value, list):
        for inner in value:
            yield from paths(inner, f"{path.removesuffix('.')}[].")


def _pattern(path: str) -> str:
    """A path with its ids and names of models replaced, so that calls of one route count together."""
    parts = path.split("/")
    for at, part in enumerate(parts):
        if (at and parts[at - 1] == "models") or part.partition("_")[0] in ("resp", "conv", "msg", "item"):
            parts[at] = "{id}"
    return "/".join(parts)


@dataclass(slots=True)
class ClientRow:
    """What the tests of one client did. ``outcomes``: passed, failed, skipped tests."""

    routes: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)


def table(rows: dict[str, ClientRow]) -> Iterable[str]:
    """The lines of the table, in Markdown."""
    yield "| client | version | calls | of these over WebSockets | tests passed |"
    yield "|---|---|---|---|---|"
    for name, row in rows.items():
        passed = f"{row.outcomes['passed']} of {row.outcomes.total()}"
        version = version_of(name) or "not installed"
        events = sum(count for route, count in row.routes.items() if route.startswith("WS "))
        yield f"| {name} | {version} | {row.routes.total()} | {events} | {passed} |"


def version_of(client: str) -> str | None:
    """The installed version of a client; None if its environment has none."""
    folder = ROOT / ENVIRONMENTS[client]
    package, node, _ = client.partition(" (npm)")
    if node:
        manifest = folder / "node_modules" / package / "package.json"
        return str(json.loads(manifest.read_text())["version"]) if manifest.exists() else None
    found = folder.glob(f"lib/python*/site-packages/{package.replace('-', '_')}-*.dist-info")
    return next((path.name.removesuffix(".dist-info").rpartition("-")[2] for path in found), None)
