"""Serves an ASGI application on a listening socket: uvicorn's server, with this package's connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp

from ..settings import ClientLimits
from .deadlines import Deadlines
from .http_connection import http_protocol
from .listener import PASS, Decide, Door, Listener
from .websocket_connection import websocket_protocol

TICK_SECONDS = 1.0
"""Seconds between two updates of the Date header of answers."""
SPARE_SECONDS = 2
"""Seconds that requests have at the end of the server, behind those of their connections."""


class _Server(uvicorn.Server):
    """Uvicorn's server without signal handling. ``listening`` is set when it accepts connections; `leave` makes
    it end."""

    def __init__(self, config: uvicorn.Config, deadlines: Deadlines) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self._leaving = asyncio.Event()
        self._deadlines = deadlines

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

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close all connections, those of clients that do not close theirs in ``close_seconds``."""
        self._deadlines.close()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: the command line handles signals."""
        yield


@asynccontextmanager
async def served(
    app: ASGIApp,
    sock: socket.socket,
    limits: ClientLimits,
    secured: ssl.SSLContext | None = None,
    decide: Decide = lambda data, peer, *, close: None,
) -> AsyncIterator[Deadlines]:
    """Accept connections on ``sock``, which is closed with the server, and serve them by ``app`` during the
    block; at its end close them. Yields the deadlines of all connections. ``secured``: the TLS context; None
    without TLS. ``decide``: about each request when it comes."""
    door = Door(Deadlines(limits, asyncio.get_running_loop()), decide)
    config = uvicorn.Config(
        app,
        http=http_protocol(limits, door),
        ws=websocket_protocol(limits),
        ws_max_size=limits.socket_bytes,
        ws_per_message_deflate=False,
        ws_ping_interval=limits.ping_seconds,
        ws_ping_timeout=limits.ping_seconds,
        timeout_graceful_shutdown=int(limits.close_seconds) + SPARE_SECONDS,
        backlog=PASS,
        lifespan="off",
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # `BehindProxy` reads them
        ssl_context_factory=None if secured is None else lambda config, default: secured,
    )
    server = _Server(config, door.deadlines)
    listener = Listener.of(sock, door, looks=secured is None)  # the server closes it
    running = asyncio.create_task(server.serve(sockets=[listener]), name="holdfast-gateway")
    listening = asyncio.create_task(server.listening.wait())
    try:
        await asyncio.wait({running, listening}, return_when=asyncio.FIRST_COMPLETED)
        yield door.deadlines
    finally:
        listening.cancel()
        server.leave()
        await running
