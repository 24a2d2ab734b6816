"""What the verbs did is in the journal: a server that comes back has the same sessions, forks and all."""

from __future__ import annotations

import pytest

from holdfast.sessions.errors import (
    ConversationBusy,
    CutInvalid,
    HandleUnknown,
    ItemUnknown,
    RecordDamaged,
    SessionClosed,
    SessionLimit,
    SessionUnknown,
)
from holdfast.sessions.forks import Forks
from holdfast.sessions.journal.records import SessionSnapshot, drop
from holdfast.sessions.journal.store import JournalStore
from holdfast.sessions.registry import Reopened, SessionRegistry
from holdfast.sessions.session import Session
from holdfast.sessions.turn.events import ReplyDone, ReplyTextDelta
from holdfast.sessions.turn.request import TurnRequest

from .journal.journal_stage import folder, registry_in, store_in
from .session_stage import LANGUAGE, ask, read, reciting, run, say


def texts(session: Session) -> list[str]:
    return [item.text for item in session.history.items()]


def tokens(session: Session) -> list[int]:
    head = session.history.head
    return [] if head is None else head.tokens().tolist()


async def back(registry: SessionRegistry, handle: str) -> Reopened:
    found = await registry.resume(handle, b"me")
    assert isinstance(found, Reopened)
    return found


@run
async def test_a_cut_a_rewind_and_a_fork_outlive_the_server() -> None:
    with folder() as path:
        link = reciting("one two three four", "five six", "seven eight")
        async with registry_in(path, link) as registry:
            session = registry.create(owner=b"me")
            await ask(session, "first")
            await ask(session, "second")
            there = session.history.items()
            session.cut(there[1].id, 7)
            session.rewind(there[2].id)
            (child,) = await Forks(registry).fork(session.id, [b"config"])
            await read(child)
            wanted, childs = texts(session), texts(child)
            ids, childs_ids = tokens(session), tokens(child)
            handles = session.handles.current, child.handles.current
        assert wanted == ["first", "one two", "second"] and childs == [*wanted, "seven eight"]
        async with registry_in(path, reciting("nine")) as registry:
            for handle, want, want_ids in zip(handles, (wanted, childs), (ids, childs_ids), strict=True):
                again = await back(registry, handle)
                assert (texts(again.session), tokens(again.session)) == (want, want_ids)
            assert again.record.config == b"config" and again.replayed.last is not None
            await ask(again.session, "third")
            assert texts(again.session)[-2:] == ["third", "nine"]


@run
async def test_an_interrupt_that_the_server_did_not_live_to_finish_is_finished() -> None:
    with folder() as path:
        link = reciting("one two three four five six", ahead=1)
        async with registry_in(path, link) as registry:
            session = registry.create(owner=b"me")
            say(session, "go")
            response = session.respond(TurnRequest.checked())
            said = ""
            while len(said) < 8:
                event = await anext(response)
                said += event.text if isinstance(event, ReplyTextDelta) else ""
                item = getattr(event, "item_id", "")
            assert session.cut(item, 7) is response
            handle = session.handles.current
        async with registry_in(path, reciting("one two three four five six")) as registry:
            again = await back(registry, handle)
            past = again.replayed.last
            assert past is not None and past.cut == (item, 7)
            events = [event async for event in again.session.go_on(past)]
            assert isinstance(events[-1], ReplyDone) and events[-1].status == "cancelled"
            assert texts(again.session) == ["go", said[:7]]


@pytest.mark.parametrize("on_disk", [0, 3, 1000])
@run
async def test_the_kv_of_a_reply_that_outlives_its_server_adds_up_to_its_prompt(on_disk: int) -> None:
    tale = "one two three four five six"
    with folder() as path:
        async with registry_in(path, reciting(tale, ahead=1)) as registry:
            session = registry.create(owner=b"me")
            say(session, "go")
            response = session.respond(TurnRequest.checked())
            for _ in range(6):
                await anext(response)
            handle = session.handles.current
        async with registry_in(path, reciting(tale, on_disk=on_disk)) as registry:
            again = await back(registry, handle)
            past = again.replayed.last
            assert past is not None and len(past.ids)
            done = [event async for event in again.session.go_on(past)][-1]
            assert isinstance(done, ReplyDone) and done.status == "completed"
            usage = done.usage
            assert usage.cached_tokens == usage.disk_tokens == min(on_disk, usage.input_tokens)
            again_of_reply = len(past.ids) - 1 - max(0, min(on_disk - usage.input_tokens, len(past.ids) - 1))
            computed = usage.prefilled_tokens + usage.recomputed_tokens
            assert usage.cached_tokens + computed == usage.input_tokens + again_of_reply


@run
async def test_a_fork_in_mid_reply_outlives_the_server_without_the_rest() -> None:
    with folder() as path:
        async with registry_in(path, reciting("one two three four", "right")) as registry:
            session = registry.create(owner=b"me")
            say(session, "go")
            response = session.respond(TurnRequest.checked())
            for _ in range(4):
                await anext(response)
            (child,) = await Forks(registry).fork(session.id, [b""])
            shared, handle = texts(child), child.handles.current
            async for _ in response:
                pass
            assert texts(session)[-1].startswith(shared[-1]) and texts(session) != shared
        async with registry_in(path, reciting("left")) as registry:
            again = await back(registry, handle)
            assert texts(again.session) == shared and again.replayed.last is None
            await ask(again.session, "and?")
            assert texts(again.session)[-1] == "left"


@run
async def test_the_parent_of_a_fork_can_be_forgotten_first() -> None:
    """Its operations stay as long as a fork, or a fork of a fork, follows on them; then nothing is left."""
    with folder() as path:
        async with registry_in(path, reciting("one", "two", "three")) as registry:
            session = registry.create(owner=b"me")
            await ask(session, "a")
            (child,) = await Forks(registry).fork(session.id, [b""])
            await ask(child, "b")
            (grandchild,) = await Forks(registry).fork(child.id, [b""])
            await ask(grandchild, "c")
            handles = [one.handles.current for one in (session, child, grandchild)]
            wanted = texts(grandchild)
        with store_in(path) as store:
            first, second, third = sorted(store.sessions.states)
            store.write([drop(first)])
            store.write([drop(second)])
            with pytest.raises(RecordDamaged):
                store.session(first)
        async with registry_in(path, reciting()) as registry:
            for handle in handles[:2]:
                with pytest.raises(HandleUnknown):
                    await registry.resume(handle, b"me")
            assert texts((await back(registry, handles[2])).session) == wanted
        with store_in(path) as store:
            store.write([drop(third)])
            assert entries(store) == 0


@run
async def test_long_sessions_are_condensed_and_forks_of_them_come_back() -> None:
    """What forks follow on stays as it is, until they have records of many with their origin's past in them."""
    with folder() as path:
        words = [f"word {number}" for number in range(24)]
        async with registry_in(path, reciting(*words), snapshot_operations=2) as registry:
            session = registry.create(owner=b"me")
            for number in range(6):
                await ask(session, f"ask {number}")
                await synced(session)
            (child,) = await Forks(registry).fork(session.id, [b""])
            (grandchild,) = await Forks(registry).fork(child.id, [b""])
            for number in range(6):
                for one in (session, child, grandchild):
                    await ask(one, f"then {number}")
                    await synced(one)
            every = (session, child, grandchild)
            wanted = [(texts(one), tokens(one)) for one in every]
            handles = [one.handles.current for one in every]
        with store_in(path) as store:
            kinds = [
                [type(op) for op in store.session(number).operations]
                for number in sorted(store.sessions.states)
            ]
        assert kinds[2][0] is SessionSnapshot, "the last has no forks"
        async with registry_in(path, reciting()) as registry:
            for handle, want in zip(handles, wanted, strict=True):
                again = (await back(registry, handle)).session
                assert (texts(again), tokens(again)) == want


async def synced(session: Session) -> None:
    ticket = session.log.sync()
    assert ticket is not None
    await ticket


def entries(store: JournalStore) -> int:
    """Sessions of which anything is left, and bytes that are needed for them."""
    return len(store.sessions.states) + sum(one.live for one in store.logs.logs.values())


@run
async def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
    link = reciting("one two three", "four five six")
    registry = SessionRegistry(link, LANGUAGE)
    session, other = registry.create(), registry.create()
    await ask(session, "count")
    asked, reply = session.history.items()
    before = texts(session)
    for wrong, error in (
        (lambda: session.cut("unknown", 1), ItemUnknown),
        (lambda: session.cut(reply.id, 99), CutInvalid),
        (lambda: session.cut(asked.id, 1), CutInvalid),
        (lambda: other.cut(reply.id, 1), ItemUnknown),
        (lambda: session.rewind("unknown"), ItemUnknown),
        (lambda: session.rewind(10_000), CutInvalid),
        (lambda: session.rewind(1), CutInvalid),
    ):
        with pytest.raises(error):
            wrong()
    with pytest.raises(ItemUnknown):
        await Forks(registry).fork(session.id, [b""], "unknown")
    with pytest.raises(SessionUnknown):
        await Forks(registry).fork("sess_nobody", [b""])
    with pytest.raises(SessionLimit):
        await Forks(registry).fork(session.id, [b""] * 20_000)
    say(session, "go on")
    response = session.respond(TurnRequest.checked())
    await anext(response)
    for busy in (lambda: session.rewind("root"), lambda: session.respond(TurnRequest.checked())):
        with pytest.raises(ConversationBusy):
            busy()
    await response.aclose()
    assert texts(session)[:2] == before and registry.statistics()["sessions"] == 2
    await registry.close(session.id)
    with pytest.raises(SessionUnknown):
        await Forks(registry).fork(session.id, [b""])
    for closed in (lambda: session.rewind("root"), lambda: session.cut(reply.id, 1), session.branch):
        with pytest.raises(SessionClosed):
            closed()
