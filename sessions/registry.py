"""The session registry: which sessions are open, how many may be, and how a handle opens one again.

A session is in memory while a client uses it. With a journal it can be opened again from there. Knows nothing
of sockets or of what a client has seen.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Container, Coroutine, Iterable, Iterator, Sequence, Set
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from operator import itemgetter
from typing import Any

import msgspec
import numpy as np

from ..runtime.link.client import EngineLink
from .continuation import Digest, GivenConversation, OpenConversations, name_digest
from .edits import rewind
from .engine_copy import EngineCopy
from .errors import HandleUnknown, SessionLimit, SessionUnknown, StorageUnavailable
from .fork_tree import ForkTree, Member, Page, root_of
from .handles import SessionHandles, digest_of
from .history import History
from .items import Item, Preamble, new_id, size_of
from .journal.journal import Journal, JournaledLog
from .journal.records import AnyOperation, Branched, Keyring, Origin, SessionLog, SessionRecord, drop
from .journal.replay import Replayed, refused, replay
from .placement import Waits
from .session import ForkSummary, Session
from .settings import SessionSettings
from .tenants import OpenTenants
from .text.language import Language
from .text.renderer import Renderer
from .token_ids import Ids, frozen
from .tree import Script
from .turn.request import RequestBounds
from .workers import Stopped, Workers


@dataclass(frozen=True, slots=True)
class Reopened:
    """A session that was opened from the journal; ``record``: its record there; ``replayed``: the result of
    replaying its operations."""

    session: Session
    record: SessionRecord
    replayed: Replayed


class SessionRegistry:
    """All open sessions of one engine. Without a ``journal`` they end with the process."""

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
        self._closing: dict[
            str, tuple[asyncio.Event, tuple[bytes, ...]]
        ] = {}  # by id, with their handles' digests
        self._pruned: set[str] = set()  # sessions that are being forgotten
        self._reopening = defaultdict[bytes, asyncio.Lock](asyncio.Lock)  # by owner: one session at a time
        self._opened = self._reopened = 0
        self._workers = Workers()
        self.tenants = OpenTenants(self.settings.tenants, self.settings.max_sessions, self._workers)
        self._trees: dict[str, ForkTree] = {}  # fork trees of open sessions, by root
        self._loading = defaultdict[str, asyncio.Lock](asyncio.Lock)  # by root: the journal is asked once
        self._numbers = itertools.count(1)  # numbers of sessions without a journal
        self.waits = Waits()
        self._conversations = OpenConversations()

    def create(
        self,
        *,
        salt: bytes = b"",
        now: datetime | None = None,
        owner: bytes = b"",
        config: bytes = b"",
        kept: bool = True,
    ) -> Session:
        """Open a new session. ``salt``: of its tenant. ``now``: the template's date. ``owner``: the digest of
        the key that made it. ``config``: bytes that the journal keeps with it. ``kept``: whether the journal
        keeps the session at all. Raises ``SessionLimit``, ``StorageUnavailable``."""
        self.tenants.check(salt)
        clock = (now or datetime.now().astimezone()).isoformat()
        record = SessionRecord(id=new_id("sess"), owner=owner, salt=salt, clock=clock, config=config)
        if self.journal is not None and (fault := self.journal.fault_of(salt)) is not None:
            raise fault
        with self._birth(record, kept=kept) as log:
            session = self._made(record, log)
        self._opened += 1
        return session

    async def prompt_tokens(
        self, salt: bytes, preamble: Preamble, items: Sequence[Item], begun: str = ""
    ) -> Ids:
        """The token ids of the prompt of a new conversation, ``[tokens]``, with the opening of the reply.
        ``salt``: of the tenant that asks. ``begun``: the text with which the reply begins. Raises
        ``TemplateFailed``, ``PromptTooLong``."""
        language, now = self.language, datetime.now().astimezone()
        renderer = Renderer(language.tokenizer, now, language.prefix_rule, language.report.rules)
        script = Script(preamble, tuple(items), heading=size_of(preamble))
        most = self._link.hello.max_context

        def render(gone: Stopped) -> Ids:
            prompt = renderer.draft(script, most, gone).tokens()
            if not begun:
                return prompt
            said = language.prefix_rule.encode(language.tokenizer.mark(begun), leads=False, most=most)
            return frozen(np.concatenate([prompt, said]))

        if script.characters() < self.settings.aside_characters:
            return render(bool)
        return await self.tenants[salt].slot.run(render)

    async def fork(
        self,
        session_id: str,
        configs: Sequence[bytes],
        at: str | None = None,
        compaction: ForkSummary | None = None,
    ) -> list[Session]:
        """Fork a session as it is now, or behind the item ``at``. Makes one child for each of ``configs``,
        which the journal keeps with them. ``compaction``: shorten the children's history by a summary.

        The children share the session's past, in the journal and in the engine. Raises ``SessionUnknown``,
        ``SessionLimit``, ``StorageUnavailable``, and what ``Session.branch`` raises.
        """
        session = self.get(session_id)
        self.check_fork(session_id, len(configs))
        self.tenants.check(self._records[session_id].salt, len(configs))
        if session.log.fault is not None:
            raise session.log.fault
        history, operations = session.branch(at, compaction)
        children: list[Session] = []
        try:
            children.extend(self._child(session, history, operations, config) for config in configs)
            await session.lend(children, history.head)
        except BaseException:  # all of them or none: no client has a handle of those that were made
            for child in children:
                await self.discard(child.id)
            raise
        return children

    @property
    def bounds(self) -> RequestBounds:
        """What the model allows in a request."""
        vocabulary, language = self._link.hello.vocab_size, self.language
        return RequestBounds(vocabulary, language.shows_tools, self.settings.cycle_tokens)

    @property
    def most_characters(self) -> int | None:
        """The most characters of a text that can fit into the model's context; None if that is not known."""
        return self.language.tokenizer.most_characters(self._link.hello.max_context)

    # --- conversations that a client sends whole ------------------------------------------------------------

    def is_open(self, session: Session) -> bool:
        """Whether the session is open."""
        return self._sessions.get(session.id) is session

    def known(
        self,
        conversation: GivenConversation,
        names: Iterable[str] = (),
        *,
        kept: bool = True,
        unless: Container[int] = (),
    ) -> tuple[Session, int] | int | None:
        """What a conversation can go on from: the open session that shares the longest beginning, and how many
        items they share, at least one; or the number in the journal of a closed one that may share more. None:
        nothing is known.

        ``names``: those that the client gives it. Items that it shares with an open session of such a name are
        compared, and only those behind them are hashed. A closed session of such a name comes before the
        beginnings that do not hold all that the model has written. ``kept``: a session that is created with
        ``kept`` may come from the answer. ``unless``: numbers in the journal that are no answer.
        """
        digests = [name_digest(conversation.salt, name) for name in names]
        ids = {session_id for digest in digests for session_id in self._conversations.find(digest)}
        best = max(self._sharing(conversation, ids, kept), key=itemgetter(1), default=None)
        stored = [number for digest in digests if (number := self._stored(digest, unless)) is not None]
        for length in range(len(conversation.items), 0 if best is None else best[1], -1):
            digest = conversation.digest(length)
            for found in self._sharing(conversation, self._conversations.find(digest), kept):
                if found[1] >= length:
                    return found
            if (number := self._stored(digest, unless)) is not None:
                return number
            if stored and length == conversation.said:
                return stored[0]
        return best or (stored[0] if stored else None)

    def _sharing(
        self, conversation: GivenConversation, ids: Iterable[str], kept: bool
    ) -> Iterator[tuple[Session, int]]:
        """Those of the sessions that are open, may be gone on from, and share turns with a conversation."""
        for session_id in ids:
            session = self._sessions.get(session_id)
            if session is None or self._records[session_id].salt != conversation.salt:
                continue
            if kept and not self.keeps(session, kept=True):
                continue
            shared = conversation.shared(session.history.preamble, session.history.before_reply())
            if shared and session.history.is_worth(shared):
                yield session, shared

    def _stored(self, digest: Digest, unless: Container[int]) -> int | None:
        number = None if self.journal is None else self.journal.found(digest)
        if self.journal is None or number is None or number in self.journal.live or number in unless:
            return None
        return number

    def keeps(self, session: Session, *, kept: bool) -> bool:
        """Whether the journal keeps this open session just as it does one that is created with ``kept``."""
        return self.journal is None or session.log.durable is kept

    async def branch_off(self, session: Session, items: int, config: bytes, *, kept: bool = True) -> Session:
        """A new session that begins with the first ``items`` items of an open one, at least one. It shares
        their operations in the journal and their KV, and begins a fork tree of its own, since another client
        may have it. ``config`` and ``kept``: as in `create`; one that the journal keeps comes from one that it
        keeps.

        Raises ``SessionLimit``, ``StorageUnavailable``, and what ``Session.branch`` raises.
        """
        self.tenants.check(self._records[session.id].salt)
        if session.log.fault is not None:
            raise session.log.fault
        history, operations = session.branch(session.history.items()[items - 1].id)
        child = self._child(session, history, operations, config, apart=True, kept=kept)
        try:
            await session.lend([child], history.head)
        except BaseException:
            await self.discard(child.id)
            raise
        return child

    async def branch_off_stored(
        self, number: int, conversation: GivenConversation, config: bytes, *, kept: bool = True
    ) -> tuple[Session, int] | None:
        """The same for a session that only the journal has, with this ``number`` there: a new session that
        begins with what it shares with a conversation, and the number of these items. None: it shares no turn.

        Raises ``SessionLimit``, ``StorageUnavailable``, ``RecordDamaged``.
        """
        journal, salt = self.journal, conversation.salt
        assert journal is not None, "it has a number there"
        journal.live.add(number)  # retention skips it meanwhile
        try:
            stored = await journal.read(lambda store: store.session(number))
            if stored.record.salt != salt or stored.record.id in self._pruned:
                return None
            self.tenants.check(salt)
            limits = {"max_items": self.settings.max_items, "max_events": journal.settings.max_events}
            replayed = await asyncio.to_thread(replay, stored.operations, **limits)
            history, operations = replayed.history, list[AnyOperation]()
            last = replayed.last
            if last is not None and last.ended is None and last.placed.turn is not None:
                history.abort_turn(last.placed.turn)  # its client did not get it whole
                operations.append(refused(last.id, None))
            items = history.items()
            shared = conversation.shared(history.preamble, items)
            if not shared or not history.is_worth(shared):
                return None
            if shared < len(items):
                history = history.branch(operations.append)
                rewind(history, items[shared - 1].id, self.language.tokenizer)
            origin = Origin(session=number, operations=stored.written)
            record = self._apart(stored.record, config, origin)
            with self._birth(record, kept=kept) as log:
                for operation in [*operations, Branched()]:
                    log.append(operation)
                copy = EngineCopy(self._link, salt, reopened=True)
                session = self._made(record, log, history, copy)
        finally:
            journal.live.discard(number)
        self._opened += 1
        return session, shared

    def check_fork(self, session_id: str, children: int) -> None:
        """Raises ``SessionUnknown``, or ``SessionLimit`` if the fork tree would have too many unopened forks
        with ``children`` more."""
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
        """Close a session of which no client was told, for example a fork that failed half-way, and remove it
        from its fork tree and the journal. Raises ``SessionUnknown``."""
        log = self.get(session_id).log
        tree = self._tree_of(session_id)
        await self.close(session_id)
        tree.drop(session_id)
        log.forget()

    async def fork_tree(self, session_id: str, limit: int | None = None, after: str | None = None) -> Page:
        """At most ``limit`` sessions of this session's fork tree, parents before children. ``after``: begin
        behind this session; None: at the first one.

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
        """Begin to prune: take the session ``target`` out of the fork tree, so that no handle opens it.
        Returns its number in the journal, which `forget` takes; None without a journal. Raises
        ``MemberUnknown``, ``PruneInvalid``, and what `fork_tree` raises."""
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
        """Forget the session ``target`` after it has closed. ``number``: what `check_pruned` returned. Its
        forks keep the operations that they share with it."""
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
        """The salt of an open session's tenant. Raises ``SessionUnknown``."""
        self.get(session_id)
        return self._records[session_id].salt

    async def resume(
        self,
        handle: str,
        owner: bytes,
        make_room: Callable[[bytes], None] | None = None,
        former_owner: bytes | None = None,
    ) -> Session | Reopened:
        """Open the session of ``handle`` and issue its next handle. ``owner``: the digest of the client's
        key. ``former_owner``: the one that earlier versions made of it; sessions of either open. Returns a
        `Session` that was in memory, or a `Reopened` from the journal.

        ``make_room`` is called with the tenant's salt before a session is read from the journal. Raises
        ``HandleUnknown`` whatever is wrong with the handle; ``RecordDamaged``, ``SessionLimit``,
        ``StorageUnavailable``.
        """
        digest = digest_of(handle)
        for closed, digests in list(self._closing.values()):
            if digest in digests:
                await closed.wait()
        owners = {owner} if former_owner is None else {owner, former_owner}
        async with AsyncExitStack() as reopening:
            for one in sorted(owners):  # in one order, so that two clients never wait for each other
                await reopening.enter_async_context(self._reopening[one])
            found: Session | Reopened | None = self._by_handle.get(digest)
            if found is None and self.journal is not None:
                found = await self._reopen(self.journal, digest, owners, make_room or self.tenants.check)
        session = found.session if isinstance(found, Reopened) else found
        if found is None or session is None or not session.handles.opens(digest, owners):
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
        """Close a session; the journal keeps it. Its place is free at once; await the result for the rest.
        Raises ``SessionUnknown``.

        ``leave_readers``: awaited first; it ends the tasks that read the session's responses. ``interrupt``:
        running responses do not end in the journal. They continue when the session is opened again.
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
        """Numbers of the tenant with this ``salt``: open sessions, running replies, and what it has in the
        journal, if that can be read."""
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
        """A session's fork tree. It is read from the journal first if that was not done yet. Raises what
        `fork_tree` raises."""
        log, tree = self.get(session_id).log, self._tree_of(session_id)
        if self.journal is None:
            return tree
        root = root_of(self._records[session_id])
        async with self._loading[root]:
            if tree.stale(time.monotonic()):
                tree.begin_load()
                log.sync()
                kept = await self.journal.read(lambda store: store.fork_tree(log.number))
                kept = [(number, record) for number, record in kept if root_of(record) == root]
                tree.load(kept, time.monotonic(), open_=self._sessions, pruned=self._pruned)
        self.get(session_id)
        return tree if tree is self._tree_of(session_id) else await self._whole_tree(session_id)

    def _tree_of(self, session_id: str) -> ForkTree:
        """The fork tree of an open session, as far as it is known."""
        return self._trees[root_of(self._records[session_id])]

    async def _reopen(
        self, journal: Journal, digest: bytes, owners: Set[bytes], make_room: Callable[[bytes], None]
    ) -> Reopened | None:
        known = await journal.read(lambda store: store.handle(digest))
        if known is None or known[1] not in owners or known[0] in journal.live:
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
        self,
        parent: Session,
        history: History,
        operations: Iterable[AnyOperation],
        config: bytes,
        *,
        apart: bool = False,
        kept: bool = True,
    ) -> Session:
        """A fork of ``parent`` with this history. ``operations``: those that lead to it, behind the parent's.
        ``apart``: it begins a fork tree of its own, and a client has it already. ``kept``: as in `create`."""
        before = self._records[parent.id]
        record = self._apart(before, config, parent.log.position())
        if not apart:
            record = msgspec.structs.replace(record, parent=parent.id, root=root_of(before))
        with self._birth(record, kept=kept) as log:
            for operation in operations:
                log.append(operation)
            session = self._made(record, log, history, parent.heir())
        self._opened += 1
        if not apart:
            self._tree_of(session.id).unopened.add(session.id)
        return session

    @staticmethod
    def _apart(record: SessionRecord, config: bytes, origin: Origin | None) -> SessionRecord:
        """The record of a new session that begins like the one of ``record``, in a fork tree of its own."""
        return msgspec.structs.replace(
            record, id=new_id("sess"), config=config, origin=origin, name="", parent="", root=""
        )

    @contextmanager
    def _birth(self, record: SessionRecord, *, kept: bool = True) -> Iterator[SessionLog]:
        """A context with the log of a new session; the session's record is queued for the journal. If the
        block raises, the journal forgets the session again. ``kept``: as in `create`."""
        journal = self.journal if kept else None
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
            conversations=self._conversations,
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
