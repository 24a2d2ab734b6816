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
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from msgspec.structs import replace

from ..runtime.kv_placement.sizing import refusal
from ..runtime.kv_placement.tier_setup import clipped
from ..runtime.link.messages import Heartbeat
from ..runtime.link.process import ChildEngine
from ..runtime.settings import EngineSettings
from .access.admission import Admission
from .access.tenants import Tenants, check, check_leases
from .app import build_app
from .compose import model_name, opened
from .errors import AddressUnusable, PortTaken, TracingUnavailable
from .net.listener import Door, Listener, http_protocol, listen, websocket_protocol
from .net.tls import renew, server_context
from .service import Service
from .settings import GatewaySettings

if TYPE_CHECKING:  # it needs an extra
    from .metrics.tracing import TurnTracer


@dataclass(frozen=True, slots=True)
class Serving:
    """A running server. ``url``: ``http[s]://host:port``. ``engine``: the engine's child process. ``clipped``:
    a line that says why KV on disk has less room than the settings give it; None if it has all."""

    url: str
    service: Service
    engine: ChildEngine
    reload: Callable[[], Awaitable[str]]
    """Read the keys file and the certificate again. Returns a line that says what has changed. Raises
    ``KeysUnusable`` or ``CertificateUnusable``; then nothing has changed."""
    reloadable: tuple[Path, ...] = ()
    """The files that `reload` reads."""
    clipped: str | None = None


FAIR_SHARES = "fair_shares"
"""The name of the scheduling policy that shares the engine between tenants, so that none waits for another's
queue."""
TICK_SECONDS = 1.0
"""Seconds between two updates of the Date header of answers."""


class _Server(uvicorn.Server):
    """Uvicorn's server without signal handling. ``listening`` is set when it accepts connections; `leave` makes
    it end."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        """Make the server close all connections and end. Returns at once."""
        self.should_exit = True
        self._leaving.set()

    async def main_loop(self) -> None:
        """Return when `leave` is called; until then update the Date header of answers once a second. Uvicorn's
        own loop wakes ten times a second."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._leaving.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: the command line handles signals."""
        yield


@asynccontextmanager
async def serving(
    settings: GatewaySettings,
    engine_settings: EngineSettings,
    heard: Callable[[Heartbeat], None] = lambda beat: None,
    engine: ChildEngine | None = None,
    listening: Callable[[str], None] = lambda url: None,
) -> AsyncIterator[Serving]:
    """Run a server during an ``async with`` block. The block is entered when a turn could run. When it is left,
    the sockets, the sessions and the engine are closed.

    ``listening`` is called with the URL before anything is loaded, ``heard`` with each heartbeat of the engine,
    also while it loads. ``engine``: the child process to use, made with these settings; None: one is made here.
    Raises ``AddressUnusable``, ``KeysUnusable``, ``CertificateUnusable``, ``TracingUnavailable``,
    ``LimitsTooLarge``, and what loading raises (`compose.opened`).
    """
    secured = server_context(settings.network)
    tenants = Tenants.of(settings)
    check(tenants, settings, engine_settings)
    reserve = 0 if settings.store is None else settings.journal.reserve_bytes
    engine_settings = replace(engine_settings, tenants=tenants.budgets(), disk_reserve=reserve)
    name = model_name(engine_settings.model)
    async with _traced(settings, name) as tracer:
        with _listen(settings) as sock:
            engine = engine or ChildEngine(engine_settings, on_heartbeat=heard)
            shared = engine_settings.policy == FAIR_SHARES
            service = Service(settings, name, engine.link, tenants, shared=shared, tracer=tracer)
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

                    files = _reloadable(settings)
                    yield Serving(url, service, engine, reload, files, clipped(engine_settings))


@asynccontextmanager
async def _traced(settings: GatewaySettings, model: str) -> AsyncIterator[TurnTracer | None]:
    """Yields the tracer if the settings name an endpoint for traces, else None. At the end of the block its
    unsent spans are sent. ``model``: the model's name in the spans, unless the settings give others. Raises
    ``TracingUnavailable``."""
    if settings.traces_endpoint is None:
        yield None
        return
    try:
        from .metrics import tracing  # it needs an extra
    except ImportError as error:
        raise TracingUnavailable(f"--otlp-traces-endpoint needs holdfast[otel]: {error}") from None
    provider = tracing.otlp_provider(settings.traces_endpoint)
    tracer = tracing.TurnTracer(provider, next(iter(settings.served_names), model))
    try:
        yield tracer
    finally:
        await asyncio.to_thread(tracer.close)


def _reloadable(settings: GatewaySettings) -> tuple[Path, ...]:
    """The files that a reload reads."""
    files = (settings.keys, settings.network.certificate, settings.network.private_key)
    return tuple(path for path in files if path is not None)


def _changed(before: Tenants, now: Tenants, closed: int) -> str:
    """A line for the operator that says what a reload has changed. ``before``, ``now``: the tenants.
    ``closed``: how many connections it has closed."""
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
    """Accept connections on ``sock`` during the block; at its end close them with 1012. Yields the server's
    URL. ``secured``: the TLS context; None without TLS."""
    keys, root_path = (lambda: service.tenants.keys), service.settings.network.root_path
    door = Door(Admission(service.turns, keys, root_path).decide)
    server = _Server(_config(service, secured, door))
    url = _url(sock, secured)
    listener = Listener.of(sock, door if secured is None else None)  # the server closes it
    running = asyncio.create_task(server.serve(sockets=[listener]), name="holdfast-gateway")
    listening = asyncio.create_task(server.listening.wait())
    try:
        await asyncio.wait({running, listening}, return_when=asyncio.FIRST_COMPLETED)
        yield url
    finally:
        listening.cancel()
        server.leave()
        await running


def _config(service: Service, secured: ssl.SSLContext | None, door: Door) -> uvicorn.Config:
    limits = service.settings.limits
    return uvicorn.Config(
        build_app(service),
        http=http_protocol(limits, door),
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
