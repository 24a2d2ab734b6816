"""What all routes share: the link to the engine, the live sessions and the open sockets.

`Service` admits clients and makes the faces, that is, the protocols. The server and the embedded engine both
use it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..runtime.errors import EngineGone
from ..runtime.link.client import EngineLink
from ..runtime.link.messages import Phase
from ..sessions.journal.journal import Journal
from ..sessions.registry import SessionRegistry
from ..sessions.stored import StoredObjects
from .errors import Draining, EngineLoading, KeyRemoved, ModelNotServed, SlowReader
from .live_session import LiveSession, spawn
from .live_sessions import LiveSessions
from .metrics import MetricsSnapshot, TenantSnapshot
from .net.channel import Channel
from .net.outbox import Outbox
from .rate_limits import RateLimiter
from .realtime.session import RealtimeDefaults, RealtimeFace
from .realtime.socket import ClientIdentity, RealtimeSocket
from .settings import GatewaySettings
from .tenants import ALLOWED, Tenants
from .transcripts import Transcripts
from .turn_queue import TurnQueue
from .turns import Turns

if TYPE_CHECKING:  # it needs an extra
    from .tracing import TurnTracer

log = logging.getLogger(__name__)

LOADING = {Phase.LOADING: "loading weights", Phase.COMPILING: "compiling kernels"}
"""What an engine that is not ready does; in any other phase the journal is being opened."""


@dataclass(frozen=True, slots=True)
class ServiceState:
    """What the probes answer, from the engine's heartbeats. ``alive``: false if the engine hangs and a restart
    of the server would help. ``ready``: a turn could run now. ``phase``, ``fraction``: what the engine does,
    and how much of that is done, from 0 to 1. ``detail``: more about that, or why no turn may begin.
    ``journal``: what differs from the journal at the last start, such as that it was emptied."""

    alive: bool
    ready: bool
    phase: Phase
    detail: str
    fraction: float
    journal: tuple[str, ...] = ()

    def told(self) -> dict[str, object]:
        """The JSON body of a probe's answer."""
        status = "ready" if self.ready else "not ready" if self.alive else "hung"
        told = {"status": status, "phase": self.phase, "detail": self.detail, "fraction": self.fraction}
        return {**told, "journal": list(self.journal)} if self.journal else told


class ServedSocket(Protocol):
    """A client's WebSocket, of any face, while it is served."""

    outbox: Outbox
    client: ClientIdentity

    def leave(self, why: Exception | None = None) -> None:
        """Close the connection, and say why; None: because the server goes away."""

    async def run(self) -> None:
        """Serve the client until it has left or the server has said goodbye. Raises ``SlowReader`` for a client
        that must be dropped."""


class Service:
    """One model behind one engine: its tenants, live sessions and open sockets. Sessions can be opened after
    `open`, which is called when the engine was loaded for the first time.

    ``model``: the name under which the model is served, unless the settings give other names. ``tenants``:
    those of the settings; None reads them here, which may raise ``KeysUnusable``. ``shared``: the engine's
    policy shares it between tenants. ``tracer``: makes a span of each turn; None: nothing is traced.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        model: str,
        link: EngineLink,
        tenants: Tenants | None = None,
        *,
        shared: bool = True,
        tracer: TurnTracer | None = None,
    ) -> None:
        self.settings = settings
        self.tenants = tenants or Tenants.of(settings)
        self.names = tuple(dict.fromkeys(settings.served_names)) or (model,)
        """The names under which the model is served."""
        self.started = int(time.time())
        self._registry: SessionRegistry | None = None
        self._journal: Journal | None = None
        self._live: LiveSessions | None = None
        self._faces: dict[str | None, RealtimeFace] = {}  # by the name that clients ask for
        queue = TurnQueue(settings.max_queue_seconds, shared=shared)
        self.turns = Turns(RateLimiter(self.tenants.rates()), queue, tracer)
        """What the turns of all sessions share."""
        self._link = link
        self._sockets: dict[asyncio.Task[None], ServedSocket] = {}
        self._stored: StoredObjects | None = None
        self._works: set[asyncio.Task[Any]] = set()
        self._draining = False
        self._opened = asyncio.Event()  # no request waits for the engine any more
        self._waiting = 0
        self._slow_readers = 0
        link.on_recovery(self._recovered)

    def open(self, registry: SessionRegistry, journal: Journal | None = None) -> None:
        """Let clients open sessions from now on. ``journal``: the registry's; if it cannot write, all sessions
        are told. None if there is no journal."""
        self._registry = registry
        self._journal = journal
        self._live = LiveSessions(registry, self.settings.limits, self.turns)
        self._stored = StoredObjects(journal)
        if journal is not None:
            journal.watchers.add(self._live.alarm)
        self._opened.set()

    def refuse(self) -> None:
        """Admit no client any more. What waits for the engine is refused."""
        self._draining = True
        self._opened.set()

    async def close(self) -> None:
        """Admit no client any more, close all sockets and put all sessions away. Running turns count as
        interrupted.

        It waits at most ``close_seconds`` for the sockets, and at most as long again for the sessions, because
        the engine may not answer.
        """
        self.refuse()
        if self._live is not None:
            self._live.stop()
        for socket in self._sockets.values():
            socket.leave()
        if self._sockets:
            await asyncio.wait(list(self._sockets), timeout=self.settings.limits.close_seconds)
        for work in self._works:
            work.cancel()
        if self._works:
            await asyncio.wait(list(self._works), timeout=self.settings.limits.close_seconds)
        registry, live = self._registry, self._live
        self._registry = self._live = None
        if registry is not None and live is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.settings.limits.close_seconds):
                    await live.aclose()
                    await registry.aclose()

    def sessions(self) -> list[LiveSession]:
        """The sessions in memory, with a connection or without."""
        return [] if self._live is None else self._live.live()

    def state(self) -> ServiceState:
        """What the probes answer now."""
        link, beat = self._link, self._link.heartbeat
        fault = self._journal.fault if self._journal is not None and self._registry is not None else None
        ready = link.ready and self._registry is not None and not self._draining and fault is None
        return ServiceState(
            alive=link.overdue == 0.0,
            ready=ready,
            phase=link.phase,
            detail="draining" if self._draining else fault.message if fault else beat.detail if beat else "",
            fraction=beat.fraction if beat else 0.0,
            journal=() if self._journal is None else tuple(self._journal.mismatches),
        )

    @property
    def model(self) -> str:
        """The name of the model that a client gets if it asks for none."""
        return self.names[0]

    def check_model(self, name: str | None) -> None:
        """Raises ``ModelNotServed`` if a client asks for another model. ``name``: what it asks for; None or
        empty is allowed."""
        if name and name not in self.names:
            served = ", ".join(map(repr, self.names))
            raise ModelNotServed(f"This server serves {served}, not {name[:256]!r}")

    def admit(self, model: str | None) -> LiveSessions:
        """Check that a client may have a session, and return the live sessions, in which a face opens or
        resumes it. ``model``: the name that the client asks for; None: any.

        Raises ``ModelNotServed``, ``Draining``, or ``EngineLoading``.
        """
        self.check_model(model)
        if self._draining:
            raise Draining("The server is going away")
        if self._live is None:
            raise self._loading()
        return self._live

    async def loaded(self) -> None:
        """Wait for an engine that still loads, ``loading_seconds`` at most: what is asked for then is refused.
        Clients of HTTP have no other way to wait; those of WebSockets try again."""
        self._waiting += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.settings.loading_seconds):
                    await self._opened.wait()
        finally:
            self._waiting -= 1

    async def transcripts(self, model: str | None) -> Transcripts:
        """What begins the turns of clients that send whole conversations. Waits for an engine that loads, as
        `loaded` does. Raises what `admit` does."""
        self.check_model(model)
        await self.loaded()
        return Transcripts(self.admit(model), self._link, self.settings.default_max_tokens)

    @property
    def stored(self) -> StoredObjects:
        """What the faces store. Raises ``EngineLoading``."""
        if self._stored is None:
            raise self._loading()
        return self._stored

    @property
    def context(self) -> int | None:
        """The tokens that the model's context holds; None until the engine is loaded."""
        return None if self._live is None else self._link.hello.max_context

    def _loading(self) -> EngineLoading:
        state = self.state()
        doing = LOADING.get(state.phase, "opening the journal")
        detail = f" ({state.detail}, {state.fraction:.0%})" if state.detail and state.phase in LOADING else ""
        return EngineLoading(
            f"The engine is not ready yet: {doing}{detail}. Try again soon; /ready tells when"
        )

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work that may outlive its request. `close` cancels it."""
        return spawn(work, self._works)

    def spawn_end(self, stack: AsyncExitStack) -> None:
        """Leave the contexts on ``stack`` in a task of its own, if they were not left yet: those of a stream
        that a client left before its first event."""
        self.spawn(stack.aclose())

    async def converse(self, channel: Channel, client: ClientIdentity | None = None) -> None:
        """Serve one Realtime connection until either side ends it. Call it in a task of the connection's own. A
        client that takes nothing is dropped, and logged. ``client``: which client it is; None: one without a
        key. Raises what `admit` does."""
        limits = self.settings.limits
        client = client or ClientIdentity()
        socket = RealtimeSocket(channel, self._realtime(client.model), client, limits)
        await self.serve(socket, channel)

    def _realtime(self, model: str | None) -> RealtimeFace:
        """The Realtime face of all clients that ask for the model by this name. Raises what `admit` does."""
        live, face = self.admit(model), self._faces.get(model)
        if face is None or face.sessions is not live:
            named = RealtimeDefaults((model or self.model, *self.names), self.settings.default_max_tokens)
            face = self._faces[model] = RealtimeFace(live, self._link, named, self.settings.limits)
        return face

    async def serve(self, socket: ServedSocket, channel: Channel) -> None:
        """Serve one WebSocket until either side ends it. Call it in a task of the connection's own. A client
        that takes nothing is dropped, and logged."""
        task = asyncio.current_task()
        assert task is not None, "a connection has a task of its own"
        self._sockets[task] = socket
        self._check_key(socket)  # it may have been removed since the request was let in
        try:
            await socket.run()
        except SlowReader as slow:
            log.warning("the client at %s was dropped: %s", socket.client.address or "?", slow.message)
            self._slow_readers += 1
            channel.drop()
        finally:
            del self._sockets[task]

    async def drain(self) -> None:
        """Prepare for the server's end: take no new turns, and tell all clients. Wait at most ``drain_seconds``
        for running turns; those that the next server cannot continue are then cancelled. Returns after
        ``close_seconds`` more at the latest."""
        self.refuse()
        seconds = self.settings.drain_seconds
        running = 0 if self._live is None else self._live.responses
        log.info("draining: %d responses run and have %g s to end", running, seconds)
        ending = [asyncio.ensure_future(session.drain(seconds)) for session in self.sessions()]
        if ending:
            _, late = await asyncio.wait(ending, timeout=seconds + self.settings.limits.close_seconds)
            for task in late:
                task.cancel()

    def _recovered(self, lost_seconds: float) -> None:
        """Another engine has taken over after ``lost_seconds`` without one: log it and tell all sessions, also
        those without a running turn."""
        log.warning("another engine serves, after %.1f s without one", lost_seconds)
        if self._live is not None:
            self._live.recovered(lost_seconds)

    def change_tenants(self, tenants: Tenants) -> int:
        """Use the keys in ``tenants`` from now on, and the limits of sessions and turns.

        Closes the sockets of keys that are gone or belong to another tenant now, and returns their number.
        Limits that the engine and the journal enforce stay as they were at the start.
        """
        self.tenants = tenants
        self.turns.rates.change(tenants.rates())
        if self._registry is not None:
            self._registry.tenants.change(tenants.sessions())
        return sum([self._check_key(socket) for socket in self._sockets.values()])

    def _check_key(self, socket: ServedSocket) -> bool:
        """Begin to close a socket if its key was removed, or belongs to another tenant now. Returns whether
        that is so."""
        keys, client = self.tenants.keys, socket.client
        if keys is None or not client.key or keys.opens((client.key, *client.aliases), client.salt):
            return False
        socket.leave(KeyRemoved())
        return True

    async def snapshot(self, salt: bytes = b"", *, all_tenants: bool = True) -> MetricsSnapshot:
        """The statistics now. ``salt``: of the tenant that asks; its own numbers are in it. ``all_tenants``:
        false leaves out the totals of the server."""
        if not all_tenants:
            return MetricsSnapshot(self.state().ready, None, {}, {}, await self._tenant(salt))
        try:
            engine = await self._link.statistics()
        except EngineGone:
            engine = {}
        sessions = self._registry.statistics() if self._registry is not None else {}
        if self._registry is not None and self._journal is not None:
            sessions = {**sessions, **await self._journal.statistics()}
        gateway = {**sessions, **self._lengths()}
        return MetricsSnapshot(
            self.state().ready,
            self._link.engine_number,
            gateway,
            engine,
            await self._tenant(salt),
            self.turns.metrics,
            self.model if self.settings.metrics_compat == "vllm" else None,
        )

    async def _tenant(self, salt: bytes) -> TenantSnapshot | None:
        name, limits = self.tenants.name(salt), self.tenants.of_salt(salt)
        if not name or self._registry is None:
            return None
        used = await self._registry.statistics_of(salt)
        return TenantSnapshot(name, used, {kind: getattr(limits, kind) for kind in ALLOWED})

    def _lengths(self) -> dict[str, float]:
        outboxes = [socket.outbox.statistics() for socket in self._sockets.values()]
        return {
            "requests_waiting_for_engine": self._waiting,
            "sockets": len(self._sockets),
            "sessions_live": 0 if self._live is None else len(self._live),
            "responses_running": 0 if self._live is None else self._live.responses,
            "outbox_events": sum(outbox.events for outbox in outboxes),
            "outbox_bytes": sum(outbox.bytes for outbox in outboxes),
            "slow_readers_dropped": self._slow_readers,
            "turns_waiting": len(self.turns.queue),
            "turns_seconds_per_start": self.turns.queue.seconds_per_start,
        }
