"""Limits of one tenant in the registry and in the journal, over forks and restarts; others lose nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.sessions.conversation.items import Preamble
from holdfast.sessions.errors import HandleUnknown, SessionLimit, ShareFull, StorageUnavailable, TurnLimit
from holdfast.sessions.forks import Forks
from holdfast.sessions.journal.journal import Journal
from holdfast.sessions.journal.records import (
    AnyOperation,
    Branched,
    EventReceived,
    Origin,
    SessionRecord,
    SessionSnapshot,
    append,
    drop,
    put,
)
from holdfast.sessions.journal.segment import Fresh, Kind
from holdfast.sessions.journal.store import JournalStore
from holdfast.sessions.registry import Reopened, SessionRegistry
from holdfast.sessions.session import Session
from holdfast.sessions.settings import JournalShare, SessionSettings, TenantLimits
from holdfast.sessions.turn.events import ReplyDone
from holdfast.sessions.turn.request import TurnRequest

from .journal.journal_stage import MODEL, SMALL, birth, folder
from .session_stage import LANGUAGE, ask, reciting, run, say

ACME, ZENITH = b"acme", b"zenith"
SECONDS = 10.0
"""The journal's thread waits no longer for a test that has failed."""
OUT_OF_BAND = TurnRequest.checked(out_of_band=True)


def registry_of(limits: TenantLimits, *said: str) -> SessionRegistry:
    return SessionRegistry(reciting(*said), LANGUAGE, SessionSettings(tenants={ACME: limits}))


@asynccontextmanager
async def kept_in(
    path: Path, limits: TenantLimits, share: JournalShare, *said: str
) -> AsyncIterator[SessionRegistry]:
    """A registry on a journal, as a server has them; closed as by one that leaves."""
    journal = await Journal.open(path, MODEL, replace(SMALL, tenants={ACME: share}))
    registry = SessionRegistry(reciting(*said), LANGUAGE, SessionSettings(tenants={ACME: limits}), journal)
    try:
        yield registry
    finally:
        await registry.aclose()
        await journal.aclose()


async def durable(session: Session) -> str:
    """Its handle, once all of it is on disk and the journal has kept its shares."""
    await session.log.sync()
    return session.handles.current


class Question:
    """Asked of the journal's thread, which does nothing besides until it is ``answered``."""

    def __init__(self, journal: Journal) -> None:
        self.heard, self.answered = asyncio.Event(), threading.Event()
        self._loop = asyncio.get_running_loop()
        self.answer = asyncio.ensure_future(journal.read(self._think))

    def _think(self, _: JournalStore) -> None:
        self._loop.call_soon_threadsafe(self.heard.set)
        self.answered.wait(SECONDS)


async def opens(registry: SessionRegistry, handle: str) -> bool:
    try:
        found = await registry.resume(handle, b"")
    except HandleUnknown:
        return False
    await registry.close((found.session if isinstance(found, Reopened) else found).id)
    return True


# --- open sessions, and replies that run --------------------------------------------------------------------


@run
async def test_one_tenant_has_no_more_open_than_it_may_forks_counted() -> None:
    registry = registry_of(TenantLimits(sessions=3), "one", "two")
    first = registry.create(salt=ACME)
    await ask(first, "a")
    (child,) = await Forks(registry).fork(first.id, [b""])
    with pytest.raises(SessionLimit, match="2 sessions open, and may have 3"):
        await Forks(registry).fork(first.id, [b"", b""])
    assert registry.statistics()["sessions"] == 2, "none of the two was made"
    registry.create(salt=ACME)
    with pytest.raises(SessionLimit):
        registry.create(salt=ACME)
    for _ in range(5):
        registry.create(salt=ZENITH)
    await registry.close(child.id)
    registry.create(salt=ACME)
    await registry.aclose()
    assert (await registry.statistics_of(ACME))["sessions"] == 0


@run
async def test_replies_at_once_are_counted_over_sessions_and_refused_before_anything_happens() -> None:
    registry = registry_of(TenantLimits(turns=2), *["one two three four five"] * 5)
    chats = [registry.create(salt=ACME) for _ in range(3)]
    other = registry.create(salt=ZENITH)
    for session in (*chats, other):
        say(session, "count")
    running = [chats[0].respond(TurnRequest.checked()), chats[0].respond(OUT_OF_BAND)]
    for response in running:
        await anext(response)
    items = chats[1].history.items()
    with pytest.raises(TurnLimit, match="2 replies running, as many as it may"):
        chats[1].respond(TurnRequest.checked())
    assert chats[1].history.items() == items and not chats[1].history.busy
    assert [event async for event in other.respond(TurnRequest.checked())][-1].status.value == "completed"
    assert isinstance([event async for event in running[1]][-1], ReplyDone)
    third = chats[1].respond(TurnRequest.checked())
    with pytest.raises(TurnLimit):
        chats[2].respond(TurnRequest.checked())
    await third.aclose()  # before a word was read
    await anext(chats[2].respond(TurnRequest.checked()))
    await registry.close(chats[2].id)
    assert (await registry.statistics_of(ACME))["turns"] == 1
    await registry.aclose()


@run
async def test_a_reply_that_was_never_read_goes_with_its_session() -> None:
    registry = registry_of(TenantLimits(turns=1), "one")
    lost, session = registry.create(salt=ACME), registry.create(salt=ACME)
    say(lost, "a")
    lost.respond(TurnRequest.checked())
    await registry.close(lost.id)
    assert (await ask(session, "b")).status.value == "completed"
    await registry.aclose()


@run
async def test_sessions_that_come_back_from_the_journal_are_counted() -> None:
    limits, share = TenantLimits(sessions=2), JournalShare()
    with folder() as path:
        async with kept_in(path, limits, share, "one") as registry:
            handles = []
            for _ in range(3):
                session = registry.create(salt=ACME)
                handles.append(await durable(session))
                await registry.close(session.id)
        async with kept_in(path, limits, share, "one") as registry:
            first = await registry.resume(handles[0], b"")
            assert isinstance(first, Reopened)
            created = registry.create(salt=ACME)
            for _ in range(2):
                with pytest.raises(SessionLimit):
                    await registry.resume(handles[2], b"")
            await registry.resume(await durable(registry.create(salt=ZENITH)), b"")
            await registry.close(created.id)
            found = await registry.resume(handles[2], b"")  # a refusal has used no handle up
            assert isinstance(found, Reopened) and found.record.salt == ACME
            assert (await registry.statistics_of(ACME))["sessions"] == 2
            with pytest.raises(SessionLimit):
                await Forks(registry).fork(first.session.id, [b""])


# --- the journal --------------------------------------------------------------------------------------------


@run
async def test_beyond_its_share_of_sessions_a_tenant_loses_its_own_the_longest_unused() -> None:
    limits, share = TenantLimits(sessions=2), JournalShare(sessions=3)
    with folder() as path:
        async with kept_in(path, limits, share, "one") as registry:
            stranger = registry.create(salt=ZENITH)
            foreign = await durable(stranger)
            await registry.close(stranger.id)
            handles = []
            for _ in range(5):
                session = registry.create(salt=ACME)
                handles.append(await durable(session))
                await registry.close(session.id)
            assert (await registry.statistics_of(ACME))["kept"] == 3
            assert [await opens(registry, handle) for handle in handles[:3]] == [False, False, True]
            assert await opens(registry, foreign)
        async with kept_in(path, limits, JournalShare(sessions=2), "one") as registry:
            assert (await registry.statistics_of(ACME))["kept"] == 2, "a smaller share counts from the start"
            assert [await opens(registry, handle) for handle in handles[2:]] == [False, True, True]


@run
async def test_open_sessions_that_fill_the_share_begin_nothing_new_until_one_has_left() -> None:
    limits, share = TenantLimits(sessions=9), JournalShare(bytes=20_000)
    with folder() as path:
        async with kept_in(path, limits, share, "one", "two") as registry:
            big, small, stranger = (registry.create(salt=salt) for salt in (ACME, ACME, ZENITH))
            say(big, "long " * 5000)
            handle, other = await durable(big), await durable(small)
            await registry.journal.read(lambda store: None)
            for session in (big, small):
                assert isinstance(session.log.fault, ShareFull)
            with pytest.raises(ShareFull, match="share of the journal, 20000 bytes"):
                registry.create(salt=ACME)
            with pytest.raises(ShareFull):
                await Forks(registry).fork(small.id, [b""])
            assert stranger.log.fault is None and (await ask(stranger, "a")).status.value == "completed"
            registry.create(salt=ZENITH)
            await registry.close(big.id)
            await registry.journal.read(lambda store: None)
            await registry.journal.read(lambda store: None)
            assert small.log.fault is None, "closed sessions made room"
            assert not await opens(registry, handle)
            assert (await ask(small, "b")).status.value == "completed"
            other = await durable(small)
        async with kept_in(path, limits, share, "one") as registry:
            assert await opens(registry, other)


@run
async def test_a_client_that_learns_of_a_prune_has_its_room() -> None:
    limits, share = TenantLimits(sessions=9), JournalShare(bytes=20_000)
    with folder() as path:
        async with kept_in(path, limits, share) as registry:
            assert registry.journal is not None
            small = registry.create(salt=ACME)
            (big,) = await Forks(registry).fork(small.id, [b""])
            say(big, "long " * 5000)
            await durable(big)
            number = await Forks(registry).begin_pruning(small.id, big.id)
            before = Question(registry.journal)
            await before.heard.wait()
            assert isinstance(small.log.fault, ShareFull)
            await registry.close(big.id)
            await Forks(registry).forget(big.id, number)
            told, after = small.log.sync(), Question(registry.journal)
            await asyncio.sleep(0)
            before.answered.set()
            await told
            fault = small.log.fault  # while the thread has done nothing but commit
            after.answered.set()
            await after.answer
            assert fault is None


@run
async def test_a_long_session_that_was_made_shorter_goes_on_in_its_share() -> None:
    limits, share = TenantLimits(sessions=9), JournalShare(bytes=9_000)
    with folder() as path:
        async with kept_in(path, limits, share) as registry:
            journal, session = registry.journal, registry.create(salt=ACME)
            assert journal is not None
            loop, shorter = asyncio.get_running_loop(), journal.condense
            begun: asyncio.Future[tuple[StorageUnavailable | None, Question]] = loop.create_future()

            async def ask_next() -> None:
                begun.set_result((session.log.fault, Question(journal)))
                await asyncio.sleep(0)

            def asked_first(operations: Sequence[AnyOperation]) -> tuple[int, AnyOperation] | None:
                asyncio.run_coroutine_threadsafe(ask_next(), loop).result(SECONDS)
                return shorter(operations)

            journal.condense = asked_first
            for number in range(300):
                session.log.append(EventReceived(event=f"event_{number}"))
            session.log.sync()
            before, question = await begun
            await question.heard.wait()
            fault = session.log.fault  # while the thread has done nothing but make the session shorter
            question.answered.set()
            await question.answer
            assert isinstance(before, ShareFull) and fault is None


HEARD = st.integers(1, 400).map(lambda length: EventReceived(event="e" * length))
SALTS = st.sampled_from([ACME, ZENITH])


@settings(max_examples=settings().max_examples // 5)
@given(st.data())
def test_what_is_counted_is_what_is_there(data: st.DataObject) -> None:
    """Births, forks, operations, snapshots, deaths: the count follows, and a reopened store counts the
    same."""
    share = JournalShare(sessions=data.draw(st.integers(1, 6)), bytes=data.draw(st.integers(500, 4000)))
    numbers = replace(SMALL, tenants={ACME: share})
    with folder() as path:
        store = JournalStore(path, MODEL, numbers)
        lengths: dict[int, int] = {}
        salts: dict[int, bytes] = {}
        for number in range(1, data.draw(st.integers(2, 25))):
            at = data.draw(st.sampled_from([0, *lengths]))
            match data.draw(st.sampled_from(["born", "born", "fork", "more", "more", "drop", "short"])):
                case "more" if at:
                    store.write([append(at, lengths[at], data.draw(HEARD))])
                    lengths[at] += 1
                case "drop" if at:
                    store.write([drop(at)])
                    del lengths[at]
                case "short" if at and lengths[at]:
                    store.condense(
                        at,
                        lambda known: (len(known), SessionSnapshot(preamble=Preamble(), rendered=Preamble())),
                    )
                case "fork" if at:
                    salts[number] = salts[at]
                    store.write(born(number, salts[at], Origin(session=at, operations=lengths[at])))
                    lengths[number] = 1
                case "born":
                    salts[number] = data.draw(SALTS)
                    store.write(born(number, salts[number], None))
                    lengths[number] = 1
            assert counted(store, ACME) == store.retention.statistics(ACME)
            live = {data.draw(st.sampled_from([0, *lengths]))}
            store.retention.look_again(ACME)  # as a journal does when a session leaves
            full = store.keep_shares(live)
            lengths = {one: count for one, count in lengths.items() if one in kept(store)}
            found = counted(store, ACME)
            assert found == store.retention.statistics(ACME)
            theirs = [one for one in lengths if salts[one] == ACME]
            within = found["kept"] <= share.sessions and found["journal"] <= share.bytes
            assert within or set(theirs) <= live, "what is beyond the share is open"
            assert (ACME in full) == (found["journal"] > share.bytes)
        store.close()
        store = JournalStore(path, MODEL, numbers)
        assert store.retention.statistics(ACME) == counted(store, ACME)
        store.close()


def born(number: int, salt: bytes, origin: Origin | None) -> list[Fresh]:
    record = SessionRecord(id=f"sess_{number}", owner=b"me", salt=salt, clock="", origin=origin)
    others = birth(number)[1:]
    assert others[-1].kind == Kind.KEYRING
    return [put(number, record), *others, append(number, 0, Branched())]


def counted(store: JournalStore, salt: bytes) -> dict[str, float]:
    """A tenant's sessions and bytes, as their records on the disk have them."""
    theirs = [state for state in store.sessions.states.values() if state.salt == salt]
    records = [store.logs.read(where) for state in theirs for where in (state.record, *state.operations)]
    size = sum(store.logs.header.frame.padded(len(record.payload)) for record in records)
    return {"kept": float(sum(state.number in kept(store) for state in theirs)), "journal": float(size)}


def kept(store: JournalStore) -> set[int]:
    return {number for number, state in store.sessions.states.items() if state.kept}
