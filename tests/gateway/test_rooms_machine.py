"""Places for sessions, shared by tenants that open, fork, leave, come back, speak and close in any order.

At any time a tenant can open sessions up to its own limit, no more are open than there are places, and no
session that has a socket or runs a turn is put away.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from holdfast.gateway.access.auth import TurnCaller
from holdfast.gateway.live.session import LiveSession
from holdfast.gateway.live.sessions import LiveSessions
from holdfast.gateway.realtime.session import RealtimeFace
from holdfast.gateway.settings import ClientLimits
from holdfast.sdk.frames.client import SessionFork
from holdfast.sdk.frames.codec import decode_client
from holdfast.sessions.errors import HandleUnknown, SessionLimit
from holdfast.sessions.journal.journal import Journal
from holdfast.sessions.registry import SessionRegistry
from holdfast.sessions.settings import JournalSettings, SessionSettings, TenantLimits
from holdfast.sessions.text.language import Language
from holdfast.tests.gateway.scripted_service import END, Scripted, spoken
from holdfast.tests.sessions.text.chat_languages import ours

pytestmark = pytest.mark.anyio
PLACES = 12
PROMISED, KNOWN, OTHER, STRANGER = b"promised", b"known", b"other", b"stranger"
TENANTS = {PROMISED: TenantLimits(sessions=3), KNOWN: TenantLimits(), OTHER: TenantLimits(turns=9)}
FLOOR = (PLACES - 3) // 4
SURE = {PROMISED: 3, KNOWN: FLOOR, OTHER: FLOOR}
"""Places that are set aside for a tenant."""
SETTINGS = SessionSettings(max_sessions=PLACES, max_unopened=6, tenants=TENANTS)
LANGUAGE = Language.of(ours("chatml"))
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
SAY = decode_client(
    b'{"type": "response.create", "items": [{"type": "message", "role": "user",'
    b' "content": [{"type": "input_text", "text": "Hello!"}]}]}'
)
TENANT = st.sampled_from([PROMISED, KNOWN, OTHER, STRANGER])
INDEX = st.integers(0, 1000)


class Socket:
    """`SessionConnection`."""

    caller = TurnCaller()

    def taken(self, why: Exception) -> None:
        """The session goes on elsewhere."""


class RoomsMachine(RuleBasedStateMachine):
    """``held``: sessions on a socket, with it; ``handles``: of sessions that were left, and their tenants'."""

    def __init__(self) -> None:
        super().__init__()
        self.runner, self.stack = asyncio.Runner(), ExitStack()
        folder = Path(self.stack.enter_context(TemporaryDirectory(dir=MEMORY)))
        self.journal = self.run(Journal.open(folder, b"model", JournalSettings(reserve_bytes=0)))
        self.link = Scripted(spoken, END, flowing=False)
        self.book = SessionRegistry(self.link, LANGUAGE, SETTINGS, self.journal)
        self.sessions = LiveSessions(self.book, ClientLimits())
        self.face = RealtimeFace(self.sessions, self.link, ("scripted",), ClientLimits())
        self.held: dict[str, tuple[LiveSession, Socket]] = {}
        self.handles: list[tuple[str, bytes]] = []
        self.keep: set[str] = set()  # on a socket, or with a turn that runs

    def teardown(self) -> None:
        self.run(self.closed())
        self.runner.close()
        self.stack.close()

    async def closed(self) -> None:
        await self.sessions.aclose()
        await self.book.aclose()
        await self.journal.aclose()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(asyncio.wait_for(work, 20))

    def counted(self, tenant: bytes) -> int:
        return sum(self.book.record_of(live.id).salt == tenant for live in self.sessions.live())

    def one(self, index: int) -> tuple[LiveSession, Socket]:
        return list(self.held.values())[index % len(self.held)]

    @rule(tenant=TENANT, count=st.integers(1, 6))
    def open(self, tenant: bytes, count: int) -> None:
        for _ in range(count):
            self.open_one(tenant)

    def open_one(self, tenant: bytes) -> None:
        async def opened() -> None:
            sure, socket = self.counted(tenant) < SURE.get(tenant, 0), Socket()
            try:
                live = self.sessions.open(self.face, socket, tenant, tenant)
            except SessionLimit:
                assert not sure, "its places are set aside"
                return
            live.resumable = True
            self.held[live.id] = live, socket
            self.keep.add(live.id)

        self.run(opened())

    @rule(index=INDEX, children=st.integers(1, 4))
    def fork(self, index: int, children: int) -> None:
        if not self.held:
            return
        live, _ = self.one(index)
        tenant = self.book.record_of(live.id).salt

        async def forked() -> None:
            tree = sum(self.sessions.forks.unopened(one.session) for one in self.sessions.live())
            sure = self.counted(tenant) + children <= SURE.get(tenant, 0) and tree + children <= 6
            try:
                made = await self.sessions.fork(live, children, None)
            except SessionLimit:
                assert not sure
                return
            self.handles += [(child.session.handles.current, tenant) for child in made]

        self.run(forked())

    @rule(index=INDEX)
    def leave(self, index: int) -> None:
        if not self.held:
            return
        live, socket = self.one(index)
        self.handles.append((live.session.handles.current, self.book.record_of(live.id).salt))
        del self.held[live.id]
        if not live.running:
            self.keep.discard(live.id)

        async def left() -> None:
            await live.session.log.sync()
            self.sessions.left(live, socket)

        self.run(left())

    @rule(index=INDEX)
    def come_back(self, index: int) -> None:
        if not self.handles:
            return
        handle, tenant = self.handles.pop(index % len(self.handles))

        async def back() -> None:
            sure, socket = self.counted(tenant) < SURE.get(tenant, 0), Socket()
            try:
                live = await self.sessions.resume(self.face, socket, handle, tenant)
            except SessionLimit:
                assert not sure
                self.handles.append((handle, tenant))
                return
            live.resumable = True
            self.held[live.id] = live, socket
            self.keep.add(live.id)

        self.run(back())

    @rule(index=INDEX)
    def speak(self, index: int) -> None:
        if self.held:
            live, _ = self.one(index)
            self.run(RealtimeFace.side_of(live).take(SAY))
            assert live.running
            self.keep.add(live.id)

    @rule()
    def end_turns(self) -> None:
        async def ended() -> None:
            self.link.flow()
            for live in self.sessions.live():
                await live.idle()
            self.link.flowing = False

        self.run(ended())
        self.keep &= set(self.held)

    @rule(index=INDEX)
    def close(self, index: int) -> None:
        if not self.held:
            return
        live, socket = self.one(index)
        del self.held[live.id]
        self.keep.discard(live.id)
        live.resumable = False

        async def left() -> None:
            self.sessions.left(live, socket)

        self.run(left())

    @invariant()
    def places_hold(self) -> None:
        counts = {tenant: self.counted(tenant) for tenant in (*SURE, STRANGER)}
        assert sum(counts.values()) == self.book.statistics()["sessions"] <= PLACES
        assert sum(max(count, SURE.get(tenant, 0)) for tenant, count in counts.items()) <= PLACES
        assert counts[PROMISED] <= 3

    @invariant()
    def none_that_is_in_use_is_gone(self) -> None:
        assert self.keep <= {live.id for live in self.sessions.live()}


def test_limits_hold_and_no_session_in_use_is_put_away() -> None:
    run_state_machine_as_test(
        RoomsMachine, settings=settings(max_examples=40, stateful_step_count=40, deadline=None)
    )


async def test_without_a_journal_only_forks_that_were_never_opened_give_way() -> None:
    link = Scripted(spoken, END)
    book = SessionRegistry(link, LANGUAGE, SessionSettings(max_sessions=4))
    sessions = LiveSessions(book, ClientLimits())
    face = RealtimeFace(sessions, link, ("scripted",), ClientLimits())
    socket = Socket()
    live, left = sessions.open(face, Socket(), b""), sessions.open(face, socket, b"")
    left.resumable = True
    sessions.left(left, socket)
    forks = [child.session.handles.current for child in await sessions.fork(live, 2, None)]
    await sessions.resume(face, Socket(), forks[1], b"")
    sessions.open(face, Socket(), b"")
    with pytest.raises(SessionLimit):
        sessions.open(face, Socket(), b"")
    with pytest.raises(HandleUnknown):
        await sessions.resume(face, Socket(), forks[0], b"")
    assert await sessions.resume(face, Socket(), left.session.handles.current, b"") is left
    await sessions.aclose()


async def test_a_session_that_serves_an_event_is_not_put_away(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Scripted(spoken, END, cut_off={"fork"})
    book = SessionRegistry(link, LANGUAGE, SessionSettings(max_sessions=3))
    sessions = LiveSessions(book, ClientLimits())
    face = RealtimeFace(sessions, link, ("scripted",), ClientLimits())
    live = sessions.open(face, Socket(), b"")
    (child,) = await sessions.fork(live, 1, None)
    gate = asyncio.Event()
    monkeypatch.setattr(sessions, "fork", lambda *_: gate.wait())
    serving = asyncio.ensure_future(RealtimeFace.side_of(child).take(SessionFork()))
    await asyncio.sleep(0)
    sessions.open(face, Socket(), b"")
    with pytest.raises(SessionLimit):
        sessions.open(face, Socket(), b"")
    serving.cancel()
    await sessions.aclose()


async def test_a_flood_of_forks_takes_no_place_that_is_set_aside() -> None:
    limits = {PROMISED: TenantLimits(sessions=50), KNOWN: TenantLimits()}
    link = Scripted(spoken, END)
    book = SessionRegistry(link, LANGUAGE, SessionSettings(max_sessions=300, tenants=limits))
    sessions = LiveSessions(book, ClientLimits())
    face = RealtimeFace(sessions, link, ("scripted",), ClientLimits())
    for _ in range(4):
        live = sessions.open(face, Socket(), KNOWN, KNOWN)
        with suppress(SessionLimit):
            for _ in range(157):
                await sessions.fork(live, 64, None)
    held = len(sessions)
    for _ in range(50):
        sessions.open(face, Socket(), PROMISED, PROMISED)
    assert held <= 250 and len(sessions) == held + 50
    with pytest.raises(SessionLimit):
        sessions.open(face, Socket(), PROMISED, PROMISED)
    await sessions.aclose()


async def test_unopened_forks_are_capped_in_each_tree() -> None:
    link = Scripted(spoken, END)
    book = SessionRegistry(link, LANGUAGE, SessionSettings(max_unopened=5))
    sessions = LiveSessions(book, ClientLimits())
    face = RealtimeFace(sessions, link, ("scripted",), ClientLimits())
    root, other = sessions.open(face, Socket(), b""), sessions.open(face, Socket(), b"")
    (child, *_) = await sessions.fork(root, 4, None)
    for live in (root, child):
        with pytest.raises(SessionLimit, match="4 forks that were never opened; it may have 5"):
            await sessions.fork(live, 2, None)
    await sessions.fork(other, 5, None)
    await sessions.resume(face, Socket(), child.session.handles.current, b"")
    forks = await sessions.fork(child, 2, None)
    await sessions.prune(root.id, forks[0].id)
    await sessions.fork(root, 1, None)
    with pytest.raises(SessionLimit):
        await sessions.fork(root, 1, None)
    await sessions.aclose()


async def test_a_known_tenant_without_limits_gets_its_share_of_the_places() -> None:
    tenants = {KNOWN: TenantLimits(), OTHER: TenantLimits()}
    link = Scripted(spoken, END)
    book = SessionRegistry(link, LANGUAGE, SessionSettings(max_sessions=12, tenants=tenants))
    sessions = LiveSessions(book, ClientLimits())
    face = RealtimeFace(sessions, link, ("scripted",), ClientLimits())
    with suppress(SessionLimit):
        while True:
            sessions.open(face, Socket(), KNOWN, KNOWN)
    assert len(sessions) == 9
    for _ in range(3):
        sessions.open(face, Socket(), OTHER, OTHER)
    with pytest.raises(SessionLimit):
        sessions.open(face, Socket(), OTHER, OTHER)
    await sessions.aclose()


@pytest.mark.parametrize(("kept", "young"), [(True, 0.0), (False, 0.0), (True, 60.0)])
async def test_a_tenant_s_oldest_unopened_forks_wait_in_the_journal_beyond_its_bound(
    kept: bool, young: float
) -> None:
    link = Scripted(spoken, END)
    with TemporaryDirectory(dir=MEMORY) as folder:
        numbers = JournalSettings(reserve_bytes=0)
        journal = await Journal.open(Path(folder), b"model", numbers) if kept else None
        book = SessionRegistry(link, LANGUAGE, SessionSettings(), journal)
        sessions = LiveSessions(book, ClientLimits(unopened_forks=10, young_seconds=young))
        face = RealtimeFace(
            sessions,
            link,
            ("scripted",),
            ClientLimits(unopened_forks=10, young_seconds=young),
        )
        one, two, other = (sessions.open(face, Socket(), salt, salt) for salt in (KNOWN, KNOWN, OTHER))
        first = await sessions.fork(one, 6, None)
        await sessions.fork(other, 10, None)
        if kept and not young:
            await sessions.fork(two, 6, None)
            assert len(sessions) == 3 + 10 + 10
            gone, stays = first[1], first[2]
            assert await sessions.resume(face, Socket(), stays.session.handles.current, KNOWN) is stays
            again = await sessions.resume(face, Socket(), gone.session.handles.current, KNOWN)
            assert again.id == gone.id and again is not gone
        else:
            with pytest.raises(SessionLimit, match="6 unopened forks; it may have 10"):
                await sessions.fork(two, 6, None)
            assert len(sessions) == 19
        await sessions.aclose()
        await book.aclose()
        if journal is not None:
            await journal.aclose()


async def test_limits_that_change_set_other_places_aside() -> None:
    link = Scripted(spoken, END)
    book = SessionRegistry(link, LANGUAGE, SessionSettings(max_sessions=6, tenants={KNOWN: TenantLimits()}))
    sessions = LiveSessions(book, ClientLimits())
    face = RealtimeFace(sessions, link, ("scripted",), ClientLimits())
    sessions.open(face, Socket(), KNOWN, KNOWN)
    book.tenants.change({KNOWN: TenantLimits(), PROMISED: TenantLimits(sessions=4)})
    sessions.open(face, Socket(), KNOWN, KNOWN)
    with pytest.raises(SessionLimit):
        sessions.open(face, Socket(), KNOWN, KNOWN)
    for _ in range(4):
        sessions.open(face, Socket(), PROMISED, PROMISED)
    assert len(sessions) == 6
    await sessions.aclose()
