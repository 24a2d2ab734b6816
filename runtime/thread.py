"""The engine in a thread of this process, with the same loop and the same kind of socket as one in a process.

It is for tests and light embedding: it shares the interpreter lock with the event loop, dies with the
process, and is not restarted.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import warnings
from collections.abc import Callable
from functools import partial

import anyio
import anyio.to_thread

from .errors import EngineDied, LinkClosed
from .link.client import EngineLink
from .link.engine_end import LoadedEngine, LoadProgress, serve
from .link.gateway_end import GatewayEnd
from .link.heartbeat import Liveness
from .link.messages import Heartbeat
from .settings import EngineSettings

GRACE = 10.0  # seconds the step in flight has to end when the link is closed

log = logging.getLogger(__name__)


def _load(settings: EngineSettings, progress: LoadProgress, liveness: Liveness) -> LoadedEngine:
    from .build import load_engine  # imports torch, in the engine's thread only

    return load_engine(settings, progress, liveness)


class ThreadEngine:
    """``async with ThreadEngine(settings) as link``: entered when the engine is loaded, left when its thread
    ended.

    Entering raises the ``RuntimeFault`` that loading raised; any other error becomes ``EngineDied``. ``load``
    makes the engine. ``on_heartbeat`` gets each heartbeat.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        load: Callable[[EngineSettings, LoadProgress, Liveness], LoadedEngine] = _load,
        on_heartbeat: Callable[[Heartbeat], None] = lambda beat: None,
    ) -> None:
        self.link = EngineLink(one.name for one in settings.adapters)
        self._settings = settings
        self._load = load
        self._on_heartbeat = on_heartbeat
        self._thread: threading.Thread  # from when it is entered
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> EngineLink:
        ours, theirs = socket.socketpair()
        self._thread = threading.Thread(
            target=self._serve, args=(theirs,), name="holdfast-engine", daemon=True
        )
        self._thread.start()
        end = GatewayEnd(self._on_heartbeat)
        self.link.attach(end)
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: end, sock=ours)
            self.link.welcome(await end.hello)
            self._watch = asyncio.create_task(self._until_lost(end), name="holdfast-engine")
        except BaseException:
            await self.__aexit__()
            raise
        return self.link

    def _serve(self, sock: socket.socket) -> None:
        try:
            serve(sock, partial(self._load, self._settings))
        except Exception:
            log.exception("the engine's thread ended")

    async def _until_lost(self, end: GatewayEnd) -> None:
        """Wait until the socket's other end is gone, then fail the link: the thread is not restarted."""
        await end.lost.wait()
        self.link.fail(end.gone or EngineDied("the engine's thread ended"))

    async def __aexit__(self, *_: object) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self.link.fail(LinkClosed("this end closed the link"))
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._thread.join, GRACE)
        if self._thread.is_alive():
            warnings.warn("the engine's thread hangs in a step", ResourceWarning, stacklevel=2)
