"""The live sessions of one server, by id, and which socket each is on.

Opens, resumes, and puts away what nobody comes back to. Knows leases and owners; nothing of frames.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec.structs import asdict

from ..runtime.link.client import EngineLink
from ..sdk.frames.session import SessionResource
from ..sessions.book import Reopened, SessionBook
from ..sessions.errors import SessionLimit, StorageUnavailable
from ..sessions.family import Member
from ..sessions.items import new_id
from ..sessions.session import Session
from .live import Birth, LiveSession
from .settings import Limits

_T = TypeVar("_T")


class Holder(Protocol):
    """The socket a session is on."""

    def moved(self) -> None:
        """The session goes on elsewhere."""


class Registry:
    """All sessions in memory. ``model`` is what they speak with."""

    def __init__(self, book: SessionBook, link: EngineLink, model: str, limits: Limits) -> None:
        self._book = book
        self._link = link
        self._model = model
        self._limits = limits
        self._live: dict[str, LiveSession] = {}
        self._holders: dict[str, Holder] = {}
        self._leases: dict[str, asyncio.TimerHandle] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._works: set[asyncio.Future[Any]] = set()
        self._closing = False

    def __len__(self) -> int:
        return len(self._live)

    @property
    def responses(self) -> int:
        """Responses that run."""
        return sum(live.responses for live in self._live.values())

    def live(self) -> list[LiveSession]:
        """All of them."""
        return list(self._live.values())

    def open(self, holder: Holder, owner: bytes, salt: bytes = b"") -> LiveSession:
        """A new session on this socket; ``salt`` separates its tenant's cached KV.

        Raises ``SessionLimit``, ``StorageUnavailable``.
        """
        defaults = asdict(self._link.hello.defaults)
        resource = SessionResource(id="", model=self._model, **defaults)
        birth = Birth(session=resource, conversation=new_id("conv"))
        vocab_size = self._link.hello.vocab_size
        session = self._book.create(owner=owner, salt=salt, config=msgspec.msgpack.encode(birth))
        try:
            live = LiveSession.begin(session, birth, self._limits, vocab_size)
        except BaseException:
            self._discard(session)
            raise
        return self._hold(live, holder)

    async def make_room(self, salt: bytes, more: int = 1) -> None:
        """Where a tenant has as many open as it may: its sessions that nobody is on, and that say nothing, are
        put away before their time, as far as they can come back from the journal; the longest left first.
        """
        if self._book.has_room(salt, more):
            return
        for live in [self._live[session_id] for session_id in self._leases if session_id in self._live]:
            if self._book.has_room(salt, more):
                return
            idle = live.id in self._leases and not live.responses and live.session.log.durable
            if idle and self._book.salt_of(live.id) == salt:
                self._leases.pop(live.id).cancel()
                await self._leave(live, interrupt=False)

    async def resume(self, holder: Holder, handle: str, owner: bytes, salt: bytes = b"") -> LiveSession:
        """The session that ``handle`` opens, on this socket from now on.

        Raises ``HandleUnknown``, ``RecordDamaged``, ``SessionLimit``, ``StorageUnavailable``.
        """
        try:
            found = await self._book.resume(handle, owner)
        except SessionLimit:
            await self.make_room(salt)
            found = await self._book.resume(handle, owner)
        if isinstance(found, Reopened):
            try:
                live = LiveSession.again(found, self._limits, self._link.hello.vocab_size)
            except BaseException:  # in memory with nobody to speak for it, its handle would open nothing
                self._discard(found.session, interrupt=True)
                raise
        else:
            live = self._live[found.id]
        before = self._holders.get(live.id)
        if before is not None and before is not holder:
            before.moved()
        return self._hold(live, holder)

    async def fork(self, live: LiveSession, children: int, at: str | None) -> list[LiveSession]:
        """Sessions that go on from this one. Their lease runs: who has a handle comes for them.

        Raises what ``SessionBook.fork`` does.
        """
        return await self._whole(self._forked(live, children, at))

    async def _forked(self, live: LiveSession, children: int, at: str | None) -> list[LiveSession]:
        await self.make_room(self._book.salt_of(live.id), children)
        births = [live.birth_of_child() for _ in range(children)]
        sessions = await self._book.fork(live.id, [msgspec.msgpack.encode(birth) for birth in births], at)
        made: list[LiveSession] = []
        try:
            for session, birth in zip(sessions, births, strict=True):
                child = LiveSession.begin(session, birth, self._limits, self._link.hello.vocab_size)
                child.conversation.configure(
                    msgspec.structs.replace(live.conversation.session, id=session.id)
                )
                child.resumable = True
                made.append(child)
        except BaseException:  # nobody has a handle of any of them
            for session in sessions:
                await self._book.discard(session.id)
            raise
        for child in made:
            self._enter(child)
            self._wait_for(child)
        return made

    async def tree(self, session_id: str) -> list[Member]:
        """The tree of sessions that this one belongs to. Raises what ``SessionBook.family`` does."""
        return await self._book.family(session_id)

    async def name(self, session_id: str, name: str) -> str:
        """Name a session. Raises what ``SessionBook.name`` does."""
        return await self._book.name(session_id, name)

    async def prune(self, session_id: str, target: str) -> None:
        """End a session of this one's tree and forget it. Raises what ``SessionBook.check_pruned`` does."""
        number = await self._book.check_pruned(session_id, target)
        await self._whole(self._pruned(target, number))

    async def _pruned(self, target: str, number: int | None) -> None:
        await self._book.settled()  # who is coming back just now is among those below, or not at all
        live, holder = self._live.pop(target, None), self._holders.pop(target, None)
        if (lease := self._leases.pop(target, None)) is not None:
            lease.cancel()
        if holder is not None:
            holder.moved()
        try:
            if live is not None:
                await self._book.close(target, settle=live.aclose)
        finally:
            await self._book.forget(target, number)

    async def _whole(self, work: Coroutine[None, None, _T]) -> _T:
        """Work on several sessions, to its end: the one that asked may be pruned meanwhile."""
        task = asyncio.ensure_future(work)
        self._works.add(task)
        task.add_done_callback(self._works.discard)
        return await asyncio.shield(task)

    def left(self, live: LiveSession, holder: Holder) -> None:
        """The socket is gone. A client that can come back has its lease to do so."""
        if self._holders.get(live.id) is not holder:
            return  # it went on elsewhere
        del self._holders[live.id]
        live.feed.detach()
        if live.resumable and not self._closing:
            self._wait_for(live)
        else:
            self._put_away(live)

    def alarm(self, fault: StorageUnavailable) -> None:
        """The journal cannot write."""
        for live in self.live():
            live.alarm(fault)

    def stop(self) -> None:
        """From now on what runs is interrupted, not ended, when its session is put away."""
        self._closing = True

    async def aclose(self) -> None:
        """Put all away."""
        self.stop()
        await asyncio.gather(*self._works, return_exceptions=True)
        for live in self.live():
            self._put_away(live)
        await asyncio.gather(*self._leaving)

    def _wait_for(self, live: LiveSession) -> None:
        """Nobody has it: it is put away unless somebody comes."""
        loop = asyncio.get_running_loop()
        self._leases[live.id] = loop.call_later(self._limits.resume_seconds, self._put_away, live)

    def _discard(self, session: Session, *, interrupt: bool = False) -> None:
        """Close a session that could not be brought to life; the journal keeps one that was there before."""
        close = self._book.close(session.id, interrupt=True) if interrupt else self._book.discard(session.id)
        leaving = asyncio.ensure_future(close)
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    def _enter(self, live: LiveSession) -> None:
        self._live[live.id] = live
        live.forker = self.fork
        live.relatives.keeper = self

    def _hold(self, live: LiveSession, holder: Holder) -> LiveSession:
        self._enter(live)
        self._holders[live.id] = holder
        lease = self._leases.pop(live.id, None)
        if lease is not None:
            lease.cancel()
        return live

    def _put_away(self, live: LiveSession) -> None:
        self._leases.pop(live.id, None)
        leaving = asyncio.ensure_future(self._leave(live, interrupt=self._closing))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def _leave(self, live: LiveSession, *, interrupt: bool) -> None:
        if live.id in self._holders and not interrupt:
            return  # somebody came back just now
        if self._live.pop(live.id, None) is not None:
            await self._book.close(live.id, settle=live.aclose, interrupt=interrupt)
