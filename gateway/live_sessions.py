"""The live sessions of one server, by id, and the connection that each is on.

`LiveSessions` opens, resumes, forks and prunes sessions for every face, and puts away those that no client
comes back to. It knows owners, tenants and leases, and no protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from itertools import islice, takewhile
from typing import Any, Protocol, TypeVar

from ..sessions.errors import SessionLimit, StorageUnavailable
from ..sessions.registry import Reopened, SessionRegistry
from ..sessions.session import Session
from .live_session import LiveSession, spawn
from .settings import ClientLimits

_T = TypeVar("_T")


class Face(Protocol):
    """A protocol that clients speak. It brings sessions to life, each with a `SessionFace` of its own."""

    def config(self) -> bytes:
        """What the journal keeps of a new session, for `reopen`."""

    def begin(self, session: Session, config: bytes) -> LiveSession:
        """Bring a new session to life."""

    def reopen(self, reopened: Reopened) -> LiveSession:
        """Bring a session from the journal to life. A turn that was interrupted goes on."""


class SessionConnection(Protocol):
    """A client's connection, as long as a session is on it."""

    def moved(self) -> None:
        """The session is on another connection now, or is closed."""


class LiveSessions:
    """All sessions in memory, of all faces."""

    def __init__(self, registry: SessionRegistry, limits: ClientLimits) -> None:
        self.registry = registry
        self._limits = limits
        self._live: dict[str, LiveSession] = {}
        self._connections: dict[str, SessionConnection] = {}
        self._leases: dict[str, tuple[asyncio.TimerHandle, bytes]] = {}  # with the tenant's salt
        self._left: dict[bytes, dict[str, LiveSession]] = {}
        """Sessions on no connection, by tenant; those left longest first."""
        self._forks: dict[bytes, dict[str, tuple[LiveSession, float]]] = {}
        """Forks that no client has opened, by tenant, and since when."""
        self._leaving: set[asyncio.Task[None]] = set()
        self._works: set[asyncio.Task[Any]] = set()
        self._closing = False

    def __len__(self) -> int:
        return len(self._live)

    @property
    def responses(self) -> int:
        """The number of turns that run."""
        return sum(len(live.running) for live in self._live.values())

    def live(self) -> list[LiveSession]:
        """All live sessions."""
        return list(self._live.values())

    # --- opening and resuming -------------------------------------------------------------------------------

    def open(self, face: Face, connection: SessionConnection, owner: bytes, salt: bytes = b"") -> LiveSession:
        """Open a new session on this connection. ``salt`` separates its tenant's cached KV.

        Raises ``SessionLimit``, ``StorageUnavailable``.
        """
        self.make_room(salt)
        config = face.config()
        session = self.registry.create(owner=owner, salt=salt, config=config)
        try:
            live = face.begin(session, config)
        except BaseException:
            self._discard(session)
            raise
        return self._attach(live, connection)

    def make_room(self, salt: bytes, more: int = 1) -> None:
        """Make sure that a tenant can open ``more`` sessions.

        Where no places are left, sessions that are on no connection and do nothing are put away early: first
        those left longest of the tenant that `sessions.tenants.Tenants.room` chooses. A session that a client
        has opened is put away only where the journal has it. Raises ``SessionLimit``.
        """
        idle = {
            tenant: (live.id for live in left.values() if self._may_go(live))
            for tenant, left in self._left.items()
            if left
        }
        for session_id in self.registry.tenants.room(salt, more, idle):
            self._put_away(self._live[session_id])

    def _may_go(self, live: LiveSession) -> bool:
        return live.at_rest and (live.session.log.durable or self.registry.unopened(live.id))

    async def resume(
        self, face: Face, connection: SessionConnection, handle: str, owner: bytes
    ) -> LiveSession:
        """Move the session that ``handle`` opens to this connection.

        Raises ``HandleUnknown``, ``RecordDamaged``, ``SessionLimit``, ``StorageUnavailable``.
        """
        found = await self.registry.resume(handle, owner, self.make_room)
        if isinstance(found, Reopened):
            try:
                live = face.reopen(found)
            except BaseException:  # its handle would open nothing while it stays in memory without a face
                self._discard(found.session, interrupt=True)
                raise
        else:
            live = self._live[found.id]
        before = self._connections.get(live.id)
        if before is not None and before is not connection:
            before.moved()
        return self._attach(live, connection)

    # --- the fork tree --------------------------------------------------------------------------------------

    async def fork(self, live: LiveSession, children: int, at: str | None) -> list[LiveSession]:
        """Open sessions that go on from this one. Each waits for a client that has its handle.

        Raises what ``SessionRegistry.fork`` does.
        """
        return await self._whole(self._fork(live, children, at))

    async def _fork(self, live: LiveSession, children: int, at: str | None) -> list[LiveSession]:
        self.registry.check_fork(live.id, children)
        salt = self.registry.salt_of(live.id)
        self._thin_forks(salt, children)
        self.make_room(salt, children)
        configs = [live.face.child_config() for _ in range(children)]
        sessions = await self.registry.fork(live.id, configs, at)
        made: list[LiveSession] = []
        try:
            for session, config in zip(sessions, configs, strict=True):
                made.append(live.face.fork(session, config))
        except BaseException:  # no client has a handle of any of them
            for session in sessions:
                await self.registry.discard(session.id)
            raise
        for child in made:
            child.resumable = True
            self._live[child.id] = child
            self._begin_lease(child)
            self._forks.setdefault(salt, {})[child.id] = (child, asyncio.get_running_loop().time())
        return made

    def _thin_forks(self, salt: bytes, more: int) -> None:
        """Put away a tenant's oldest unopened forks, so that it may have ``more``.

        Young forks stay, and those that the journal does not have. Raises ``SessionLimit`` where too many stay.
        """
        forks, most = self._forks.get(salt, {}), self._limits.unopened_forks
        excess = len(forks) + more - most
        if excess > 0:
            born = asyncio.get_running_loop().time() - self._limits.young_seconds
            by_age = takewhile(lambda one: one[1] <= born, forks.values())
            kept = (fork for fork, _ in by_age if fork.at_rest and fork.session.log.durable)
            old = list(islice(kept, excess))
            if len(old) < excess:
                raise SessionLimit(
                    f"This tenant has {len(forks)} unopened forks; it may have {most}: open or prune some"
                    " first, or wait"
                )
            for fork in old:
                self._put_away(fork)

    async def prune(self, session_id: str, target: str) -> None:
        """Close and forget another session of this one's tree. Raises what ``SessionRegistry.check_pruned``
        does; then nothing has changed.
        """
        owner = self.registry.get(session_id).handles.owner  # of the whole tree
        number = await self.registry.check_pruned(session_id, target)
        await self._whole(self._prune(target, number, owner))

    async def _prune(self, target: str, number: int | None, owner: bytes) -> None:
        await self.registry.wait_for_reopening(owner)  # what is being resumed is in `_live` after this
        live, connection = self._live.pop(target, None), self._connections.pop(target, None)
        self._end_lease(target)
        if connection is not None:
            connection.moved()
        try:
            if live is not None:
                await self.registry.close(target, leave_readers=live.aclose)
        finally:
            await self.registry.forget(target, number)

    async def _whole(self, work: Coroutine[None, None, _T]) -> _T:
        """Run work on several sessions to its end, even if the session that asked is pruned meanwhile."""
        return await asyncio.shield(spawn(work, self._works))

    # --- leaving --------------------------------------------------------------------------------------------

    def left(self, live: LiveSession, connection: SessionConnection) -> None:
        """The connection is gone. A client that can resume the session has until the lease ends."""
        if self._connections.get(live.id) is not connection:
            return  # the session is on another one
        del self._connections[live.id]
        live.face.detach()
        if live.resumable and not self._closing:
            self._begin_lease(live)
        else:
            self._put_away(live)

    def alarm(self, fault: StorageUnavailable) -> None:
        """The journal cannot write: tell every session."""
        for live in self.live():
            live.face.alarm(fault)

    def recovered(self, lost_seconds: float) -> None:
        """Another engine has taken over: tell every session."""
        for live in self.live():
            live.face.recovered(lost_seconds)

    def stop(self) -> None:
        """From now on a turn of a session that is put away is interrupted: in the journal it has not ended."""
        self._closing = True

    async def aclose(self) -> None:
        """Put all sessions away."""
        self.stop()
        await asyncio.gather(*self._works, return_exceptions=True)
        for live in self.live():
            self._put_away(live)
        await asyncio.gather(*self._leaving)

    def _begin_lease(self, live: LiveSession) -> None:
        """The session is on no connection: it is put away when the lease ends."""
        loop = asyncio.get_running_loop()
        salt = self.registry.salt_of(live.id)
        timer = loop.call_later(self._limits.resume_seconds, self._put_away, live)
        self._leases[live.id] = (timer, salt)
        self._left.setdefault(salt, {})[live.id] = live

    def _end_lease(self, session_id: str) -> None:
        """The session is on a connection again, or is put away."""
        timer, salt = self._leases.pop(session_id, (None, b""))
        if timer is not None:
            timer.cancel()
            self._left[salt].pop(session_id)
            self._forks.get(salt, {}).pop(session_id, None)

    def _discard(self, session: Session, *, interrupt: bool = False) -> None:
        """Close a session that its face could not bring to life.

        The journal forgets a new one, and keeps one that was there before (``interrupt``).
        """
        registry = self.registry
        close = registry.close(session.id, interrupt=True) if interrupt else registry.discard(session.id)
        spawn(close, self._leaving)

    def _attach(self, live: LiveSession, connection: SessionConnection) -> LiveSession:
        self._live[live.id] = live
        self._connections[live.id] = connection
        self._end_lease(live.id)
        return live

    def _put_away(self, live: LiveSession) -> None:
        """Close a session here, unless a client came back; its place is free at once."""
        self._end_lease(live.id)
        gone = self._closing or live.id not in self._connections
        if gone and self._live.pop(live.id, None) is not None:
            close = self.registry.close(live.id, leave_readers=live.aclose, interrupt=self._closing)
            spawn(close, self._leaving)
