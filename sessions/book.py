"""The book of sessions: who is open, how many may be, and the way back to one by its handle.

Sessions are in memory while somebody uses them; with a journal they are opened again from there. Knows
nothing of sockets or of what a client has seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial

import msgspec

from ..runtime.link.client import EngineLink
from .errors import HandleUnknown, SessionLimit, SessionUnknown
from .handles import SessionHandles, digest_of
from .history import History
from .items import new_id
from .journal.journal import Journal
from .journal.log import EphemeralLog, JournaledLog, SessionLog
from .journal.records import AnyOperation, SessionRecord
from .journal.replay import Replayed, condensed, replay
from .journal.store import Stored
from .language import Language
from .sequence import LiveSequence
from .session import Session
from .settings import SessionSettings
from .waits import Waits


@dataclass(frozen=True, slots=True)
class Reopened:
    """A session from the journal: what it is now, and what it was at birth."""

    session: Session
    record: SessionRecord
    replayed: Replayed


class SessionBook:
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
        self._leaving: dict[bytes, asyncio.Event] = {}  # by handle: sessions that are being put away
        self._reopening = asyncio.Lock()
        self._opened = self._reopened = 0
        self.waits = Waits()
        if journal is not None:
            journal.condense = partial(
                condensed, max_items=self.settings.max_items, max_events=journal.settings.max_events
            )

    def create(
        self, *, salt: bytes = b"", now: datetime | None = None, owner: bytes = b"", config: bytes = b""
    ) -> Session:
        """A new session. ``owner`` is whose key made it; ``config`` is kept with it. Raises ``SessionLimit``,
        ``StorageUnavailable``."""
        self._check_room()
        clock = (now or datetime.now().astimezone()).isoformat()
        record = SessionRecord(id=new_id("sess"), owner=owner, salt=salt, clock=clock, config=config)
        log: SessionLog = EphemeralLog()
        if self.journal is not None:
            if self.journal.fault is not None:
                raise self.journal.fault
            log = JournaledLog.begin(self.journal, record)
        session = self._made(record, log, SessionHandles(owner, log))
        self._opened += 1
        return session

    async def fork(self, session_id: str, configs: Sequence[bytes], at: str | None = None) -> list[Session]:
        """Sessions that go on from where this one is, or was at the item ``at``; one for each config.

        They share its past, in the journal and in the engine, where one verb makes them all. Raises
        ``SessionUnknown``, ``SessionLimit``, ``StorageUnavailable``, ``ItemUnknown`` or ``CutInvalid``.
        """
        session = self.get(session_id)
        self._check_room(len(configs))
        if session.log.fault is not None:
            raise session.log.fault
        history, operations = session.branch(at)
        children = [self._child(session, history.branch(), operations, config) for config in configs]
        await session.lend([sequence for _, sequence in children], history.tree.head)
        return [child for child, _ in children]

    def get(self, session_id: str) -> Session:
        """The open session with this id. Raises ``SessionUnknown``."""
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionUnknown(f"No session {session_id!r}")
        return session

    async def resume(self, handle: str, owner: bytes) -> Session | Reopened:
        """The session that ``handle`` opens; it has a new handle from now on.

        Raises ``HandleUnknown``, the same for every reason; ``RecordDamaged``, ``SessionLimit``,
        ``StorageUnavailable``.
        """
        digest = digest_of(handle)
        if (leaving := self._leaving.get(digest)) is not None:
            await leaving.wait()
        async with self._reopening:
            found: Session | Reopened | None = self._by_handle.get(digest)
            if found is None and self.journal is not None:
                found = await self._reopen(self.journal, digest, owner)
        session = found.session if isinstance(found, Reopened) else found
        if found is None or session is None or not session.handles.opens(digest, owner):
            raise _unknown()
        self._forget_handles(session)
        session.handles.use(digest)
        self._know_handles(session)
        return found

    async def close(
        self,
        session_id: str,
        *,
        settle: Callable[[], Awaitable[None]] | None = None,
        interrupt: bool = False,
    ) -> None:
        """End a session and forget it; the journal, if there is one, does not. Raises ``SessionUnknown``.

        ``settle`` is awaited first: who reads its responses leaves them. ``interrupt``: in the journal they
        have not ended, and go on when the session is opened again.
        """
        session = self.get(session_id)
        self._forget_handles(session)
        del self._sessions[session_id], self._records[session_id]
        left = asyncio.Event()
        leaving = dict.fromkeys(session.handles.digests(), left)
        self._leaving.update(leaving)
        try:
            if interrupt:
                session.log.close()
            if settle is not None:
                await settle()
            await session.aclose()
        finally:
            left.set()
            for digest in leaving:
                del self._leaving[digest]

    def statistics(self) -> dict[str, float]:
        """Sums over the open sessions."""
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
        """End all sessions; in the journal what runs is interrupted, not ended."""
        for session_id in list(self._sessions):
            await self.close(session_id, interrupt=True)

    async def _reopen(self, journal: Journal, digest: bytes, owner: bytes) -> Reopened | None:
        known = await journal.read(lambda store: store.handle(digest))
        if known is None or known.owner != owner or known.session in journal.live:
            return None
        self._check_room()
        journal.live.add(known.session)
        try:
            stored = await journal.read(lambda store: store.session(known.session))
            if digest not in stored.keyring.digests():
                raise _unknown()
            return await self._again(journal, stored)
        except BaseException:
            journal.live.discard(known.session)
            raise

    async def _again(self, journal: Journal, stored: Stored) -> Reopened:
        work = partial(
            replay,
            stored.operations,
            max_items=self.settings.max_items,
            max_events=journal.settings.max_events,
        )
        replayed = await asyncio.to_thread(work)
        log = JournaledLog(journal, stored.number, stored.written)
        handles = SessionHandles(stored.record.owner, log, stored.keyring)
        session = self._made(stored.record, log, handles, replayed.history)
        self._reopened += 1
        return Reopened(session, stored.record, replayed)

    def _child(
        self, parent: Session, history: History, operations: Iterable[AnyOperation], config: bytes
    ) -> tuple[Session, LiveSequence]:
        record = msgspec.structs.replace(
            self._records[parent.id], id=new_id("sess"), config=config, origin=parent.log.position()
        )
        log: SessionLog = EphemeralLog()
        if self.journal is not None:
            log = JournaledLog.begin(self.journal, record)
        for operation in operations:
            log.append(operation)
        sequence = parent.heir()
        handles = SessionHandles(record.owner, log)
        session = self._made(record, log, handles, history, sequence)
        self._opened += 1
        return session, sequence

    def _made(
        self,
        record: SessionRecord,
        log: SessionLog,
        handles: SessionHandles,
        history: History | None = None,
        sequence: LiveSequence | None = None,
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
            handles=handles,
            reopened=history is not None and sequence is None,
            sequence=sequence,
            waits=self.waits,
        )
        self._records[session.id] = record
        self._sessions[session.id] = session
        self._know_handles(session)
        return session

    def _check_room(self, more: int = 1) -> None:
        if len(self._sessions) + more > self.settings.max_sessions:
            raise SessionLimit(f"{self.settings.max_sessions} sessions are open")

    def _know_handles(self, session: Session) -> None:
        self._by_handle.update((digest, session) for digest in session.handles.digests())

    def _forget_handles(self, session: Session) -> None:
        for digest in session.handles.digests():
            self._by_handle.pop(digest, None)


def _unknown() -> HandleUnknown:
    return HandleUnknown("No session can be resumed with this handle", param="handle")
