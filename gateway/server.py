"""The server: the gateway, and its engine in a child process. It listens while the engine loads.

`serving` composes settings, listening socket, engine and sessions. ``/ready`` follows the engine.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ..runtime.kv_placement.sizing import refusal
from ..runtime.kv_placement.tier_setup import clipped
from ..runtime.link.child import SpawnedEngine
from ..runtime.link.messages import Heartbeat
from ..runtime.link.process import ChildEngine
from ..runtime.model.folder import model_name
from ..runtime.settings import EngineSettings
from .access.admission import Admission
from .access.tenants import Tenants, check, check_loaded
from .app import build_app
from .errors import AddressUnusable, PortTaken, TracingUnavailable
from .net.listener import listen
from .net.serving import served
from .net.tls import renew, server_context
from .service import Service, opened
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


@asynccontextmanager
async def serving(
    settings: GatewaySettings,
    engine_settings: EngineSettings,
    heard: Callable[[Heartbeat], None] = lambda beat: None,
    engine: ChildEngine | None = None,
    listening: Callable[[str], None] = lambda url: None,
    first: SpawnedEngine | None = None,
) -> AsyncIterator[Serving]:
    """Run a server during an ``async with`` block. The block is entered when a turn could run. When it is left,
    the sockets, the sessions and the engine are closed.

    ``listening`` is called with the URL before anything is loaded, ``heard`` with each heartbeat of the engine,
    also while it loads. ``engine``: the child process to use, made with these settings; None: one is made here,
    from the process ``first`` if that was started before. Raises ``AddressUnusable``, ``KeysUnusable``,
    ``CertificateUnusable``, ``TracingUnavailable``, ``LimitsTooLarge``, and what loading raises
    (`service.opened`).
    """
    secured = server_context(settings.network)
    tenants = Tenants.of(settings)
    check(tenants, settings, engine_settings)
    reserve = 0 if settings.store is None else settings.journal.reserve_bytes
    engine_settings = replace(engine_settings, tenants=tenants.budgets(), disk_reserve=reserve)
    name = model_name(engine_settings.model)
    async with _traced(settings, name) as tracer:
        with bound_socket(settings) as sock:
            engine = engine or ChildEngine(engine_settings, on_heartbeat=heard, first=first)
            shared = engine_settings.policy == FAIR_SHARES
            service = Service(settings, name, engine.link, tenants, shared=shared, tracer=tracer)
            async with reachable(service, sock, secured) as url:
                listening(url)
                async with opened(service, engine_settings.model, engine):
                    hello = engine.link.hello
                    check_loaded(tenants, engine_settings, hello)

                    async def reload() -> str:
                        found = await asyncio.to_thread(Tenants.of, settings)
                        check(found, settings, engine_settings)
                        check_loaded(found, engine_settings, hello)
                        if secured is not None:
                            await asyncio.to_thread(renew, secured, settings.network)
                        return _changed(tenants, found, service.change_tenants(found))

                    files = (settings.keys, settings.network.certificate, settings.network.private_key)
                    read = tuple(path for path in files if path is not None)
                    yield Serving(url, service, engine, reload, read, clipped(engine_settings))


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
        raise TracingUnavailable.without(error) from None
    provider = tracing.otlp_provider(settings.traces_endpoint)
    tracer = tracing.TurnTracer(provider, next(iter(settings.served_names), model))
    try:
        yield tracer
    finally:
        await asyncio.to_thread(tracer.close)


def _changed(before: Tenants, now: Tenants, closed: int) -> str:
    """A line for the operator that says what a reload has changed. ``before``, ``now``: the tenants.
    ``closed``: how many connections it has closed."""
    count = 0 if now.keys is None else len(now.keys.tenants)
    told = f"keys: {count} from {now.source or 'the command line'}; connections closed: {closed}"
    if (before.journal(), before.budgets()) != (now.journal(), now.budgets()):
        told += "; limits named kept, journal, leased and disk change with the next start"
    return told


def bound_socket(settings: GatewaySettings) -> socket.socket:
    """The listening socket of a server with these settings. Raises ``AddressUnusable``."""
    try:
        return listen(settings.host, settings.port, settings.limits)
    except (OSError, UnicodeError) as error:  # `UnicodeError` for a name that cannot be a host
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            taken = f"port {settings.port} on {settings.host} is taken by another program"
            raise PortTaken(taken) from None
        cause = refusal(error, "the socket") or error
        raise AddressUnusable(f"cannot listen on {settings.host}:{settings.port}: {cause}") from None


@asynccontextmanager
async def reachable(
    service: Service, sock: socket.socket, secured: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """Serve all routes of ``service`` on ``sock`` during the block; at its end close all connections. Yields
    the server's URL. ``secured``: the TLS context; None without TLS."""
    settings, (host, port) = service.settings, sock.getsockname()[:2]
    admission = Admission(service.turns, lambda: service.tenants.keys, settings.network.root_path)
    async with served(build_app(service), sock, settings.limits, secured, admission.decide):
        yield f"http{'s' if secured else ''}://{f'[{host}]' if ':' in host else host}:{port}"
