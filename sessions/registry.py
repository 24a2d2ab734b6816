"""The session registry: which sessions are open, how many may be, and how a handle opens one again.

A session is in memory while a client uses it. With a journal it can be opened again from there. Sessions
that begin like another one are made in `forks.py`. Knows nothing of sockets or of what a client has seen.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Container, Coroutine, Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from operator import itemgetter
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import msgspec
import numpy as np

from ..kvstore.slices import sliced
from ..runtime.errors import EngineGone, VerbRefused
from ..runtime.link.client import EngineLink
from ..runtime.verbs import BlockMap
from .adapters import SessionAdapter, check_loaded
from .adapters import digest_of as adapter_digest
from .conversation.continuation import Digest, GivenConversation, OpenConversations, name_digest
from .conversation.history import History
from .conversation.items import Item, Preamble, new_id, size_of
from .conversation.tree import Script
from .engine_copy import EngineCopy
from .errors import AdapterUnavailable, HandleUnknown, RecordDamaged, SessionUnknown, StorageUnavailable
from .exports import SessionStart
from .fork_trees import ForkTrees
from .handles import SessionHandles, digest_of
from .journal.journal import Journal
from .journal.records import AnyOperation, Keyring, SessionRecord, put
from .journal.replay import Replayed, replay
from .journal.session_log import SessionLog
from .placement import Waits
from .session import Session
from .settings import SessionSettings
from .tenants import OpenTenants
from .text.language import Language
from .text.renderer import Renderer
from .token_ids import NONE, Ids, frozen
from .turn.request import RequestBounds
from .workers import Stopped, Workers

_T = TypeVar("_T")
UNKEPT = 1 << 128
"""The number of the first session that no journal keeps. Sessions in a journal have smaller ones."""
REOPENED_AT_ONCE = 8
"""At most so many sessions of one owner are read from the journal at once. What each has written is committed
together."""
MOST_TRIED = 1024
"""The most beginnings of a conversation that are hashed to find its session."""


@dataclass(frozen=True, slots=True)
class Reopened:
    """A session that was opened from the journal; ``record``: its record there; ``replayed``: the result of
    replaying its operations."""

    session: Session
    record: SessionRecord
    replayed: Replayed


def local_time() -> datetime:
    """The date and time here, with the time zone."""
    return datetime.now().astimezone()


class SessionRegistry:
    """All open sessions of one engine. Without a ``journal`` they end with the process. ``clock``: seconds that
    only grow. ``now``: the date and time, for templates."""

    def __init__(
        self,
        link: EngineLink,
        language: Language,
        settings: SessionSettings | None = None,
        journal: Journal | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = local_time,
    ) -> None:
        self.language = language
        self.settings = settings or SessionSettings()
        self.journal = journal
        self._link = link
        self._clock = clock
        self._now = now
        self._sessions: dict[str, Session] = {}
        self._records: dict[str, SessionRecord] = {}
        self._by_handle: dict[bytes, Session] = {}  # with those that are being closed
        self._by_number: dict[int, Session] = {}  # with those that are being closed
        self._closing: dict[str, asyncio.Event] = {}  # by id
        self._reopening = WeakValueDictionary[int, asyncio.Lock]()  # by number in the journal
        self._places = WeakValueDictionary[bytes, asyncio.Semaphore]()  # by owner
        self._opened = self._reopened = 0
        self._workers = Workers()
        self.tenants = OpenTenants(self.settings.tenants, self.settings.max_sessions, self._workers)
        self.trees = ForkTrees()
        self._numbers = itertools.count(UNKEPT)
        self.waits = Waits(clock)
        self._conversations = OpenConversations()

    def create(
        self,
        *,
        salt: bytes = b"",
        owner: bytes = b"",
        config: bytes = b"",
        kept: bool = True,
        imported: SessionStart | None = None,
        adapter: SessionAdapter | None = None,
    ) -> Session:
        """Open a new session. ``salt``: of its tenant. ``owner``: the digest of the key that made it.
        ``config``: bytes that the journal keeps with it. ``kept``: whether the journal keeps the session at
        all. ``imported``: what it begins with, which names its adapter, too; None: empty. ``adapter``: the one
        that computes it; None: none. Raises ``SessionLimit``, ``StorageUnavailable``, ``AdapterUnavailable``
        if that of an imported one is not loaded."""
        self.tenants.check(salt)
        now = self._now().isoformat()
        record = SessionRecord(
            id=new_id("sess"), owner=owner, salt=salt, clock=now, config=config, adapter=adapter
        )
        if self.journal is not None and (fault := self.journal.fault_of(salt)) is not None:
            raise fault
        if imported is None:
            return self.open(record, kept=kept)
        check_loaded(self._link, imported.adapter)
        record = msgspec.structs.replace(record, clock=imported.clock, forked=now, adapter=imported.adapter)
        return self.open(record, imported.history, [imported.snapshot], kept=kept)

    def open(
        self,
        record: SessionRecord,
        history: History | None = None,
        operations: Iterable[AnyOperation] = (),
        sequence: EngineCopy | None = None,
        *,
        kept: bool = True,
    ) -> Session:
        """Open a new session with this ``record``. Checks no limit.

        ``history``: the one that it begins with. ``operations``: those that lead to it, behind the ones of the
        record's origin. ``sequence``: its copy in the engine; None makes one. ``kept``: as in `create`.
        """
        journal = self.journal if kept else None
        log = SessionLog(number=next(self._numbers)) if journal is None else SessionLog.begin(journal, record)
        try:
            for operation in operations:
                log.append(operation)
            session = self._made(record, log, history, sequence)
        except BaseException:  # the journal forgets it again
            log.close()
            log.forget()
            raise
        self._opened += 1
        return session

    async def prompt_tokens(
        self, salt: bytes, preamble: Preamble, items: Sequence[Item], begun: str = ""
    ) -> Ids:
        """The token ids of the prompt of a new conversation, ``[tokens]``, with the opening of the reply.
        ``salt``: of the tenant that asks. ``begun``: the text with which the reply begins. Raises
        ``TemplateFailed``, ``PromptTooLong``."""
        language, now = self.language, self._now()
        renderer = Renderer(language.tokenizer, now, language.prefix_rule, language.report.rules)
        script = Script(preamble, tuple(items), heading=size_of(preamble))
        most = self._link.hello.max_context

        def render(gone: Stopped) -> Ids:
            prompt = renderer.draft(script, most, gone).tokens()
            if not begun:
                return prompt
            said = language.prefix_rule.encode(language.tokenizer.mark(begun), leads=False, most=most)
            return frozen(np.concatenate([prompt, said]))

        return await self.aside(salt, script.characters(), render)

    async def aside(self, salt: bytes, size: int, work: Callable[[Stopped], _T]) -> _T:
        """Call ``work`` and return its result: if ``size``, in characters or bytes, is large, in the tenant's
        slot at the worker threads. ``work`` gets a function that returns true once the caller was
        cancelled."""
        if size < self.settings.aside_characters:
            return work(bool)
        return await self.tenants[salt].slot.run(work)

    @property
    def bounds(self) -> RequestBounds:
        """What the model allows in a request."""
        vocabulary, language = self._link.hello.vocab_size, self.language
        return RequestBounds(vocabulary, language.shows_tools, self.settings.cycle_tokens)

    @property
    def most_characters(self) -> int | None:
        """The most characters of a text that can fit into the model's context; None if that is not known."""
        return self.language.tokenizer.most_characters(self._link.hello.max_context)

    def adapter_named(self, name: str) -> SessionAdapter:
        """The adapter that is loaded under this name. Raises ``AdapterUnavailable``."""
        adapter = self._link.adapters.get(name)
        if adapter is None:
            raise AdapterUnavailable(f"No adapter {name[:256]!r} is loaded", param="adapter")
        return SessionAdapter(adapter.name, adapter.digest)

    def get(self, session_id: str) -> Session:
        """The open session with this id. Raises ``SessionUnknown``."""
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionUnknown(f"Session {session_id!r} is not open on this server")
        return session

    def record_of(self, session_id: str) -> SessionRecord:
        """The record of an open session. Raises ``SessionUnknown``."""
        self.get(session_id)
        return self._records[session_id]

    def rename(self, session_id: str, name: str) -> None:
        """Give an open session this name in its record; its fork tree allows it. Raises ``SessionUnknown``."""
        log = self.get(session_id).log
        record = self._records[session_id] = msgspec.structs.replace(self._records[session_id], name=name)
        self.trees.of(record).add(log.number, record)
        log.keep(record)

    def numbered(self, number: int) -> Session | None:
        """The open session with this number in the journal; None if none is open."""
        session = self._by_number.get(number)
        return session if session is not None and self.is_open(session) else None

    async def unkept(self, before: int | None = None, salt: bytes | None = None) -> list[int]:
        """The numbers of the open sessions that the journal does not keep, the latest first. ``before``: only
        smaller ones. ``salt``: only those of this tenant."""
        found: list[int] = []
        for part in sliced(list(self._sessions.values())):
            for session in part:
                number, record = session.log.number, self._records.get(session.id)
                if session.log.durable or record is None or (before is not None and number >= before):
                    continue
                if salt is None or record.salt == salt:
                    found.append(number)
            await asyncio.sleep(0)
        return sorted(found, reverse=True)

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
        compared, and only those behind them are hashed. Without a name it is found by one of its `MOST_TRIED`
        longest beginnings. A closed session of such a name comes before the
        beginnings that do not hold all that the model has written. ``kept``: a session that is created with
        ``kept`` may come from the answer. ``unless``: numbers in the journal that are no answer.
        """
        digests = [name_digest(conversation.space, name) for name in names]

        @cache  # a session that has reached many of the beginnings is compared once
        def sharing(session_id: str) -> tuple[Session, int] | None:
            return self._sharing(conversation, session_id, kept)

        ids = {session_id for digest in digests for session_id in self._conversations.find(digest)}
        best = max(filter(None, map(sharing, ids)), key=itemgetter(1), default=None)
        stored = [number for digest in digests if (number := self._stored(digest, unless)) is not None]
        whole = len(conversation.items)
        for length in range(whole, max(whole - MOST_TRIED, 0 if best is None else best[1]), -1):
            digest = conversation.digest(length)
            for found in filter(None, map(sharing, self._conversations.find(digest))):
                if found[1] >= length:
                    return found
            if (number := self._stored(digest, unless)) is not None:
                return number
            if stored and length == conversation.said:
                return stored[0]
        return best or (stored[0] if stored else None)

    def _sharing(
        self, conversation: GivenConversation, session_id: str, kept: bool
    ) -> tuple[Session, int] | None:
        """The session and how many items it shares with a conversation. None: it is not open, may not be gone
        on from, or shares no turn."""
        session = self._sessions.get(session_id)
        if session is None or self._records[session_id].salt != conversation.salt:
            return None
        if adapter_digest(session.adapter) != conversation.adapter:
            return None
        if kept and not self.keeps(session, kept=True):
            return None
        shared = conversation.goes_on_in(session.history)
        return (session, shared) if shared else None

    def _stored(self, digest: Digest, unless: Container[int]) -> int | None:
        number = None if self.journal is None else self.journal.found(digest)
        if self.journal is None or number is None or self._is_taken(self.journal, number) or number in unless:
            return None
        return number

    def _is_taken(self, journal: Journal, number: int) -> bool:
        """Whether the session with this number in the journal is open, is being closed, or is deleted and stays
        only for what holds it."""
        return number in self._by_number or number in journal.doomed

    def keeps(self, session: Session, *, kept: bool) -> bool:
        """Whether the journal keeps this open session just as it does one that is created with ``kept``."""
        return self.journal is None or session.log.durable is kept

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
        ``StorageUnavailable``; ``AdapterUnavailable`` for one that is not in memory, which stays as it is.
        """
        digest = digest_of(handle)
        if (closing := self._by_handle.get(digest)) is not None:
            await self.wait_closed(closing.id)
        owners = {owner} if former_owner is None else {owner, former_owner}
        found: Session | Reopened | None = self._by_handle.get(digest)
        if found is None and self.journal is not None:
            found = await self._reopen(self.journal, digest, owners, make_room or self.tenants.check)
        session = found.session if isinstance(found, Reopened) else found
        if session is not None and not self.is_open(session):  # it was closed meanwhile
            return await self.resume(handle, owner, make_room, former_owner)
        if found is None or session is None or not session.handles.opens(digest, owners):
            raise _unknown()
        self.trees.of(self._records[session.id]).unopened.discard(session.id)
        self._forget_handles(session)
        session.handles.use(digest)
        self._know_handles(session)
        return found

    async def wait_for_reopening(self, number: int) -> None:
        """Wait while the session with this number in the journal is being opened from there."""
        if (lock := self._reopening.get(number)) is not None:
            async with lock:
                return

    def close(
        self,
        session_id: str,
        *,
        leave_readers: Callable[[], Awaitable[None]] | None = None,
        interrupt: bool = False,
        erase_kv: bool = False,
    ) -> Coroutine[Any, Any, None]:
        """Close a session; the journal keeps it. Its place is free at once; await the result for the rest.
        Raises ``SessionUnknown``.

        ``leave_readers``: awaited first; it ends the tasks that read the session's responses. ``interrupt``:
        running responses do not end in the journal. They continue when the session is opened again.
        ``erase_kv``: drop its KV on all tiers.
        """
        session = self.get(session_id)
        record = self._records[session_id]
        self.trees.leave(record, kept=session.log.durable)
        self.tenants.leave(record.salt)
        del self._sessions[session_id], self._records[session_id]
        self._closing[session_id] = asyncio.Event()
        if interrupt:
            session.log.close()
        return self._closed(session, record, leave_readers, erase_kv=erase_kv)

    async def _closed(
        self,
        session: Session,
        record: SessionRecord,
        leave_readers: Callable[[], Awaitable[None]] | None,
        *,
        erase_kv: bool,
    ) -> None:
        try:
            if leave_readers is not None:
                await leave_readers()
            doomed = erase_kv or (self.journal is not None and session.log.number in self.journal.doomed)
            await session.aclose(keep_kv=not doomed)
            if doomed and (head := session.history.head) is not None:
                await self._erase_kv(head.tokens(), record)  # its sequence may be gone with its engine
        finally:
            del self._by_number[session.log.number]
            self._forget_handles(session)
            self._closing.pop(session.id).set()

    async def delete(self, number: int) -> str | None:
        """Delete a session for a client, by its number in the journal: its records, and its KV on all tiers.
        Returns its id if it is open: then it is deleted when it is closed, or by the next server."""
        journal = self.journal
        if journal is None:
            return None
        if (session := self._by_number.get(number)) is not None and self.is_open(session):
            record = msgspec.structs.replace(self._records[session.id], deleted=True)
            self._records[session.id] = record
            session.log.keep(record)
            session.log.sync()  # what waits for the journal next waits for this too
            journal.delete(number)
            return session.id
        tokens, stored = NONE, None
        with suppress(RecordDamaged, StorageUnavailable):
            stored = await journal.read(lambda store: store.session(number))
            replayed = await asyncio.to_thread(replay, stored.operations, max_items=self.settings.max_items)
            if replayed.history.head is not None:
                tokens = replayed.history.head.tokens()
        if (session := self._by_number.get(number)) is not None and self.is_open(session):
            return await self.delete(number)  # it was opened meanwhile
        if stored is not None and number in journal.live:  # it is being closed, for example
            journal.put([put(number, msgspec.structs.replace(stored.record, deleted=True))])
        journal.delete(number)
        if stored is not None:
            await self._erase_kv(tokens, stored.record)
        return None

    async def locate(self, ids: Ids, record: SessionRecord) -> BlockMap:
        """In which tier the KV of these tokens lies, of the session with this ``record``. Moves nothing. Raises
        ``EngineGone``, ``VerbRefused``."""
        return await self._link.locate(None, ids.tolist(), record.salt, adapter_digest(record.adapter))

    async def _erase_kv(self, tokens: Ids, record: SessionRecord) -> None:
        """Drop the KV of these tokens of a session on all tiers, as far as no other sequence holds it. That of
        an adapter which is not loaded stays until it is evicted."""
        if len(tokens):
            with suppress(EngineGone, VerbRefused):  # what is left of it is evicted
                adapter = adapter_digest(record.adapter)
                seq = (await self._link.open(tokens.tolist(), record.salt, adapter=adapter)).seq
                await self._link.close(seq, keep_kv=False)

    async def discard(self, session_id: str) -> None:
        """Close a session of which no client was told, for example a fork that failed half-way, and remove it
        from its fork tree and the journal. Raises ``SessionUnknown``."""
        log, tree = self.get(session_id).log, self.trees.of(self._records[session_id])
        await self.close(session_id)
        tree.drop(session_id)
        log.forget()

    async def wait_closed(self, session_id: str) -> None:
        """Wait until a session that is being closed has closed: its log gets nothing more after that."""
        if session_id in self._closing:
            await self._closing[session_id].wait()

    async def statistics_of(self, salt: bytes) -> dict[str, float]:
        """Numbers of the tenant with this ``salt``: open sessions, running replies, and what it has in the
        journal, if that can be read."""
        tenant = self.tenants[salt]
        kept: dict[str, float] = {}
        if self.journal is not None and self.journal.fault is None:
            with suppress(StorageUnavailable):
                kept = await self.journal.read(lambda store: store.retention.statistics(salt))
        return {"sessions": float(tenant.sessions), "turns": float(tenant.turns), **kept}

    def statistics(self) -> dict[str, float]:
        """How many sessions are open, how many were opened and reopened since the start, and the figures of the
        pauses between turns (`Waits.statistics`)."""
        return {
            "sessions": float(len(self._sessions)),
            "sessions_opened": float(self._opened),
            "sessions_reopened": float(self._reopened),
            **self.waits.statistics(),
        }

    async def sums(self) -> dict[str, float]:
        """Sums over the open sessions (``session_``…, from `Session.statistics`). They are added up in slices,
        between which the event loop goes on."""
        sums: dict[str, float] = {}
        for part in sliced(list(self._sessions.values())):
            for session in part:
                for name, value in session.statistics().items():
                    sums[f"session_{name}"] = sums.get(f"session_{name}", 0.0) + value
            await asyncio.sleep(0)
        return sums

    async def aclose(self) -> None:
        """Close all sessions; the journal records running responses as interrupted."""
        for session_id in list(self._sessions):
            await self.close(session_id, interrupt=True)
        await self._workers.aclose()

    async def _reopen(
        self, journal: Journal, digest: bytes, owners: Set[bytes], make_room: Callable[[bytes], None]
    ) -> Session | Reopened | None:
        known = await journal.read(lambda store: store.handle(digest))
        if known is None or known[1] not in owners:
            return None
        number, owner = known
        lock = self._reopening.setdefault(number, asyncio.Lock())
        place = self._places.setdefault(owner, asyncio.Semaphore(REOPENED_AT_ONCE))
        async with lock, place:
            if (opened := self._by_handle.get(digest)) is not None:
                return opened
            if self._is_taken(journal, number):
                return None
            return await self._read_again(journal, digest, number, make_room)

    async def _read_again(
        self, journal: Journal, digest: bytes, number: int, make_room: Callable[[bytes], None]
    ) -> Reopened:
        journal.hold(number)
        try:
            stored = await journal.read(
                lambda store: store.session(number) if store.handle(digest) is not None else None
            )
            if (
                stored is None
                or digest not in stored.keyring.digests()
                or stored.record.id in self.trees.pruned
            ):
                raise _unknown()
            check_loaded(self._link, stored.record.adapter)
            make_room(stored.record.salt)
            self.tenants.enter(stored.record.salt)  # hold the place while the thread replays
            try:
                limits = {"max_items": self.settings.max_items, "max_events": journal.settings.max_events}
                replayed = await asyncio.to_thread(replay, stored.operations, **limits)
            finally:
                self.tenants.leave(stored.record.salt)
            log = SessionLog(journal, number, stored.written, stored.record.salt)
            try:
                session = self._made(stored.record, log, replayed.history, keyring=stored.keyring)
                session.history.drop_silent()
            except BaseException:
                log.close()
                raise
        finally:
            journal.leave(number)
        self._reopened += 1
        return Reopened(session, stored.record, replayed)

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
            sequence=sequence
            or EngineCopy(
                self._link,
                record.salt,
                adapter=record.adapter,
                reopened=history is not None,
                clock=self._clock,
            ),
            waits=self.waits,
            tenant=self.tenants[record.salt],
            conversations=self._conversations,
            adapter=record.adapter,
        )
        self.tenants.enter(record.salt)
        self._records[session.id] = record
        self._sessions[session.id] = self._by_number[log.number] = session
        self.trees.enter(log.number, record)
        self._know_handles(session)
        return session

    def _know_handles(self, session: Session) -> None:
        self._by_handle.update((digest, session) for digest in session.handles.digests())

    def _forget_handles(self, session: Session) -> None:
        for digest in session.handles.digests():
            self._by_handle.pop(digest, None)


def _unknown() -> HandleUnknown:
    return HandleUnknown("No session can be resumed with this handle", param="handle")
