"""A scripted service with a keys file, and clients that connect with one of its keys."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.gateway.access.attribution import Attribution
from holdfast.gateway.access.auth import ClientIdentity, TurnCaller
from holdfast.gateway.metrics.tracing import TurnTracer
from holdfast.gateway.net.channel import MemoryChannel, memory_pair
from holdfast.gateway.service import Service
from holdfast.gateway.settings import GatewaySettings
from holdfast.sessions.registry import SessionRegistry
from holdfast.sessions.settings import SessionSettings
from holdfast.sessions.text.language import Language
from holdfast.tests.gateway.scripted_service import END, Scripted, spoken
from holdfast.tests.sessions.text.chat_languages import ours

Json = dict[str, Any]

FILE = """
[tenants.acme]
keys = ["alpha", "beta"]
requests_per_minute = 3
tokens_per_minute = 1000

[tenants.zenith]
keys = ["gamma"]
requests_per_minute = 1000

[tenants.small]
keys = ["delta"]
requests_per_minute = 1000
tokens_per_minute = 20

[tenants.free]
keys = ["free"]
"""


def digest(key: str) -> bytes:
    """What the gateway knows a key by."""
    return hashlib.blake2b(key.encode(), digest_size=32).digest()


def said(text: str) -> Json:
    """A user's message."""
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


class MemoryWire:
    """A Realtime connection inside this process: JSON in, JSON out."""

    def __init__(self, channel: MemoryChannel) -> None:
        self._channel = channel

    async def send(self, kind: str, **fields: Any) -> None:
        await self._channel.send(json.dumps({"type": kind, **fields}).encode())

    async def until(self, *kinds: str) -> list[Json]:
        """All events up to the first one of these types."""
        events: list[Json] = []
        while not events or events[-1]["type"] not in kinds:
            events.append(json.loads(await self._channel.receive()))
        return events

    async def say(self, text: str = "begin") -> Json:
        """One turn: its response, or the error that refuses it."""
        await self.send("response.create", items=[said(text)])
        last = (await self.until("response.done", "error"))[-1]
        return last.get("response") or last["error"]


class KeyedService:
    """``service``: on the scripted engine ``link``."""

    def __init__(self, service: Service, link: Scripted) -> None:
        self.service = service
        self.link = link

    @property
    def begun(self) -> int:
        """Turns that the engine was asked for."""
        return sum(verb in ("begin", "generate") for verb, *_ in self.link.log)

    @asynccontextmanager
    async def wire(self, key: str, trace: Mapping[str, str] | None = None) -> AsyncIterator[MemoryWire]:
        """A connection with this key, with a session of its own that has greeted. ``trace``: its headers."""
        keys = self.service.tenants.keys
        assert keys is not None
        tenant = keys.tenant(key)
        assert tenant is not None
        caller = TurnCaller(
            owner=key.encode(),
            salt=_salt(tenant),
            key=digest(key),
            trace=trace or {},
            attribution=Attribution.of(tenant, "/v1/realtime"),
        )
        ours, theirs = memory_pair(1024)
        serving = asyncio.ensure_future(self.service.converse(theirs, ClientIdentity(caller)))
        opened = MemoryWire(ours)
        await opened.until("conversation.created")
        try:
            yield opened
        finally:
            await ours.close(1000, "")
            await serving
            await theirs.close(1000, "")


@asynccontextmanager
async def keyed(
    folder: Path, text: str = FILE, tracer: TurnTracer | None = None, places: int = 100, **settings: Any
) -> AsyncIterator[KeyedService]:
    """A service with this keys file. ``places``: sessions that may be open. ``settings``: further ones of the
    gateway."""
    path = folder / "keys.toml"
    path.write_text(text)
    link = Scripted(spoken, END, ahead=1)
    made = replace(GatewaySettings(keys=path), **settings)
    service = Service(made, "scripted", link, tracer=tracer)
    of_sessions = SessionSettings(max_sessions=places)
    service.open(SessionRegistry(link, Language.of(ours("chatml")), of_sessions))
    try:
        yield KeyedService(service, link)
    finally:
        await service.close()


def _salt(tenant: str) -> bytes:
    return hashlib.blake2b(tenant.encode(), digest_size=16).digest()
