"""The live sessions of one server, by id, and the client's connection that each one uses.

`LiveSessions` opens, resumes, forks and prunes sessions, whatever protocol their clients speak. It *puts away*,
that is, closes in memory, the sessions to which no client comes back within ``resume_seconds``; the journal
keeps them. It knows owners and tenants, and no protocol.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any, Literal, Protocol, TypeVar

from ...kvstore.log_lines import about_session
from ...kvstore.slices import sliced
from ...sessions.adapters import SessionAdapter, digest_of
from ...sessions.conversation.continuation import GivenConversation
from ...sessions.conversation.items import Item, Preamble
from ...sessions.errors import RecordDamaged, SessionLimit, StorageUnavailable
from ...sessions.exports import SessionStart
from ...sessions.forks import Forks
from ...sessions.journal.records import Configured, SessionRecord
from ...sessions.registry import Reopened, SessionRegistry
from ...sessions.session import ForkSummary, Session
from ...sessions.turn.events import EndReason
from ..access.auth import TurnCaller
from ..errors import GatewayError, SessionDeleted, SessionMoved
from ..settings import ClientLimits
from .session import LiveSession, SessionFace, spawn
from .turns import Turns

_T = TypeVar("_T")

log = logging.getLogger(__name__)

SLICE = 256
"""The most items that are added to a session without a pause."""


class Face(Protocol):
    """The code of one protocol that clients speak. It makes the live sessions of its clients, each with a
    `SessionFace` that sends to the client."""

    @property
    def adapter(self) -> SessionAdapter | None:
        """The adapter with which a new session begins; None: none."""

    def config(self) -> bytes:
        """The configuration with which a new session begins, encoded by the face. The journal keeps these
        bytes; `begin` gets them, and `reopen` reads them there."""

    def begin(self, session: Session, config: bytes) -> LiveSession:
        """Make a live session of a new session. ``config``: what `config` returned."""

    def reopen(self, reopened: Reopened, caller: TurnCaller) -> LiveSession:
        """Make a live session of one that was read from the journal. A turn in it that was interrupted
        continues, for ``caller``."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """A conversation that a client sends whole: its preamble (instructions and tools) and all its items.

    Names lead to its session, too. ``after``: that of the response that it continues; ``name``: that of the one
    that it asks for: it has none. ``keys``: names that stay the same from turn to turn.
    """

    preamble: Preamble
    items: tuple[Item, ...]
    after: str = ""
    name: str = ""
    keys: tuple[str, ...] = ()


def cache_key(given: str | None) -> tuple[str, ...]:
    """The ``prompt_cache_key`` of a body, as keys of its `Transcript`."""
    return () if given is None else (f"key {given}",)


class SessionConnection(Protocol):
    """A client's connection, as one session on it sees it. One connection may carry several sessions."""

    @property
    def caller(self) -> TurnCaller:
        """The client for which the session's turns run."""

    def taken(self, why: GatewayError) -> None:
        """Called when the session is not on this connection any more. ``why``: ``SessionMoved``, another
        connection has it or a new one may take it; ``SessionDeleted``."""


class LiveSessions:
    """All sessions in memory, whatever their protocol. ``registry`` makes and closes the sessions themselves.
    ``turns`` admits and counts the turns of all of them."""

    def __init__(self, registry: SessionRegistry, limits: ClientLimits, turns: Turns | None = None) -> None:
        self.registry = registry
        self.forks = Forks(registry)
        """Makes the sessions that begin like another one."""
        self.turns = turns or Turns()
        self._limits = limits
        self._live: dict[str, LiveSession] = {}
        self._connections: dict[str, SessionConnection] = {}
        self._timers: dict[str, tuple[asyncio.TimerHandle, bytes]] = {}  # each with its tenant's salt
        # OrderedDict: its first is O(1) even after deletions.
        self._left: dict[bytes, OrderedDict[str, LiveSession]] = {}
        """By tenant's salt, the sessions without a connection that may be closed at rest, by id. Those without
        one for longest come first."""
        self._unopened: dict[bytes, OrderedDict[str, tuple[LiveSession, float]]] = {}
        """By tenant's salt, the forks that no client has opened yet, by id, each with the time on the loop's
        clock at which it was made. The oldest come first."""
        self._leaving: set[asyncio.Task[None]] = set()
        self._works: set[asyncio.Task[Any]] = set()
        self._closing = False

    def __len__(self) -> int:
        return len(self._live)

    def live(self) -> list[LiveSession]:
        """All live sessions."""
        return list(self._live.values())

    def find(self, session_id: str) -> LiveSession | None:
        """The live session with this id; None if it is not in memory."""
        return self._live.get(session_id)

    # --- opening and resuming -------------------------------------------------------------------------------

    def open(
        self,
        face: Face,
        connection: SessionConnection,
        owner: bytes,
        salt: bytes = b"",
        *,
        kept: bool = True,
    ) -> LiveSession:
        """Open a new session on this connection; ``face`` makes its live session. ``owner``: the digest of the
        client's key; only a client with the same key can resume it. ``salt``: the salt of its tenant, which
        keeps cached KV apart. ``kept``: whether the journal keeps the session.

        Raises ``SessionLimit``, ``StorageUnavailable``.
        """
        self.make_room(salt)
        config = face.config()
        session = self.registry.create(owner=owner, salt=salt, config=config, kept=kept, adapter=face.adapter)
        return self._attach(self._begun(face, session, config, "opened"), connection)

    def begin(
        self, face: Face, owner: bytes, salt: bytes, config: bytes, imported: SessionStart
    ) -> LiveSession:
        """Open a new session that begins as one that was exported elsewhere. It has no connection: it stays in
        memory for ``resume_seconds``, for a client that resumes it with its handle. ``config``: as in
        `Face.config`. ``owner``, ``salt``: as in `open`. Raises ``SessionLimit``, ``StorageUnavailable``."""
        self.make_room(salt)
        session = self.registry.create(owner=owner, salt=salt, config=config, imported=imported)
        live = self._begun(face, session, config, "imported")
        self._live[live.id] = live
        self._start_timer(live)
        return live

    def make_room(self, salt: bytes, more: int = 1) -> None:
        """Make sure that the tenant with this ``salt`` can open ``more`` sessions, in number.

        If there are too few places, idle sessions without a connection are closed in memory before their time.
        `sessions.tenants.OpenTenants.room` chooses the tenants that lose some; of a tenant's, those without a
        connection for longest go first. A session that a client can resume is closed only if the journal has
        it. Raises ``SessionLimit`` if that does not suffice; then none is closed.
        """
        with suppress(SessionLimit):
            self.registry.tenants.check(salt, more)
            return
        idle = {
            tenant: (live.id for live in left.values() if live.at_rest) for tenant, left in self._left.items()
        }
        for session_id in self.registry.tenants.room(salt, more, idle):
            self._put_away(self._live[session_id])

    async def continue_(
        self,
        face: Face,
        connection: SessionConnection,
        transcript: Transcript,
        owner: bytes,
        salt: bytes,
        *,
        kept: bool = True,
        truncates: bool = False,
    ) -> LiveSession:
        """A live session, attached to this connection, with the history ``transcript``.

        The longest beginning that is known is not tokenized or prefilled again. If it is the whole history of
        an idle session of which no client has a handle or a connection, it continues in that session.
        Otherwise it continues in a session that is forked at that point, from one in memory or in the journal,
        whatever its protocol. If nothing is known, a new session begins.

        ``owner``: the digest of the client's key. ``salt``: the salt of its tenant. ``kept``: whether the
        journal keeps the session; one that it does not keep may be forked from one that it keeps, but not the
        other way round. ``truncates``: the request allows to leave out the oldest turns, and so may come behind
        turns that have done so. Raises ``SessionLimit``, ``StorageUnavailable``, and for an item
        ``ItemInvalid`` or ``ItemExists``.
        """
        given = GivenConversation(
            salt,
            transcript.preamble,
            transcript.items,
            truncates=truncates,
            adapter=digest_of(face.adapter),
        )
        names = [*filter(None, [transcript.after]), *transcript.keys]
        live, shared = await self._known_beginning(face, given, names, kept=kept)
        if live is None:
            live = self.open(face, connection, owner, salt, kept=kept)
        else:
            self._attach(live, connection)
        history = live.session.history
        try:
            if history.preamble != transcript.preamble:
                history.preamble = transcript.preamble
                live.session.log.append(Configured(preamble=transcript.preamble))
            history.adopt(transcript.items[:shared])
            for at, item in enumerate(transcript.items[shared:], 1):
                history.insert(item)
                if not at % SLICE:  # others have their turn
                    await asyncio.sleep(0)
            live.session.known_by(filter(None, [transcript.name]), lasting=False)
            live.session.known_by(transcript.keys, lasting=True)
        except BaseException:
            if live.went_on:
                self.left(live, connection)
            else:  # a new session: no client comes back to it
                await self.drop(live, connection)
            raise
        return live

    async def _known_beginning(
        self, face: Face, conversation: GivenConversation, names: Sequence[str], *, kept: bool
    ) -> tuple[LiveSession | None, int]:
        """Find the longest known beginning of a conversation. Returns a live session that has this beginning
        alone as its history, and the number of its items; (None, 0) if no beginning is known. ``names``: those
        that may lead to its session. ``kept``: whether the journal is to keep the session."""
        salt, config, tried = conversation.salt, face.config(), set[int]()
        while found := self.registry.known(conversation, names, kept=kept, unless=tried):
            if isinstance(found, int):
                tried.add(found)
                self.make_room(salt)
                with suppress(RecordDamaged):  # it is logged; another beginning may be known
                    stored = await self.forks.branch_off_stored(found, conversation, config, kept=kept)
                    if stored is not None:
                        return self._begun(face, stored[0], config, "branched off"), stored[1]
                continue
            session, shared = found
            live = self._live.get(session.id)
            same = self.registry.keeps(session, kept=kept)
            if live is not None and same and self._continues_in(live, shared):
                return live, shared
            self.make_room(salt)
            if self.registry.is_open(session):  # it was not put away to make room
                child = await self.forks.branch_off(session, shared, config, kept=kept)
                return self._begun(face, child, config, "branched off"), shared
        self.make_room(salt)
        return None, 0

    def _continues_in(self, live: LiveSession, shared: int) -> bool:
        """Whether a conversation may go on in the session ``live`` itself: nothing else uses it, no client has
        a handle of it, and its history is no longer than the ``shared`` first items."""
        free = live.at_rest and live.id not in self._connections and live.disposable
        return free and shared == len(live.session.history)

    def _begun(self, face: Face, session: Session, config: bytes, how: str) -> LiveSession:
        """Make a live session of a new one; ``face`` makes it. ``config``: as in `Face.config`. ``how`` it came
        to be, for the log. If that fails, the session is discarded."""
        try:
            live = face.begin(session, config)
        except BaseException:
            self._discard(session)
            raise
        log.info("session %s", how, extra=about_session(live.id))
        return live

    async def resume(
        self,
        face: Face,
        connection: SessionConnection,
        handle: str,
        owner: bytes,
        former_owner: bytes | None = None,
    ) -> LiveSession:
        """Find the session that ``handle`` opens, in memory or in the journal, move it to this connection, and
        give it a new handle. A connection that had it before is told by `taken`. ``face`` makes the live
        session if it comes from the journal. ``owner``: the digest of the client's key, which must be the
        session's owner; ``former_owner``: the digest that earlier versions made of the key, which serves as
        well.

        Raises ``HandleUnknown``, ``RecordDamaged``, ``SessionLimit``, ``StorageUnavailable``,
        ``AdapterUnavailable``.
        """
        found = await self.registry.resume(handle, owner, self.make_room, former_owner)
        if isinstance(found, Reopened):
            try:
                live = face.reopen(found, connection.caller)
            except BaseException:  # its handle would open nothing while it stays in memory without a face
                self._discard(found.session, interrupt=True)
                raise
        else:
            live = self._live[found.id]
        before = self._connections.get(live.id)
        if before is not None and before is not connection:
            before.taken(SessionMoved())
        source = "journal" if isinstance(found, Reopened) else "memory"
        log.info("session resumed", extra=about_session(live.id, source=source))
        return self._attach(live, connection)

    # --- the fork tree --------------------------------------------------------------------------------------

    async def fork(
        self,
        live: LiveSession,
        children: int,
        at: str | None,
        compaction: ForkSummary | None = None,
        adapter: SessionAdapter | Literal["parent"] | None = "parent",
    ) -> list[LiveSession]:
        """Fork ``live`` into ``children``, a number of, new sessions and return them. They begin with its
        history as it is now, or, if ``at`` is set, up to the item with that id. ``compaction``: a summary that
        replaces the older turns in them. ``adapter``: theirs; None: none. They have no connection: each stays
        in memory for ``resume_seconds``, for a client that resumes it with its handle.

        Raises ``SessionUnknown``, ``SessionLimit``, ``StorageUnavailable``, and what ``Session.branch`` does.
        """
        return await self._whole(self._fork(live, children, at, compaction, adapter))

    async def _fork(
        self,
        live: LiveSession,
        children: int,
        at: str | None,
        compaction: ForkSummary | None,
        adapter: SessionAdapter | Literal["parent"] | None,
    ) -> list[LiveSession]:
        self.forks.check(live.id, children)
        face = live.face  # it may be let go meanwhile
        salt = self.registry.record_of(live.id).salt
        self._thin_forks(salt, children)
        self.make_room(salt, children)
        configs = [face.child_config() for _ in range(children)]
        sessions = await self.forks.fork(live.id, configs, at, compaction, adapter)
        made: list[LiveSession] = []
        try:
            for session, config in zip(sessions, configs, strict=True):
                made.append(face.fork(session, config))
        except BaseException:  # no client has a handle of any of them
            for session in sessions:
                await self.registry.discard(session.id)
            raise
        for child in made:
            child.resumable, child.caller = True, live.caller
            log.info("session forked", extra=about_session(child.id, parent=live.id))
            self._live[child.id] = child
            self._start_timer(child)
            forks = self._unopened.setdefault(salt, OrderedDict())
            forks[child.id] = (child, asyncio.get_running_loop().time())
        return made

    def _thin_forks(self, salt: bytes, more: int) -> None:
        """Make sure that a tenant may have ``more`` forks, in number, that no client has opened yet: close its
        oldest such forks in memory if there are too many.

        Forks younger than ``young_seconds`` stay, and so do those that are not in the journal. Raises
        ``SessionLimit`` if there are too many of these; then none is closed.
        """
        forks, most = self._unopened.get(salt, OrderedDict()), self._limits.unopened_forks
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
        """Close the session with the id ``target`` and remove it from the journal. It must be in the same fork
        tree as the session ``session_id``. Raises ``MemberUnknown`` or ``PruneInvalid``; then nothing has
        changed."""
        number = await self.forks.begin_pruning(session_id, target)
        await self._whole(self._prune(target, number))

    async def _prune(self, target: str, number: int | None) -> None:
        if number is not None:
            await self.registry.wait_for_reopening(
                number
            )  # if it is resumed now, it is in `_live` after this
        live, connection = self._live.pop(target, None), self._connections.pop(target, None)
        self._stop_timer(target)
        if connection is not None:
            connection.taken(SessionDeleted())
        try:
            if live is not None:
                erase = not live.session.log.durable
                await self.registry.close(target, leave_readers=live.aclose, erase_kv=erase)
        finally:
            await self.forks.forget(target, number)
        log.info("session pruned", extra=about_session(target))

    # --- for the operator -----------------------------------------------------------------------------------

    def state_of(self, session_id: str) -> Literal["running", "open", "idle"] | None:
        """What a session in memory does: a turn runs in it; it has a connection; it has none. None: it is not
        in memory."""
        live = self._live.get(session_id)
        if live is None:
            return None
        return "running" if live.running else "open" if session_id in self._connections else "idle"

    async def end(self, session_id: str) -> None:
        """Take a session from its connection, which is told as if another one had taken it, and close it in
        memory; the journal keeps it. One that the journal does not keep stays in memory, as for a client that
        has left. Running turns end first, as incomplete. Does nothing for a session that is not in memory."""
        if (live := self._live.get(session_id)) is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.close_seconds):
                for response in live.running:
                    await live.cancel(response.id, EndReason.SERVER_LEAVING)
                await live.idle()
                await live.journaled()
        if self._live.get(session_id) is not live:
            return  # it was closed meanwhile
        if (connection := self._connections.pop(session_id, None)) is not None:
            connection.taken(SessionMoved())
            live.face.detach()
            self._start_timer(live)
        if live.session.log.durable:
            self._put_away(live)
            await self.registry.wait_closed(session_id)

    async def erase(self, record: SessionRecord, number: int | None) -> None:
        """Close the session of this ``record``, also on a connection, and delete it: its records and its KV on
        all tiers. What its forks share with it stays. ``number``: in the journal; None: it does not keep it."""
        self.registry.trees.begin_pruning(record, record.id)
        await self._whole(self._prune(record.id, number))

    async def _whole(self, work: Coroutine[None, None, _T]) -> _T:
        """Run ``work``, which changes several sessions, to its end, and return its result. It is finished even
        if the caller is cancelled, for example because the session that asked for it is pruned meanwhile."""
        return await asyncio.shield(spawn(work, self._works))

    # --- leaving --------------------------------------------------------------------------------------------

    def left(self, live: LiveSession, connection: SessionConnection) -> None:
        """Called when the connection of the session ``live`` is gone. If a client may come back, the session
        stays in memory for ``resume_seconds``; otherwise it is closed in memory now. Does nothing if it is on
        another connection by now."""
        if self._connections.get(live.id) is not connection:
            return  # the session has another connection
        del self._connections[live.id]
        live.face.detach()
        if (live.resumable or live.disposable) and not self._closing:
            self._start_timer(live)
        else:
            self._put_away(live)

    async def drop(self, live: LiveSession, connection: SessionConnection) -> None:
        """Close and forget, in the journal too, a new session after its first turn failed, so that no client
        can come back to it. Does nothing if it is not on ``connection``, or something still runs in it."""
        if self._connections.get(live.id) is connection and live.at_rest:
            del self._connections[live.id], self._live[live.id]
            live.face.detach()
            await live.aclose()
            await self.registry.discard(live.id)

    async def delete(self, numbers: Iterable[int]) -> None:
        """Delete sessions, by their numbers in the journal, because a client has deleted what they were made
        for. Those that are in use are deleted when they are closed."""
        for number in numbers:
            live = self._live.get(await self.registry.delete(number) or "")
            if live is not None and live.at_rest:
                self._put_away(live)

    def alarm(self, fault: StorageUnavailable) -> None:
        """Called when the journal cannot write, because of ``fault``: calls every session's
        `SessionFace.alarm`, some at a time."""
        spawn(self._tell_all(lambda face: face.alarm(fault)), self._works)

    def recovered(self, lost_seconds: float) -> None:
        """Called when another engine has taken over after ``lost_seconds`` without one: calls every session's
        `SessionFace.recovered`, some at a time."""
        spawn(self._tell_all(lambda face: face.recovered(lost_seconds)), self._works)

    async def _tell_all(self, tell: Callable[[SessionFace], None]) -> None:
        for part in sliced(self.live()):
            for live in part:
                if live.id in self._live:
                    tell(live.face)
            await asyncio.sleep(0)

    def stop(self) -> None:
        """Called when the server begins to end. From now on, a session is closed in memory as soon as it has no
        connection, and its running turns count as interrupted: the journal records no end for them, so the next
        server continues them."""
        self._closing = True

    async def aclose(self) -> None:
        """Close all sessions in memory and wait until that is done. Running turns count as interrupted, as
        after `stop`."""
        self.stop()
        await asyncio.gather(*self._works, return_exceptions=True)
        for live in self.live():
            self._put_away(live)
        await asyncio.gather(*self._leaving)

    def _start_timer(self, live: LiveSession) -> None:
        """Called when the session has no connection: closes it in memory after ``resume_seconds``, unless
        `_stop_timer` is called before."""
        loop = asyncio.get_running_loop()
        salt = self.registry.record_of(live.id).salt
        timer = loop.call_later(self._limits.resume_seconds, self._put_away, live)
        self._timers[live.id] = (timer, salt)
        if live.session.log.durable or live.disposable or self.forks.unopened(live.session):
            self._left.setdefault(salt, OrderedDict())[live.id] = live

    def _stop_timer(self, session_id: str) -> None:
        """Stop the session's timer, if it has one, because it is on a connection again or is being closed."""
        timer, salt = self._timers.pop(session_id, (None, b""))
        if timer is not None:
            timer.cancel()
            for parts in (self._left, self._unopened):
                part = parts.get(salt)
                if part is not None and part.pop(session_id, None) is not None and not part:
                    del parts[salt]

    def _discard(self, session: Session, *, interrupt: bool = False) -> None:
        """Close, in a task, a session for which its face could not make a live session.

        A new session is removed from the journal, too. With ``interrupt`` it came from the journal, and stays
        there with its interrupted turn.
        """
        registry = self.registry
        close = registry.close(session.id, interrupt=True) if interrupt else registry.discard(session.id)
        spawn(close, self._leaving)

    def _attach(self, live: LiveSession, connection: SessionConnection) -> LiveSession:
        self._live[live.id] = live
        self._connections[live.id] = connection
        self._stop_timer(live.id)
        live.caller = connection.caller
        return live

    def _put_away(self, live: LiveSession) -> None:
        """Close a session in memory unless it is on a connection; when the server ends, even then. Its place is
        free at once, and the rest is done in a task."""
        self._stop_timer(live.id)
        gone = self._closing or live.id not in self._connections
        if gone and self._live.pop(live.id, None) is not None:
            self._connections.pop(live.id, None)  # what it is left by later finds nothing to do
            facts = live.caller.attribution.facts()  # another client may be asking for its place
            log.info("session closed", extra=about_session(live.id, **facts))
            close = self.registry.close(live.id, leave_readers=live.aclose, interrupt=self._closing)
            spawn(close, self._leaving)
