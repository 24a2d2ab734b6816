"""What the routes share: the engine's link, the sessions, and the sockets that run.

Composes; decides only who may come in now. The same for the server and for the embedded engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ..runtime.errors import EngineDied, EngineGone
from ..runtime.link.client import EngineLink
from ..runtime.link.messages import Phase
from ..sessions.journal.journal import Journal
from ..sessions.registry import SessionRegistry
from .auth import Keys
from .errors import Draining, KeyRemoved, ModelNotServed, SlowReader
from .metrics import Snapshot, TenantSnapshot
from .realtime.channel import Channel
from .realtime.live_session import LiveSession
from .realtime.live_sessions import Registry
from .realtime.socket import Realtime, Visitor
from .settings import GatewaySettings
from .tenants import ALLOWED, Tenants

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class State:
    """How the engine is, as far as its heartbeats tell. ``alive``: no restart of the server would help.

    ``journal``: how it differs from that of the last start, where it does.
    """

    alive: bool
    ready: bool
    phase: Phase
    detail: str
    fraction: float
    journal: tuple[str, ...] = ()

    def told(self) -> dict[str, object]:
        """As the probes answer it."""
        status = "ready" if self.ready else "not ready" if self.alive else "hung"
        told = {"status": status, "phase": self.phase, "detail": self.detail, "fraction": self.fraction}
        return {**told, "journal": list(self.journal)} if self.journal else told


class Service:
    """One model behind one link. ``book`` is absent until the engine was loaded for the first time.

    ``tenants``: those of the settings, where they have been read already. Raises ``KeysUnusable``.
    """

    def __init__(
        self, settings: GatewaySettings, model: str, link: EngineLink, tenants: Tenants | None = None
    ) -> None:
        self.settings = settings
        self.tenants = tenants or Tenants.of(settings)
        self.model = model
        self.started = int(time.time())
        self._book: SessionRegistry | None = None
        self._journal: Journal | None = None
        self._registry: Registry | None = None
        self._link = link
        self._running: dict[asyncio.Task[None], Realtime] = {}
        self._draining = False
        self._slow_readers = 0
        self._watchers: list[Callable[[Keys | None], object]] = []
        link.on_recovery(self._recovered)

    def open(self, book: SessionRegistry, journal: Journal | None = None) -> None:
        """Sessions may be made from now on; ``journal`` is the book's, where it has one."""
        self._book = book
        self._journal = journal
        self._registry = Registry(book, self._link, self.model, self.settings.limits)
        if journal is not None:
            journal.watchers.add(self._registry.alarm)

    async def close(self) -> None:
        """Let nobody in any more, say goodbye on all sockets, end all sessions.

        An engine that does not answer holds it up for ``close_seconds`` at most.
        """
        self._draining = True
        if self._registry is not None:
            self._registry.stop()
        for realtime in self._running.values():
            realtime.leave()
        if self._running:
            await asyncio.wait(list(self._running), timeout=self.settings.limits.close_seconds)
        book, registry = self._book, self._registry
        self._book = self._registry = None
        if book is not None and registry is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.settings.limits.close_seconds):
                    await registry.aclose()
                    await book.aclose()

    @property
    def connections(self) -> frozenset[asyncio.Task[None]]:
        """The tasks of the connections that are open."""
        return frozenset(self._running)

    def sessions(self) -> list[LiveSession]:
        """Those in memory, with or without a socket."""
        return [] if self._registry is None else self._registry.live()

    def state(self) -> State:
        """For the probes."""
        link, beat = self._link, self._link.heartbeat
        lack = self._journal.fault if self._journal is not None and self._book is not None else None
        ready = link.ready and self._book is not None and not self._draining and lack is None
        return State(
            alive=link.overdue == 0.0,
            ready=ready,
            phase=link.phase,
            detail="draining" if self._draining else lack.message if lack else beat.detail if beat else "",
            fraction=beat.fraction if beat else 0.0,
            journal=() if self._journal is None else tuple(self._journal.mismatches),
        )

    def check_model(self, name: str | None) -> None:
        """Raises ``ModelNotServed`` where a client asks for another model."""
        if name and name != self.model:
            raise ModelNotServed(f"This server serves {self.model!r}, not {name!r}")

    def admit(self, model: str | None) -> SessionRegistry:
        """Raises ``ModelNotServed``, ``Draining``, or ``EngineDied`` until the engine is first loaded."""
        self.check_model(model)
        if self._draining:
            raise Draining("The server is going away")
        if self._book is None:
            raise EngineDied("The engine is loading")
        return self._book

    async def converse(self, channel: Channel, visitor: Visitor | None = None) -> None:
        """One socket, until either side ends it; the calling task is the connection's."""
        self.admit(None)
        assert self._registry is not None, "there is one where there is a book"
        realtime = Realtime(channel, self._registry, visitor or Visitor(), self.settings.limits)
        task = asyncio.current_task()
        assert task is not None, "a connection has a task of its own"
        self._running[task] = realtime
        self._check_key(realtime)  # it may have been removed since the request was let in
        try:
            await realtime.run()
        except SlowReader as slow:
            log.warning("the client at %s was dropped: %s", realtime.visitor.address or "?", slow.message)
            self._slow_readers += 1
            channel.drop()
        finally:
            del self._running[task]

    async def drain(self) -> None:
        """Take no new work, tell all clients, give replies that run ``drain_seconds`` to end; cut the rest."""
        self._draining = True
        seconds = self.settings.drain_seconds
        ending = [asyncio.ensure_future(session.drain(seconds)) for session in self.sessions()]
        if ending:
            _, late = await asyncio.wait(ending, timeout=seconds + self.settings.limits.close_seconds)
            for task in late:
                task.cancel()

    def _recovered(self, lost_seconds: float) -> None:
        """Another engine has taken over: all sessions are told, idle ones too."""
        for session in self.sessions():
            session.recovered(lost_seconds)

    def on_keys(self, told: Callable[[Keys | None], object]) -> None:
        """``told`` gets the keys whenever they change."""
        self._watchers.append(told)

    def change_tenants(self, tenants: Tenants) -> int:
        """From now on these come in, with these numbers of sessions and turns.

        Closes the sockets whose key is gone, or another tenant's; returns how many. What the engine and the
        journal hold tenants to stays as it was at the start.
        """
        self.tenants = tenants
        for told in self._watchers:
            told(tenants.keys)
        if self._book is not None:
            self._book.change_limits(tenants.sessions())
        return sum([self._check_key(realtime) for realtime in self._running.values()])

    def _check_key(self, realtime: Realtime) -> bool:
        """Part with a socket whose key is not valid any more; whether that is so."""
        keys, visitor = self.tenants.keys, realtime.visitor
        if keys is None or not visitor.key or keys.opens(visitor.key, visitor.salt):
            return False
        realtime.leave(KeyRemoved())
        return True

    async def snapshot(self, salt: bytes = b"", *, everybody: bool = True) -> Snapshot:
        """Statistics now: ``everybody``'s or none, and those of the tenant who asks."""
        if not everybody:
            return Snapshot(self.state().ready, None, {}, {}, await self._tenant(salt))
        try:
            engine = await self._link.statistics()
        except EngineGone:
            engine = {}
        sessions = self._book.statistics() if self._book is not None else {}
        if self._book is not None and self._journal is not None:
            sessions = {**sessions, **await self._journal.statistics()}
        gateway = {**sessions, **self._lengths()}
        return Snapshot(
            self.state().ready, self._link.engine_number, gateway, engine, await self._tenant(salt)
        )

    async def _tenant(self, salt: bytes) -> TenantSnapshot | None:
        name, limits = self.tenants.name(salt), self.tenants.of_salt(salt)
        if not name or self._book is None:
            return None
        used = await self._book.statistics_of(salt)
        return TenantSnapshot(name, used, {kind: getattr(limits, kind) for kind in ALLOWED})

    def _lengths(self) -> dict[str, float]:
        outboxes = [realtime.outbox.statistics() for realtime in self._running.values()]
        return {
            "sockets": len(self._running),
            "sessions_live": 0 if self._registry is None else len(self._registry),
            "responses_running": 0 if self._registry is None else self._registry.responses,
            "outbox_events": sum(outbox.events for outbox in outboxes),
            "outbox_bytes": sum(outbox.bytes for outbox in outboxes),
            "slow_readers_dropped": self._slow_readers,
        }
