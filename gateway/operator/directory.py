"""The sessions of a running server as its operator sees them: those in memory, and those that only the journal
has.

A session in the journal is found by its number there. Its id is looked for in slices, between which the
journal's thread and the event loop do other work; the ids of the sessions that were told last are remembered
with their numbers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from operator import methodcaller
from typing import TypeAlias

from ...kvstore.log_lines import about_session
from ...runtime.errors import EngineGone, VerbRefused
from ...sdk.errors import FieldInvalid
from ...sessions.conversation.history import History
from ...sessions.errors import EngineUnavailable, RecordDamaged, SessionUnknown
from ...sessions.exports import at_rest
from ...sessions.journal.journal import Journal
from ...sessions.journal.records import SessionRecord
from ...sessions.journal.replay import replay
from ...sessions.journal.store import Walk
from ...sessions.registry import UNKEPT
from ...sessions.session import Session
from ..access.auth import salt_of
from ..live.sessions import LiveSessions
from ..realtime.exports import export_of, resource_of
from ..realtime.session import RealtimeSession
from ..service import Service
from .frames import (
    DeletedSession,
    ForkedSession,
    KVTiers,
    ListedSession,
    SessionPage,
    SessionsQuery,
    ShownQuery,
    ShownSession,
    damaged,
    listed,
    shown,
)

log = logging.getLogger(__name__)

WALK = 256
"""So many of the journal's entries are looked at without a pause."""
LEAST = 16
"""At least so many, where all sessions are wanted."""
MOST_WALKS = 64
"""So many times that for one page."""
_Walked: TypeAlias = tuple[int, int, SessionRecord | None]
"""What `Walk.found` has of a session: its cursor, number and record."""
REMEMBERED = 1 << 14
"""The ids of so many sessions are remembered with their numbers."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A session. ``number``: in the journal, or as `SessionRegistry.numbered` has it. ``record``: None if it is
    damaged. ``session``: None if it is not in memory."""

    number: int
    record: SessionRecord | None
    session: Session | None = None


class SessionDirectory:
    """The sessions of a ``service``. All methods raise ``EngineLoading``, ``Draining`` and
    ``StorageUnavailable``."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._tenants, self._names = service.tenants, service.tenants.names()

    async def page(self, query: SessionsQuery) -> SessionPage:
        """The page of sessions that is asked for, the latest made first; those that the journal does not keep
        come before all others. Raises ``FieldInvalid`` for an ``after`` that is none."""
        live, limit, after = self._live(), query.limit, query.after
        salt = None if query.tenant is None else salt_of(query.tenant)
        memory, cursor = await self._cursor_of(live, after)
        found: list[_Found] = []
        if memory is not None or after is None:
            for number in await live.registry.unkept(memory, salt):
                if (session := live.registry.numbered(number)) is None:
                    continue  # it was closed meanwhile
                if len(found) == limit:
                    return await self._told(live, found, f"m{found[-1].number - UNKEPT}")
                found.append(_Found(number, live.registry.record_of(session.id), session))
        journal = live.registry.journal
        more = journal is not None
        for _ in range(MOST_WALKS):
            if journal is None or not more:
                break
            most = WALK if salt is not None else max(LEAST, limit - len(found))
            walk: Walk = await journal.read(methodcaller("walk", cursor, most, salt))
            for cursor, number, record in walk.found:
                if record is None or record.is_session:
                    found.append(_Found(number, record, live.registry.numbered(number)))
                if len(found) >= limit:
                    return await self._told(live, found, str(cursor) if cursor else None)
            cursor, more = walk.cursor, walk.cursor is not None
        return await self._told(live, found, str(cursor) if more else None)

    async def shown(self, session_id: str, query: ShownQuery) -> ShownSession:
        """The session with this id, with its latest items. Raises ``SessionUnknown``, ``RecordDamaged``."""
        live = self._live()
        found = await self._find(live, session_id)
        record, history = _record(found), (await self._history(live, found))[0]
        told = await self._listed(live, found, history, whole=True)
        journal, forks = live.registry.journal, list[tuple[int, SessionRecord]]()
        if journal is not None and found.number < UNKEPT:
            forks = await journal.read(lambda store: store.fork_tree(found.number))
        children = [
            ForkedSession(id=one.id, name=one.name)
            for _, one in forks
            if one.parent == record.id and not one.deleted
        ]
        return shown(told, history, children, query.items)

    async def exported(self, session_id: str) -> bytes:
        """The session with this id as JSON lines. A reply that runs is in it as far as the journal has it.
        Raises ``SessionUnknown``, ``RecordDamaged``."""
        live = self._live()
        found = await self._find(live, session_id)
        history, config = await self._history(live, found)
        record = _record(found)
        resource = resource_of(record, config)
        if (one := live.find(record.id)) is not None and isinstance(one.face, RealtimeSession):
            resource = one.face.conversation.session
        tokenizer, model = live.registry.language.digest(), self.service.model
        data = await asyncio.to_thread(export_of, record, history, resource, tokenizer, model)
        self._log("exported", session_id, record)
        return data

    async def close(self, session_id: str) -> ListedSession:
        """Take the session with this id from its connection, and out of memory; the journal keeps it. Returns
        it as it is then. Raises ``SessionUnknown``, ``RecordDamaged``."""
        live = self._live()
        found = await self._find(live, session_id)
        await live.end(session_id)
        self._log("closed", session_id, _record(found))
        found = _Found(found.number, found.record, live.registry.numbered(found.number))
        return await self._listed(live, found, (await self._history(live, found))[0])

    async def delete(self, session_id: str) -> DeletedSession:
        """Delete the session with this id, wherever it is: records and KV leave as those of what a client
        deletes. Returns when the journal has it. Raises ``SessionUnknown``."""
        live = self._live()
        found = await self._find(live, session_id)
        if found.record is not None:
            await live.erase(found.record, None if found.number >= UNKEPT else found.number)
        else:  # nothing opens it, so it is in no fork tree
            await live.delete([found.number])
        if live.registry.journal is not None:
            await asyncio.shield(live.registry.journal.sync())
        self._log("deleted", session_id, found.record)
        return DeletedSession(id=session_id)

    # --- inside ---------------------------------------------------------------------------------------------

    def _live(self) -> LiveSessions:
        return self.service.admit(None)

    async def _find(self, live: LiveSessions, session_id: str) -> _Found:
        registry = live.registry
        await registry.wait_closed(session_id)
        with suppress(SessionUnknown):
            session = registry.get(session_id)
            return _Found(session.log.number, registry.record_of(session_id), session)
        journal = registry.journal
        if journal is not None:
            if (known := await self._remembered(journal, session_id)) is not None:
                return _Found(*known, registry.numbered(known[0]))
            if (found := await self._searched(journal, session_id)) is not None:
                return _Found(found[1], found[2], registry.numbered(found[1]))
        raise SessionUnknown(f"This server has no session {session_id[:128]!r}", param="session_id")

    async def _remembered(self, journal: Journal, session_id: str) -> tuple[int, SessionRecord] | None:
        number = self._numbers.get(session_id)
        if number is None or not journal.keeps(number):
            return None
        with suppress(RecordDamaged):
            record = await journal.read(lambda store: store.record(number))
            if record.id == session_id and not record.deleted:
                return number, record
        return None

    async def _searched(self, journal: Journal, session_id: str) -> _Walked | None:
        """What `Walk.found` has of the session with this id; None if the journal has none."""
        cursor: int | None = None
        found: _Walked | None
        while True:
            found, cursor = await journal.read(methodcaller("search", cursor, WALK, session_id))
            if found is not None or cursor is None:
                return found

    async def _cursor_of(self, live: LiveSessions, after: str | None) -> tuple[int | None, int | None]:
        """Where a page begins: before this number among the sessions that the journal does not keep, and before
        this cursor in it. None: at the latest."""
        if after is None:
            return None, None
        digits = after.removeprefix("m")
        if digits.isascii() and digits.isdecimal() and len(digits) <= 18:
            return (UNKEPT + int(digits), None) if after.startswith("m") else (None, int(digits))
        with suppress(SessionUnknown):
            number = live.registry.get(after).log.number
            if number >= UNKEPT:
                return number, None
        journal = live.registry.journal
        if journal is not None and (found := await self._searched(journal, after)) is not None:
            return None, found[0]
        raise FieldInvalid("`after` must be the id of a session, or the `next` of a page", "after")

    async def _history(self, live: LiveSessions, found: _Found) -> tuple[History, bytes | None]:
        """A history of the session in which no turn runs, and the latest configuration that the journal has;
        None if it has none, or was not asked."""
        if found.session is not None and live.registry.is_open(found.session):
            return found.session.branch()[0], None
        journal, number = live.registry.journal, found.number
        gone = SessionUnknown("The session is gone", param="session_id")
        if journal is None or number >= UNKEPT:
            raise gone
        journal.hold(number)
        try:
            stored = await journal.read(lambda store: store.session(number))
        except RecordDamaged:
            if not journal.keeps(number):  # it was forgotten meanwhile
                raise gone from None
            raise
        finally:
            journal.leave(number)
        most = live.registry.settings.max_items
        replayed = await asyncio.to_thread(replay, stored.operations, max_items=most)
        return at_rest(replayed), replayed.config

    async def _told(self, live: LiveSessions, found: list[_Found], after: str | None) -> SessionPage:
        data: list[ListedSession] = []
        for one in found:
            try:
                history, _ = await self._history(live, one)
                data.append(await self._listed(live, one, history))
            except SessionUnknown:
                continue  # it was closed meanwhile
            except RecordDamaged:
                data.append(await self._damaged(live, one))
        return SessionPage(data=data, next=after)

    async def _listed(
        self, live: LiveSessions, found: _Found, history: History, *, whole: bool = False
    ) -> ListedSession:
        """What is told of a session. ``whole``: also where its KV is, if it is not in memory."""
        record, journal = _record(found), live.registry.journal
        unused = None
        if journal is not None and found.number < UNKEPT:
            unused = await journal.read(lambda store: store.unused_seconds(found.number))
            self._numbers[record.id] = found.number
            self._numbers.move_to_end(record.id)
            if len(self._numbers) > REMEMBERED:
                self._numbers.popitem(last=False)
        kv = None
        if self.service.state().ready:
            with suppress(EngineGone, EngineUnavailable, VerbRefused):
                if found.session is not None and live.registry.is_open(found.session):
                    kv = KVTiers.of(await found.session.placement.locate())
                elif whole and history.head is not None:
                    kv = KVTiers.of(await live.registry.locate(history.head.tokens(), record))
        state = live.state_of(record.id) or "offloaded"
        return listed(record, history, self._tenant(record.salt), state, unused_seconds=unused, kv=kv)

    async def _damaged(self, live: LiveSessions, found: _Found) -> ListedSession:
        journal, record = live.registry.journal, found.record
        if record is not None:
            return damaged(record.id, self._tenant(record.salt))
        assert journal is not None, "the record was read there"
        return damaged(await journal.read(lambda store: store.name_of(found.number)), "")

    def _log(self, what: str, session_id: str, record: SessionRecord | None) -> None:
        """Log what was done with a session; the route's lines name the operator."""
        tenant = None if record is None else self._tenant(record.salt) or None
        log.info("session %s by an operator", what, extra=about_session(session_id, tenant=tenant))

    def _tenant(self, salt: bytes) -> str:
        if self.service.tenants is not self._tenants:
            self._tenants = self.service.tenants
            self._names = self._tenants.names()
        return self._names.get(salt) or salt.hex()


def _record(found: _Found) -> SessionRecord:
    if found.record is None:
        raise RecordDamaged("The session's record is damaged")
    return found.record
