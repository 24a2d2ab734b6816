"""The session registry: which sessions are open, how many may be, and how a handle opens one again.

A session is in memory while a client uses it. With a journal it can be opened again from there. Knows nothing
of sockets or of what a client has seen.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import msgspec

from ..runtime.link.client import EngineLink
from .engine_copy import EngineCopy
from .errors import HandleUnknown, SessionLimit, SessionUnknown, StorageUnavailable
from .fork_tree import ForkTree, Member, Page, root_of
from .handles import SessionHandles, digest_of
from .history import History
from .items import new_id
from .journal.journal import Journal, JournaledLog
from .journal.records import AnyOperation, Keyring, SessionLog, SessionRecord, drop
from .journal.replay import Replayed, replay
from .placement import Waits
from .session import Session
from .settings import SessionSettings
from .tenants import OpenTenants
from .text.language import Language
from .workers import Workers


@dataclass(frozen=True, slots=True)
class Reopened:
    """A session opened from the journal, its record there, and what the replay of its operations gave."""

    session: Session
    record: SessionRecord
    replayed: Replayed


class SessionRegistry:
    """All sessions of one engine. Without a ``journal`` they end with the process."""

    def __init__(
        self,
        link: EngineLink,
        language: Language,
        settings: SessionSettings | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.language = language
        self.settings = settings or SessionSettings()
        self.journal = journal
        self._link = link
        self._sessions: dict[str, Session] = {}
        self._records: dict[str, SessionRecord] = {}
        self._by_handle: dict[bytes, Session] = {}
        self._closing: dict[str, tuple[asyncio.Event, tuple[bytes, ...]]] = {}  # by id, with their handles
        self._pruned: set[str] = set()  # sessions that are being forgotten
        self._reopening = defaultdict[bytes, asyncio.Lock](asyncio.Lock)  # by owner: one at a time
        self._opened = self._reopened = 0
        self._workers = Workers()
        self.tenants = OpenTenants(self.settings.tenants, self.settings.max_sessions, self._workers)
        self._trees: dict[str, ForkTree] = {}  # by root, of sessions that are open
        self._loading = defaultdict[str, asyncio.Lock](asyncio.Lock)  # by root: the journal is asked once
        self._numbers = itertools.count(1)  # of sessions without a journal
        self.waits = Waits()

    def create(
        self, *, salt: bytes = b"", now: datetime | None = None, owner: bytes = b"", config: bytes = b""
    ) -> Session:
        """Open a new session. ``owner`` names the key that made it; ``config`` is kept with it. Raises
        ``SessionLimit``, ``StorageUnavailable``."""
        self.tenants.check(salt)
        clock = (now or datetime.now().astimezone()).isoformat()
        record = SessionRecord(id=new_id("sess"), owner=owner, salt=salt, clock=clock, config=config)
        if self.journal is not None and (fault := self.journal.fault_of(salt)) is not None:
            raise fault
        with self._birth(record) as log:
            session = self._made(record, log)
        self._opened += 1
        return session

    async def fork(self, session_id: str, configs: Sequence[bytes], at: str | None = None) -> list[Session]:
        """Fork a session where it is now, or behind the item ``at``: one child for each of ``configs``.

        The children share its past, in the journal and in the engine, where one verb makes them all. Raises
        ``SessionUnknown``, ``SessionLimit``, ``StorageUnavailable``, ``ItemUnknown`` or ``CutInvalid``.
        """
        session = self.get(session_id)
        self.check_fork(session_id, len(configs))
        self.tenants.check(self._records[session_id].salt, len(configs))
        if session.log.fault is not None:
            raise session.log.fault
        history, operations = session.branch(at)
        children: list[Session] = []
        try:
            children.extend(self._child(session, history, operations, config) for config in configs)
            await session.lend(children, history.head)
        except BaseException:  # all of them or none: no client has a handle of those that were made
            for child in children:
                await self.discard(child.id)
            raise
        return children

    def check_fork(self, session_id: str, children: int) -> None:
        """Raises ``SessionUnknown``, or ``SessionLimit`` if its tree has too many unopened forks."""
        self.get(session_id)
        there = len(self._tree_of(session_id).unopened)
        if there + children > self.settings.max_unopened:
            raise SessionLimit(
                f"This tree has {there} forks that were never opened; it may have {self.settings.max_unopened}:"
                " open or prune some first"
            )

    def unopened(self, session_id: str) -> bool:
        """Whether this is a fork in memory that no client has opened yet."""
        return session_id in self._sessions and session_id in self._tree_of(session_id).unopened

    async def discard(self, session_id: str) -> None:
        """Close a session that no client knows of, and forget it."""
        log = self.get(session_id).log
        tree = self._tree_of(session_id)
        await self.close(session_id)
        tree.drop(session_id)
        log.forget()

    async def fork_tree(self, session_id: str, limit: int | None = None, after: str | None = None) -> Page:
        """At most ``limit`` sessions of this one's fork tree, parents before children: those behind the session
        ``after``, or the first ones.

        Raises ``SessionUnknown``, ``MemberUnknown``, ``RecordDamaged``, ``StorageUnavailable``.
        """
        page = (await self._whole_tree(session_id)).page(limit, after)
        return replace(page, members=[self._shown(member) for member in page.members])

    def _shown(self, member: Member) -> Member:
        session = self._sessions.get(member.id)
        if session is None:
            return member
        told = session.statistics()
        return replace(member, open=True, items=int(told["items"]), tokens=int(told["tokens"]))

    async def name(self, session_id: str, name: str) -> str:
        """Name a session within its fork tree; "" removes the name. Returns the name as it is kept. Raises
        ``NameInvalid``, and what `fork_tree` raises."""
        tree = await self._whole_tree(session_id)
        name = tree.checked_name(name, session_id)
        session, number = self.get(session_id), tree.number(session_id)
        assert number is not None, "it is open"
        record = self._records[session_id] = msgspec.structs.replace(self._records[session_id], name=name)
        tree.add(number, record)
        session.log.rewrite(record)
        return name

    async def check_pruned(self, session_id: str, target: str) -> int | None:
        """Take ``target`` out of the fork tree. Returns its number in the journal, for `forget`; None without
        one. Raises ``MemberUnknown``, ``PruneInvalid``, and what `fork_tree` raises."""
        tree = await self._whole_tree(session_id)
        number = tree.check_pruned(target, session_id)
        self._pruned.add(target)
        tree.drop(target)
        return None if self.journal is None else number

    async def wait_for_reopening(self, owner: bytes) -> None:
        """Wait until no session of this owner is being opened from the journal."""
        async with self._reopening[owner]:
            return

    async def forget(self, target: str, number: int | None) -> None:
        """Forget a session that was taken out of its tree, once it has closed. Forks keep what they share."""
        try:
            if target in self._closing:
                await self._closing[target][0].wait()  # it may still write; the drop must be its last record
            if number is not None and self.journal is not None:
                self.journal.put([drop(number)])
        finally:
            self._pruned.discard(target)

    def get(self, session_id: str) -> Session:
        """The open session with this id. Raises ``SessionUnknown``."""
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionUnknown(f"Session {session_id!r} is not open on this server")
        return session

    def salt_of(self, session_id: str) -> bytes:
        """The tenant of an open session. Raises ``SessionUnknown``."""
        self.get(session_id)
        return self._records[session_id].salt

    async def resume(
        self, handle: str, owner: bytes, make_room: Callable[[bytes], None] | None = None
    ) -> Session | Reopened:
        """Open the session of ``handle``, from memory or from the journal, and issue its next handle.

        ``make_room`` is called with the tenant's salt before a session comes from the journal. Raises
        ``HandleUnknown``, the same for every reason; ``RecordDamaged``, ``SessionLimit``,
        ``StorageUnavailable``.
        """
        digest = digest_of(handle)
        for closed, digests in list(self._closing.values()):
            if digest in digests:
                await closed.wait()
        async with self._reopening[owner]:
            found: Session | Reopened | None = self._by_handle.get(digest)
            if found is None and self.journal is not None:
                found = await self._reopen(self.journal, digest, owner, make_room or self.tenants.check)
        session = found.session if isinstance(found, Reopened) else found
        if found is None or session is None or not session.handles.opens(digest, owner):
            raise _unknown()
        self._tree_of(session.id).unopened.discard(session.id)
        self._forget_handles(session)
        session.handles.use(digest)
        self._know_handles(session)
        return found

    def close(
        self,
        session_id: str,
        *,
        leave_readers: Callable[[], Awaitable[None]] | None = None,
        interrupt: bool = False,
    ) -> Coroutine[Any, Any, None]:
        """Close a session; the journal keeps it. Raises ``SessionUnknown``. Its place is free at once; await
        the rest.

        ``leave_readers``: ends the tasks that read the session's responses; awaited first. ``interrupt``:
        running responses are not ended in the journal, and go on when the session is opened again.
        """
        session = self.get(session_id)
        self._leave_tree(session)
        self._forget_handles(session)
        self.tenants.leave(self._records[session_id].salt)
        del self._sessions[session_id], self._records[session_id]
        self._closing[session_id] = asyncio.Event(), session.handles.digests()
        if interrupt:
            session.log.close()
        return self._closed(session, leave_readers)

    async def _closed(self, session: Session, leave_readers: Callable[[], Awaitable[None]] | None) -> None:
        try:
            if leave_readers is not None:
                await leave_readers()
            await session.aclose()
        finally:
            self._closing.pop(session.id)[0].set()

    async def statistics_of(self, salt: bytes) -> dict[str, float]:
        """Numbers of the tenant with this ``salt``: its open sessions, its running replies, and what it keeps
        in the journal, if that can be read."""
        tenant = self.tenants[salt]
        kept: dict[str, float] = {}
        if self.journal is not None and self.journal.fault is None:
            with suppress(StorageUnavailable):
                kept = await self.journal.read(lambda store: store.shares.statistics(salt))
        return {"sessions": float(tenant.sessions), "turns": float(tenant.turns), **kept}

    def statistics(self) -> dict[str, float]:
        """Counters of the registry, and sums over the open sessions."""
        totals = {
            "sessions": float(len(self._sessions)),
            "sessions_opened": float(self._opened),
            "sessions_reopened": float(self._reopened),
            **self.waits.statistics(),
        }
        for session in self._sessions.values():
            for name, value in session.statistics().items():
                totals[f"session_{name}"] = totals.get(f"session_{name}", 0.0) + value
        return totals

    async def aclose(self) -> None:
        """Close all sessions; the journal records running responses as interrupted."""
        for session_id in list(self._sessions):
            await self.close(session_id, interrupt=True)
        await self._workers.aclose()

    async def _whole_tree(self, session_id: str) -> ForkTree:
        """A session's fork tree, read from the journal too if that is due. Raises what `fork_tree` raises."""
        log, tree = self.get(session_id).log, self._tree_of(session_id)
        if self.journal is None:
            return tree
        root = root_of(self._records[session_id])
        async with self._loading[root]:
            if tree.stale(time.monotonic()):
                tree.begin_load()
                log.sync()
                kept = await self.journal.read(lambda store: store.fork_tree(log.number))
                tree.load(kept, time.monotonic(), open_=self._sessions, pruned=self._pruned)
        self.get(session_id)
        return tree if tree is self._tree_of(session_id) else await self._whole_tree(session_id)

    def _tree_of(self, session_id: str) -> ForkTree:
        """The fork tree of an open session, as far as it is known."""
        return self._trees[root_of(self._records[session_id])]

    async def _reopen(
        self, journal: Journal, digest: bytes, owner: bytes, make_room: Callable[[bytes], None]
    ) -> Reopened | None:
        known = await journal.read(lambda store: store.handle(digest))
        if known is None or known[1] != owner or known[0] in journal.live:
            return None
        number = known[0]
        journal.live.add(number)  # retention skips it from now on
        try:
            if await journal.read(lambda store: store.handle(digest)) is None:
                raise _unknown()
            stored = await journal.read(lambda store: store.session(number))
            if digest not in stored.keyring.digests() or stored.record.id in self._pruned:
                raise _unknown()
            make_room(stored.record.salt)
            self.tenants.enter(stored.record.salt)  # hold the place while the thread replays
            try:
                limits = {"max_items": self.settings.max_items, "max_events": journal.settings.max_events}
                replayed = await asyncio.to_thread(replay, stored.operations, **limits)
            finally:
                self.tenants.leave(stored.record.salt)
            log = JournaledLog(journal, number, stored.written, stored.record.salt)
            session = self._made(stored.record, log, replayed.history, keyring=stored.keyring)
        except BaseException:
            journal.live.discard(number)
            raise
        self._reopened += 1
        return Reopened(session, stored.record, replayed)

    def _child(
        self, parent: Session, history: History, operations: Iterable[AnyOperation], config: bytes
    ) -> Session:
        before = self._records[parent.id]
        record = msgspec.structs.replace(
            before,
            id=new_id("sess"),
            config=config,
            origin=parent.log.position(),
            name="",
            parent=parent.id,
            root=root_of(before),
        )
        with self._birth(record) as log:
            for operation in operations:
                log.append(operation)
            session = self._made(record, log, history, parent.heir())
        self._opened += 1
        self._tree_of(session.id).unopened.add(session.id)
        return session

    @contextmanager
    def _birth(self, record: SessionRecord) -> Iterator[SessionLog]:
        """A new session's log. If the block raises, the journal forgets the session again."""
        journal = self.journal
        log = SessionLog(next(self._numbers)) if journal is None else JournaledLog.begin(journal, record)
        try:
            yield log
        except BaseException:
            log.close()
            log.forget()
            raise

    def _made(
        self,
        record: SessionRecord,
        log: SessionLog,
        history: History | None = None,
        sequence: EngineCopy | None = None,
        keyring: Keyring | None = None,
    ) -> Session:
        session = Session(
            record.id,
            self._link,
            self.language,
            history=history,
            salt=record.salt,
            now=datetime.fromisoformat(record.clock),
            settings=self.settings,
            log=log,
            handles=SessionHandles(record.owner, log, keyring),
            reopened=keyring is not None,
            sequence=sequence,
            waits=self.waits,
            tenant=self.tenants[record.salt],
        )
        self.tenants.enter(record.salt)
        self._records[session.id] = record
        self._sessions[session.id] = session
        tree = self._trees.setdefault(root_of(record), ForkTree())
        tree.add(log.number, record)
        tree.opened += 1
        self._know_handles(session)
        return session

    def _leave_tree(self, session: Session) -> None:
        root, tree = root_of(self._records[session.id]), self._tree_of(session.id)
        tree.unopened.discard(session.id)
        if not session.log.durable:
            tree.drop(session.id)
        tree.opened -= 1
        if not tree.opened:
            del self._trees[root]
            self._loading.pop(root, None)

    def _know_handles(self, session: Session) -> None:
        self._by_handle.update((digest, session) for digest in session.handles.digests())

    def _forget_handles(self, session: Session) -> None:
        for digest in session.handles.digests():
            self._by_handle.pop(digest, None)


def _unknown() -> HandleUnknown:
    return HandleUnknown("No session can be resumed with this handle", param="handle")
