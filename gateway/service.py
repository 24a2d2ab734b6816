"""What all routes share: the engine's link, the live sessions, and the sockets that are open.

`Service` admits clients and composes faces. The server and the embedded engine both use it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass

from ..runtime.errors import EngineDied, EngineGone
from ..runtime.link.client import EngineLink
from ..runtime.link.messages import Phase
from ..sessions.journal.journal import Journal
from ..sessions.registry import SessionRegistry
from .errors import Draining, KeyRemoved, ModelNotServed, SlowReader
from .live_session import LiveSession
from .live_sessions import LiveSessions
from .metrics import MetricsSnapshot, TenantSnapshot
from .net.channel import Channel
from .realtime.session import RealtimeFace
from .realtime.socket import ClientIdentity, RealtimeSocket
from .settings import GatewaySettings
from .tenants import ALLOWED, Tenants

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServiceState:
    """The engine's state as its heartbeats tell it. ``alive``: a restart of the server would not help.

    ``journal``: how the journal differs from that of the last start.
    """

    alive: bool
    ready: bool
    phase: Phase
    detail: str
    fraction: float
    journal: tuple[str, ...] = ()

    def told(self) -> dict[str, object]:
        """The body of an answer to a probe."""
        status = "ready" if self.ready else "not ready" if self.alive else "hung"
        told = {"status": status, "phase": self.phase, "detail": self.detail, "fraction": self.fraction}
        return {**told, "journal": list(self.journal)} if self.journal else told


class Service:
    """One model behind one link. There are no sessions until the engine was loaded for the first time.

    ``tenants``: those of the settings, if they have been read already. Raises ``KeysUnusable``.
    """

    def __init__(
        self, settings: GatewaySettings, model: str, link: EngineLink, tenants: Tenants | None = None
    ) -> None:
        self.settings = settings
        self.tenants = tenants or Tenants.of(settings)
        self.model = model
        self.started = int(time.time())
        self._registry: SessionRegistry | None = None
        self._journal: Journal | None = None
        self._live: LiveSessions | None = None
        self._link = link
        self._sockets: dict[asyncio.Task[None], RealtimeSocket] = {}
        self._draining = False
        self._slow_readers = 0
        link.on_recovery(self._recovered)

    def open(self, registry: SessionRegistry, journal: Journal | None = None) -> None:
        """Let sessions be opened from now on. ``journal``: the registry's, if it has one."""
        self._registry = registry
        self._journal = journal
        self._live = LiveSessions(registry, self.settings.limits)
        if journal is not None:
            journal.watchers.add(self._live.alarm)

    async def close(self) -> None:
        """Admit no client any more, say goodbye on all sockets, end all sessions.

        An engine that does not answer holds this up for ``close_seconds`` at most.
        """
        self._draining = True
        if self._live is not None:
            self._live.stop()
        for socket in self._sockets.values():
            socket.leave()
        if self._sockets:
            await asyncio.wait(list(self._sockets), timeout=self.settings.limits.close_seconds)
        registry, live = self._registry, self._live
        self._registry = self._live = None
        if registry is not None and live is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.settings.limits.close_seconds):
                    await live.aclose()
                    await registry.aclose()

    def sessions(self) -> list[LiveSession]:
        """The sessions in memory, on a connection or not."""
        return [] if self._live is None else self._live.live()

    def state(self) -> ServiceState:
        """What the probes answer."""
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

    def check_model(self, name: str | None) -> None:
        """Raises ``ModelNotServed`` where a client asks for another model."""
        if name and name != self.model:
            raise ModelNotServed(f"This server serves {self.model!r}, not {name!r}")

    def admit(self, model: str | None) -> LiveSessions:
        """The sessions, for a face to open one.

        Raises ``ModelNotServed``, ``Draining``, or ``EngineDied`` until the engine was loaded once.
        """
        self.check_model(model)
        if self._draining:
            raise Draining("The server is going away")
        if self._live is None:
            raise EngineDied("The engine is loading")
        return self._live

    async def converse(self, channel: Channel, client: ClientIdentity | None = None) -> None:
        """Serve one Realtime socket until either side ends it. The calling task is the connection's."""
        limits = self.settings.limits
        face = RealtimeFace(self.admit(None), self._link, self.model, limits)
        socket = RealtimeSocket(channel, face, client or ClientIdentity(), limits)
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
        """Take no new work, tell all clients, give running replies ``drain_seconds`` to end; cut the rest."""
        self._draining = True
        seconds = self.settings.drain_seconds
        ending = [asyncio.ensure_future(session.drain(seconds)) for session in self.sessions()]
        if ending:
            _, late = await asyncio.wait(ending, timeout=seconds + self.settings.limits.close_seconds)
            for task in late:
                task.cancel()

    def _recovered(self, lost_seconds: float) -> None:
        """Another engine has taken over: tell all sessions, idle ones too."""
        if self._live is not None:
            self._live.recovered(lost_seconds)

    def change_tenants(self, tenants: Tenants) -> int:
        """Admit these from now on, with these numbers of sessions and turns.

        Closes the sockets of keys that are gone or another tenant's; returns their number. The limits that the
        engine and the journal enforce stay as they were at the start.
        """
        self.tenants = tenants
        if self._registry is not None:
            self._registry.tenants.change(tenants.sessions())
        return sum([self._check_key(socket) for socket in self._sockets.values()])

    def _check_key(self, socket: RealtimeSocket) -> bool:
        """Close a socket if its key is not valid any more. Returns whether that is so."""
        keys, client = self.tenants.keys, socket.client
        if keys is None or not client.key or keys.opens(client.key, client.salt):
            return False
        socket.leave(KeyRemoved())
        return True

    async def snapshot(self, salt: bytes = b"", *, all_tenants: bool = True) -> MetricsSnapshot:
        """Statistics now: of ``all_tenants`` or of none, and those of the tenant that asks."""
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
            self.state().ready, self._link.engine_number, gateway, engine, await self._tenant(salt)
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
            "sockets": len(self._sockets),
            "sessions_live": 0 if self._live is None else len(self._live),
            "responses_running": 0 if self._live is None else self._live.responses,
            "outbox_events": sum(outbox.events for outbox in outboxes),
            "outbox_bytes": sum(outbox.bytes for outbox in outboxes),
            "slow_readers_dropped": self._slow_readers,
        }
