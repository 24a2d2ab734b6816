"""The server: the gateway, and its engine in a child process. It listens while the engine loads.

`serving` composes settings, listening socket, engine and sessions. ``/ready`` follows the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvicorn
from msgspec.structs import replace

from ..runtime.kv_placement.sizing import refusal
from ..runtime.kv_placement.tier_setup import clipped
from ..runtime.link.messages import Heartbeat
from ..runtime.link.process import ChildEngine
from ..runtime.settings import EngineSettings
from .app import build_app
from .compose import model_name, opened
from .errors import AddressUnusable, PortTaken
from .net.listener import http_protocol, listen, websocket_protocol
from .net.tls import renew, server_context
from .service import Service
from .settings import GatewaySettings
from .tenants import Tenants, check, check_leases


@dataclass(frozen=True, slots=True)
class Serving:
    """A running server. ``url``: ``http[s]://host:port``. ``clipped``: why KV on disk has less room than it was
    given, if it has.
    """

    url: str
    service: Service
    engine: ChildEngine
    reload: Callable[[], Awaitable[str]]
    """Read the keys file and the certificate again; returns what has changed. Raises ``KeysUnusable`` or
    ``CertificateUnusable``; then nothing has changed."""
    clipped: str | None = None


TICK_SECONDS = 1.0
"""Seconds between two updates of the date in answers."""


class _Server(uvicorn.Server):
    """Uvicorn without signal handling. ``listening`` is set when it listens; `leave` ends it."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        """Close all connections and end."""
        self.should_exit = True
        self._leaving.set()

    async def main_loop(self) -> None:
        """Run until `leave`. Uvicorn's own loop wakes ten times a second."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._leaving.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the command line."""
        yield


@asynccontextmanager
async def serving(
    settings: GatewaySettings,
    engine_settings: EngineSettings,
    heard: Callable[[Heartbeat], None] = lambda beat: None,
    engine: ChildEngine | None = None,
    listening: Callable[[str], None] = lambda url: None,
) -> AsyncIterator[Serving]:
    """Run a server. The block is entered when a turn could run; after it engine and sockets are closed.

    ``listening`` gets the address before anything is loaded, ``heard`` the engine's heartbeats, also while it
    loads. ``engine``: one with these settings, in place of the default one. Raises ``AddressUnusable``,
    ``KeysUnusable``, ``CertificateUnusable``, and what loading raises (`compose.opened`).
    """
    secured = server_context(settings.network)
    tenants = Tenants.of(settings)
    check(tenants, settings, engine_settings)
    reserve = 0 if settings.store is None else settings.journal.reserve_bytes
    engine_settings = replace(engine_settings, tenants=tenants.budgets(), disk_reserve=reserve)
    with _listen(settings) as sock:
        engine = engine or ChildEngine(engine_settings, on_heartbeat=heard)
        service = Service(settings, model_name(engine_settings.model), engine.link, tenants)
        async with _listening(service, sock, secured) as url:
            listening(url)
            async with opened(service, engine_settings.model, engine):
                hello = engine.link.hello
                check_leases(tenants, engine_settings, hello)

                async def reload() -> str:
                    found = await asyncio.to_thread(Tenants.of, settings)
                    check(found, settings, engine_settings)
                    check_leases(found, engine_settings, hello)
                    if secured is not None:
                        await asyncio.to_thread(renew, secured, settings.network)
                    return _changed(tenants, found, service.change_tenants(found))

                yield Serving(url, service, engine, reload, clipped(engine_settings))


def _changed(before: Tenants, now: Tenants, closed: int) -> str:
    """What a reload has changed, for the operator."""
    count = 0 if now.keys is None else len(now.keys.tenants)
    told = f"keys: {count} from {now.source or 'the command line'}; connections closed: {closed}"
    if (before.journal(), before.budgets()) != (now.journal(), now.budgets()):
        told += "; limits named kept, journal, leased and disk change with the next start"
    return told


def _listen(settings: GatewaySettings) -> socket.socket:
    try:
        return listen(settings.host, settings.port, settings.limits)
    except (OSError, UnicodeError) as error:  # `UnicodeError` for a name that cannot be a host
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            taken = f"port {settings.port} on {settings.host} is taken by another program"
            raise PortTaken(taken) from None
        cause = refusal(error, "the socket") or error
        raise AddressUnusable(f"cannot listen on {settings.host}:{settings.port}: {cause}") from None


@asynccontextmanager
async def _listening(
    service: Service, sock: socket.socket, secured: ssl.SSLContext | None
) -> AsyncIterator[str]:
    """Serve on ``sock`` until the end of the block; then sockets close with 1012. Yields the URL."""
    server = _Server(_config(service, secured))
    running = asyncio.create_task(server.serve(sockets=[sock]), name="holdfast-gateway")
    listening = asyncio.create_task(server.listening.wait())
    try:
        await asyncio.wait({running, listening}, return_when=asyncio.FIRST_COMPLETED)
        yield _url(sock, secured)
    finally:
        listening.cancel()
        server.leave()
        await running


def _config(service: Service, secured: ssl.SSLContext | None) -> uvicorn.Config:
    limits = service.settings.limits
    return uvicorn.Config(
        build_app(service),
        http=http_protocol(limits),
        ws=websocket_protocol(limits),
        ws_max_size=limits.socket_bytes,
        ws_per_message_deflate=False,
        ws_ping_interval=limits.ping_seconds,
        ws_ping_timeout=limits.ping_seconds,
        timeout_graceful_shutdown=int(limits.close_seconds),
        lifespan="off",
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # `BehindProxy` reads them
        ssl_context_factory=None if secured is None else lambda config, default: secured,
    )


def _url(sock: socket.socket, secured: ssl.SSLContext | None) -> str:
    host, port = sock.getsockname()[:2]
    return f"http{'s' if secured else ''}://{f'[{host}]' if ':' in host else host}:{port}"
