"""The live sessions of one server, by id, and which socket each is on.

Opens, resumes, and puts away what nobody comes back to. Knows leases and owners; nothing of frames.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from itertools import islice, takewhile
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec.structs import asdict

from ...runtime.link.client import EngineLink
from ...sdk.frames.session import SessionResource
from ...sessions.errors import SessionLimit, StorageUnavailable
from ...sessions.fork_tree import Page
from ...sessions.items import new_id
from ...sessions.registry import Reopened, SessionRegistry
from ...sessions.session import Session
from ..settings import Limits
from .live_session import Birth, LiveSession

_T = TypeVar("_T")


class Holder(Protocol):
    """The socket a session is on."""

    def moved(self) -> None:
        """The session goes on elsewhere."""


class Registry:
    """All sessions in memory. ``model`` is what they speak with."""

    def __init__(self, book: SessionRegistry, link: EngineLink, model: str, limits: Limits) -> None:
        self._book = book
        self._link = link
        self._model = model
        self._limits = limits
        self._live: dict[str, LiveSession] = {}
        self._holders: dict[str, Holder] = {}
        self._leases: dict[str, tuple[asyncio.TimerHandle, bytes]] = {}
        self._left: dict[
            bytes, dict[str, LiveSession]
        ] = {}  # by tenant: sessions on no socket, longest left first
        self._forks: dict[
            bytes, dict[str, tuple[LiveSession, float]]
        ] = {}  # those nobody has come for, since when
        self._leaving: set[asyncio.Future[None]] = set()
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
        self.make_room(salt)
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

    def make_room(self, salt: bytes, more: int = 1) -> None:
        """Let a tenant open ``more`` sessions: where no places are left, sessions that no socket has and that
        do nothing are put away before their time. `Tenants.room` says whose; of a tenant's the longest left go
        first. One that was ever opened goes only where the journal has it. Raises ``SessionLimit``.
        """
        idle = {
            tenant: map(_id, filter(self._may_go, left.values()))
            for tenant, left in self._left.items()
            if left
        }
        for session_id in self._book.room(salt, more, idle):
            self._put_away(self._live[session_id])

    def _may_go(self, live: LiveSession) -> bool:
        return live.at_rest and (live.session.log.durable or self._book.unopened(live.id))

    async def resume(self, holder: Holder, handle: str, owner: bytes) -> LiveSession:
        """The session that ``handle`` opens, on this socket from now on.

        Raises ``HandleUnknown``, ``RecordDamaged``, ``SessionLimit``, ``StorageUnavailable``.
        """
        found = await self._book.resume(handle, owner, self.make_room)
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

        Raises what ``SessionRegistry.fork`` does.
        """
        return await self._whole(self._forked(live, children, at))

    async def _forked(self, live: LiveSession, children: int, at: str | None) -> list[LiveSession]:
        self._book.check_fork(live.id, children)
        salt = self._book.salt_of(live.id)
        self._thin_forks(salt, children)
        self.make_room(salt, children)
        births = [live.birth_of_child() for _ in range(children)]
        sessions = await self._book.fork(live.id, [msgspec.msgpack.encode(birth) for birth in births], at)
        made: list[LiveSession] = []
        try:
            for session, birth in zip(sessions, births, strict=True):
                child = LiveSession.begin(session, birth, self._limits, self._link.hello.vocab_size)
                child.conversation.configure_as(live.conversation)
                child.resumable = True
                made.append(child)
        except BaseException:  # nobody has a handle of any of them
            for session in sessions:
                await self._book.discard(session.id)
            raise
        for child in made:
            self._enter(child)
            self._wait_for(child)
            self._forks.setdefault(salt, {})[child.id] = (child, asyncio.get_running_loop().time())
        return made

    def _thin_forks(self, salt: bytes, more: int) -> None:
        """Put away a tenant's oldest forks that nobody has come for, so that ``more`` are within its bound.

        Young ones stay, and those that the journal does not have. Raises ``SessionLimit`` where too many stay.
        """
        forks, most = self._forks.get(salt, {}), self._limits.unopened_forks
        excess = len(forks) + more - most
        if excess > 0:
            born = asyncio.get_running_loop().time() - self._limits.young_seconds
            by_age = takewhile(lambda one: one[1] <= born, forks.values())
            old = list(islice((fork for fork, _ in by_age if self._may_wait(fork)), excess))
            if len(old) < excess:
                raise SessionLimit(
                    f"This tenant has {len(forks)} forks that nobody has opened; it may have {most}: open or"
                    " prune some first, or wait"
                )
            for fork in old:
                self._put_away(fork)

    @staticmethod
    def _may_wait(fork: LiveSession) -> bool:
        """Whether it can wait in the journal."""
        return fork.at_rest and fork.session.log.durable

    async def tree(self, session_id: str, limit: int, after: str | None) -> Page:
        """A page of this session's fork tree. Raises what ``SessionRegistry.fork_tree_page`` does."""
        return await self._book.fork_tree_page(session_id, limit, after)

    async def name(self, session_id: str, name: str) -> str:
        """Name a session. Raises what ``SessionRegistry.name`` does."""
        return await self._book.name(session_id, name)

    async def prune(self, session_id: str, target: str) -> None:
        """End a session of this one's tree and forget it. Raises what ``SessionRegistry.check_pruned`` does."""
        owner = self._book.get(session_id).handles.owner  # of the whole tree
        number = await self._book.check_pruned(session_id, target)
        await self._whole(self._pruned(target, number, owner))

    async def _pruned(self, target: str, number: int | None, owner: bytes) -> None:
        await self._book.wait_for_reopening(
            owner
        )  # one that is coming back just now is among those below, or not at all
        live, holder = self._live.pop(target, None), self._holders.pop(target, None)
        self._end_lease(target)
        if holder is not None:
            holder.moved()
        try:
            if live is not None:
                await self._book.close(target, leave_readers=live.aclose)
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
        live.event_log.detach()
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
        salt = self._book.salt_of(live.id)
        timer = loop.call_later(self._limits.resume_seconds, self._put_away, live)
        self._leases[live.id] = (timer, salt)
        self._left.setdefault(salt, {})[live.id] = live

    def _end_lease(self, session_id: str) -> None:
        """Somebody came, or it is put away."""
        timer, salt = self._leases.pop(session_id, (None, b""))
        if timer is not None:
            timer.cancel()
            self._left[salt].pop(session_id)
            self._forks.get(salt, {}).pop(session_id, None)

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
        self._end_lease(live.id)
        return live

    def _put_away(self, live: LiveSession) -> None:
        """End a session here, unless somebody came back; its place is free at once."""
        self._end_lease(live.id)
        if self._closing or live.id not in self._holders:
            self._leave(live, interrupt=self._closing)

    def _leave(self, live: LiveSession, *, interrupt: bool) -> asyncio.Future[None]:
        """Done when all that it still has to do is done."""
        if self._live.pop(live.id, None) is None:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            done.set_result(None)
            return done
        leaving = asyncio.ensure_future(
            self._book.close(live.id, leave_readers=live.aclose, interrupt=interrupt)
        )
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)
        return leaving


def _id(live: LiveSession) -> str:
    return live.id
