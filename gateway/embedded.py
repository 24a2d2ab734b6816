"""An engine inside this process, behind the SDK's own client: the same protocol, without sockets or a server.

    async with embedded("pocket") as client:
        async with client.session(instructions="Be brief.") as chat:
            async for piece in chat.say("Hello!"):
                print(piece, end="")

The engine is a thread: it shares the interpreter lock with the event loop and dies with the process. For
serving, and for measuring, run ``holdfast serve``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import msgspec

from ..runtime.errors import RuntimeFault
from ..runtime.model.folder import model_name
from ..runtime.settings import EngineSettings
from ..runtime.thread import ThreadEngine
from ..sdk.client import Client
from ..sdk.connection.reconnect import Patience
from ..sdk.errors import ConnectionFailed, ConnectionLost
from ..sdk.opening import opens_async
from .access.auth import ClientIdentity
from .errors import GatewayError
from .live.session import spawn
from .net.channel import ChannelClosed, MemoryChannel, memory_pair
from .service import Service, opened
from .settings import GatewaySettings

ONE_TRY = Patience(total=0.0)
"""How long the client tries to connect again: one try. Inside one process a failure means that the engine was
closed."""


@opens_async("async with embedded(...) as client:")
async def embedded(
    model: str = "pocket",
    *,
    engine: EngineSettings | None = None,
    settings: GatewaySettings | None = None,
) -> AsyncIterator[Client]:
    """Load an engine in a thread of this process, and yield a client of it. At the end of the block the engine
    is closed. ``model``: its name or path. ``engine``: all settings of the engine, its model among them; then
    ``model`` is not used. ``settings``: those of the gateway.

    Raises ``ModelUnreadable``, ``SettingsInvalid``, ``TokenizerUnreadable``, ``TemplateFailed`` or
    ``EngineDied``.
    """
    engine_settings = engine or EngineSettings(model=model)
    thread = ThreadEngine(engine_settings)
    service = Service(settings or GatewaySettings(), model_name(engine_settings.model), thread.link)
    async with opened(service, engine_settings.model, thread):
        yield in_memory(service)


def in_memory(service: Service) -> Client:
    """Make an SDK client that reaches ``service`` through memory, without sockets. Each of its connections is
    served by a task of this event loop. Its sessions end with the service."""
    connections: set[asyncio.Task[None]] = set()

    async def dial(model: str | None, *, resume: bool = False) -> MemoryChannel:
        try:
            await service.admitted(None if resume else model, service.settings.handshake_seconds)
        except (GatewayError, RuntimeFault) as error:
            raise ConnectionFailed(error.message) from error
        ours, theirs = memory_pair(fault=_lost)
        identity = ClientIdentity(resumable=True, resume=resume, model=model)
        spawn(_serve(service, ours, identity), connections)
        return theirs

    async def import_export(data: bytes) -> bytes:
        return msgspec.json.encode(await service.import_session(data, b"", b""))

    return Client(dial, redial=partial(dial, resume=True), patience=ONE_TRY, importing=import_export)


async def _serve(service: Service, channel: MemoryChannel, identity: ClientIdentity) -> None:
    try:
        await service.converse(channel, identity)
    finally:
        await channel.aclose()


def _lost(closed: ChannelClosed) -> ConnectionLost:
    return ConnectionLost.closed(f"The connection ended: {closed}", closed.code)
