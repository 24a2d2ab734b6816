"""The journal's thread: groups, tickets, faults that heal; and sessions that a registry opens again from it."""

from __future__ import annotations

import asyncio
import gc
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.runtime.verbs import Grammar, GrammarKind, Sampling
from holdfast.sessions.conversation.continuation import GivenConversation
from holdfast.sessions.conversation.input_text_buffer import InputTextBuffer
from holdfast.sessions.conversation.items import Message, Preamble, Tool
from holdfast.sessions.errors import HandleUnknown, RecordDamaged, StorageFull, StorageUnavailable
from holdfast.sessions.forks import Forks
from holdfast.sessions.handles import digest_of
from holdfast.sessions.journal.journal import Journal
from holdfast.sessions.journal.logs import LogFolder
from holdfast.sessions.journal.records import (
    Begun,
    Configured,
    Emitted,
    Ended,
    EventReceived,
    Inserted,
    SessionSnapshot,
    Span,
    Typed,
)
from holdfast.sessions.journal.replay import request_form, request_from
from holdfast.sessions.journal.segment import Fresh, Kind
from holdfast.sessions.journal.session_log import SessionLog
from holdfast.sessions.journal.state import Sessions
from holdfast.sessions.journal.store import JournalStore, StoredSession
from holdfast.sessions.registry import Reopened, SessionRegistry
from holdfast.sessions.session import Session
from holdfast.sessions.token_ids import packed
from holdfast.sessions.tools.formats import Forms
from holdfast.sessions.tools.forms import CallForm
from holdfast.sessions.turn.events import EndReason, ReplyCallDone, ReplyStatus, ReplyTextDelta
from holdfast.sessions.turn.request import RequestBounds, TurnRequest

from ..scripted_link import ScriptedLink
from ..session_stage import END, ask, one_shot, prompts, read, reciting, run, say, toks
from . import journal_stage
from .journal_stage import MODEL, SMALL, birth, folder, record_of, registry_in, store_in


class Failing:
    """Makes the writes of a store fail until it is ``healed``."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.healed, whole = False, JournalStore.write

        def write(store: JournalStore, changes: object) -> None:
            if not self.healed:
                raise StorageUnavailable("no space left")
            whole(store, changes)

        patch.setattr(JournalStore, "write", write)


async def shortened(registry: SessionRegistry, session: Session) -> StoredSession:
    """What the store has of a session, once all that is durable was looked at."""
    ticket, number = session.log.sync(), session.log.number
    assert ticket is not None
    await ticket
    while True:
        long, stored = await registry.journal.read(lambda store: (set(store.long), store.session(number)))
        if number not in long:
            return stored
        await asyncio.sleep(0.001)  # while reads wait the journal shortens nothing


async def resumed(registry: SessionRegistry, handle: str, owner: bytes = b"") -> Reopened:
    found = await registry.resume(handle, owner)
    assert isinstance(found, Reopened)
    return found


async def left(session: Session) -> str:
    """Its handle, once all is durable."""
    ticket = session.log.sync()
    assert ticket is not None
    await ticket
    return session.handles.current


# --- the thread ---------------------------------------------------------------------------------------------


@run
async def test_what_queues_during_a_commit_is_one_group() -> None:
    with folder() as path:
        async with registry_in(path, reciting()) as registry:
            sessions = [registry.create() for _ in range(20)]
            await asyncio.gather(*(left(session) for session in sessions))
            told = await registry.journal.statistics()
            assert told["journal_commits"] < 10 and told["journal_sessions"] == 20
            assert told["journal_queued"] == 0


@run
async def test_what_sessions_put_in_one_pass_of_the_loop_is_one_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups, whole = list[int](), JournalStore.write
    begun = threading.Event()

    def write(store: JournalStore, changes: list[Fresh]) -> None:
        begun.set()
        groups.append(len(changes))
        whole(store, changes)

    with folder() as path:
        async with registry_in(path, reciting()) as registry:
            sessions = [registry.create() for _ in range(5)]
            await asyncio.gather(*(left(session) for session in sessions))
            monkeypatch.setattr(JournalStore, "write", write)
            waiting = []
            for session in sessions:
                session.log.append(Begun(response="resp", request={}))
                waiting.append(session.log.sync())
                assert not begun.wait(0.02), "the thread leaves the others of this pass out"
            await asyncio.gather(*filter(None, waiting))
            assert groups == [5]


@run
async def test_what_nothing_waits_for_is_committed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with folder() as path:
        async with registry_in(path, reciting(), cursor_seconds=60) as registry:
            session = registry.create()
            await left(session)
            written = JournalStore.write
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            loop = asyncio.get_running_loop()

            def write(store: JournalStore, changes: list[Fresh]) -> None:
                written(store, changes)
                loop.call_soon_threadsafe(done.set_result, None)

            monkeypatch.setattr(JournalStore, "write", write)
            session.log.append(Begun(response="resp", request={}))
            await done
            stored = await registry.journal.read(lambda store: store.session(session.log.number))
            assert stored.operations[-1] == Begun(response="resp", request={})


@run
async def test_ids_that_are_said_wait_for_company_and_are_durable_without_a_ticket() -> None:
    with folder() as path:
        async with registry_in(path, reciting(), cursor_seconds=0.5) as registry:
            session = registry.create()
            await left(session)
            before = (await registry.journal.statistics())["journal_commits"]
            for token in range(100):
                session.log.append(Emitted(response="resp", ids=bytes([token, 0, 0, 0])))
                await asyncio.sleep(0)
            number, ids = session.log.number, b""
            while len(ids) < 400:
                stored = await registry.journal.read(lambda store: store.session(number))
                ids = b"".join(op.ids for op in stored.operations if isinstance(op, Emitted))
            assert ids[::4] == bytes(range(100))
            assert (await registry.journal.statistics())["journal_commits"] - before < 20


@run
async def test_what_grows_is_taken_once_before_the_next_operation_and_for_a_ticket() -> None:
    with folder() as path:
        async with registry_in(path, reciting(), cursor_seconds=60) as registry:
            session = registry.create()
            await left(session)
            log, said = session.log, bytearray()

            def growing() -> Emitted:
                taken = bytes(said)
                said.clear()
                return Emitted(response="resp", ids=taken)

            log.grow(growing)
            said += bytes([1, 0, 0, 0, 2, 0, 0, 0])
            log.append(EventReceived(event="heard"))
            log.grow(growing)
            said += bytes([3, 0, 0, 0])
            await log.sync()  # long before the next group of what may wait
            stored = await registry.journal.read(lambda store: store.session(log.number))
            assert stored.operations[-3:] == (
                Emitted(response="resp", ids=bytes([1, 0, 0, 0, 2, 0, 0, 0])),
                EventReceived(event="heard"),
                Emitted(response="resp", ids=bytes([3, 0, 0, 0])),
            )


@run
async def test_what_may_wait_is_one_group_for_all_sessions_within_the_time() -> None:
    with folder() as path:
        async with registry_in(path, reciting(), cursor_seconds=0.2) as registry:
            sessions = [registry.create() for _ in range(20)]
            await asyncio.gather(*(left(session) for session in sessions))
            before = (await registry.journal.statistics())["journal_commits"]
            for session in sessions:
                session.log.grow(lambda: Emitted(response="resp", ids=bytes(4)))
                await asyncio.sleep(0)
            numbers, kept = [session.log.number for session in sessions], 0
            while kept < 20:
                kept = await registry.journal.read(
                    lambda store: sum(
                        Emitted(response="resp", ids=bytes(4)) in store.session(number).operations
                        for number in numbers
                    )
                )
                assert kept in (0, 20)
            assert (await registry.journal.statistics())["journal_commits"] == before + 1


@run
async def test_a_commit_that_fails_is_told_once_tried_again_and_holds_every_acknowledgement() -> None:
    told: list[StorageUnavailable] = []
    with folder() as path, pytest.MonkeyPatch.context() as patch:
        async with registry_in(path, reciting()) as registry:
            session = registry.create()
            await left(session)
            alarm = asyncio.Event()
            registry.journal.watchers.add(lambda fault: (told.append(fault), alarm.set()))
            failing = Failing(patch)
            session.log.append(EventReceived(event="first"))
            ticket = session.log.sync()
            await alarm.wait()
            assert not ticket.done() and session.log.fault is not None
            with pytest.raises(StorageUnavailable):
                registry.create()
            with pytest.raises(StorageUnavailable):
                await registry.journal.read(lambda store: store.statistics())
            session.log.append(EventReceived(event="second"))
            later = session.log.sync()
            failing.healed = True
            await ticket
            await later
            assert session.log.fault is None and len(told) == 1
            number = session.log.number
            stored = await registry.journal.read(lambda store: store.session(number))
            assert stored.operations == (EventReceived(event="first"), EventReceived(event="second"))
            assert (await registry.journal.statistics())["journal_failures"] > 0


@run
async def test_a_deletion_passes_a_group_that_a_full_disk_does_not_take() -> None:
    """What makes room may use more of the disk than the group, which is tried again for ever."""
    with folder() as path, pytest.MonkeyPatch.context() as patch:
        async with registry_in(path, reciting()) as registry:
            session, doomed = registry.create(), registry.create()
            await left(session)
            await left(doomed)
            await registry.close(doomed.id)
            alarm, whole = asyncio.Event(), JournalStore.write
            registry.journal.watchers.add(lambda fault: alarm.set())

            def write(store: JournalStore, group: Sequence[Fresh]) -> None:
                if not any(one.kind == Kind.DROP for one in group):
                    raise StorageFull("no space left")
                whole(store, group)

            patch.setattr(JournalStore, "write", write)
            session.log.append(EventReceived(event="first"))
            ticket = session.log.sync()
            await alarm.wait()
            assert isinstance(session.log.fault, StorageFull), "a prune is served"
            registry.journal.delete(doomed.log.number)
            await registry.journal.sync()
            await ticket
            assert not registry.journal.keeps(doomed.log.number)


@run
async def test_a_mistake_of_ours_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise everything that waits for an acknowledgement would wait for ever, in silence."""
    with folder() as path, pytest.MonkeyPatch.context() as patch:
        async with registry_in(path, reciting()) as registry:
            session = registry.create()
            await left(session)
            alarm = asyncio.Event()
            registry.journal.watchers.add(lambda fault: alarm.set())

            def mistaken(*_: object) -> None:
                raise RecursionError("maximum recursion depth exceeded")

            with pytest.MonkeyPatch.context() as upkeep:
                upkeep.setattr(JournalStore, "keep_shares", mistaken)
                session.log.append(EventReceived(event="first"))
                await left(session)
                await registry.journal.read(lambda store: None)  # served behind the upkeep of that commit
            patch.setattr(Sessions, "apply", mistaken)
            session.log.append(EventReceived(event="second"))
            ticket = session.log.sync()
            await alarm.wait()
            assert not ticket.done() and "RecursionError" in session.log.fault.message
            patch.undo()
            await ticket
            number = session.log.number
            stored = await registry.journal.read(lambda store: store.session(number))
            assert stored.operations == (EventReceived(event="first"), EventReceived(event="second"))
    assert [record.message for record in caplog.records if record.exc_info] == [
        "the journal's upkeep failed",
        "the journal cannot write what it was given",
    ]


@run
async def test_a_journal_that_cannot_write_still_closes() -> None:
    with folder() as path, pytest.MonkeyPatch.context() as patch:
        journal = await Journal.open(path, MODEL, SMALL)
        log = SessionLog(journal, 1)
        Failing(patch)
        log.append(EventReceived(event="e"))
        ticket = log.sync()
        await journal.aclose()
        with pytest.raises(StorageUnavailable):
            ticket.result()


@run
async def test_a_journal_that_closes_on_a_failing_disk_fails_what_waits_for_it() -> None:
    with folder() as path, pytest.MonkeyPatch.context() as patch:
        journal = await Journal.open(path, MODEL, SMALL)
        log = SessionLog.begin(journal, record_of(next(journal.numbers)))
        await log.sync()
        alarm = asyncio.Event()
        journal.watchers.add(lambda fault: alarm.set())
        Failing(patch)
        log.append(EventReceived(event="first"))
        early = log.sync()
        await alarm.wait()
        log.append(EventReceived(event="second"))
        late = log.sync()
        await journal.aclose()
        log.append(EventReceived(event="third"))
        for ticket in (early, late, log.sync()):
            with pytest.raises(StorageUnavailable):
                await asyncio.wait_for(ticket, 5)
        with pytest.raises(StorageUnavailable):
            await asyncio.wait_for(journal.read(lambda store: store.statistics()), 5)


@run
async def test_what_was_durable_before_a_journal_closed_stays_so() -> None:
    with folder() as path:
        journal = await Journal.open(path, MODEL, SMALL)
        log = SessionLog.begin(journal, record_of(next(journal.numbers)))
        log.append(EventReceived(event="first"))
        ticket = log.sync()
        await journal.aclose()
        await ticket
        await log.sync()


@run
async def test_what_cannot_be_encoded_fails_at_the_caller_alone() -> None:
    endless = Preamble(tools=(Tool(name="f", parameters={"maximum": 2**70}),))
    with folder() as path:
        async with registry_in(path, reciting("ok")) as registry:
            session, other = registry.create(), registry.create()
            with pytest.raises(OverflowError):
                session.log.append(Configured(preamble=endless))
            await ask(other, "Hello")
            await asyncio.wait_for(other.log.sync(), 5)
            assert other.log.fault is None


@run
async def test_a_disk_with_too_little_left_refuses_what_is_new_and_takes_what_runs() -> None:
    with folder() as path:
        async with registry_in(path, reciting()) as registry:
            session = registry.create()
            await left(session)
            registry.journal.settings = replace(SMALL, reserve_bytes=1 << 60)
            assert "bytes left" in session.log.fault.message
            with pytest.raises(StorageUnavailable):
                registry.create()
            await left(session)


@run
async def test_a_commit_waits_for_one_slice_of_a_merge_and_no_more() -> None:
    """Whatever comes meanwhile goes first, as often as it comes."""
    order: list[str] = []
    with folder() as path, pytest.MonkeyPatch.context() as patch:
        async with registry_in(path, reciting(), segment_bytes=64 << 10) as registry:
            session = registry.create()
            await left(session)
            loop, store = asyncio.get_running_loop(), await registry.journal.read(lambda store: store)
            written, queued = JournalStore.write, asyncio.Event()

            def write(store: JournalStore, changes: list[object]) -> None:
                order.append("commit")
                written(store, changes)

            async def more() -> None:
                session.log.append(EventReceived(event=f"{len(order)}"))
                session.log.sync()

            def merge(_: JournalStore) -> bool:
                order.append("slice")
                if order.count("slice") > 6:
                    patch.setattr(JournalStore, "wants_merge", False)
                    loop.call_soon_threadsafe(queued.set)
                else:  # while the slice runs a turn puts something
                    asyncio.run_coroutine_threadsafe(more(), loop).result(5)
                return True

            patch.setattr(JournalStore, "write", write)
            patch.setattr(JournalStore, "merge", merge)
            patch.setattr(JournalStore, "wants_merge", True)
            await registry.journal.read(lambda store: None)
            await queued.wait()
            await left(session)
            assert order[:12] == ["slice", "commit"] * 6, "alternating"
            assert len(store.session(session.log.number).operations) == 6


@run
async def test_what_a_cache_gives_back_counts_as_free() -> None:
    with folder() as path:
        given_back = 1 << 60
        async with registry_in(path, reciting(), reclaimable=lambda: given_back) as registry:
            session = registry.create()
            registry.journal.settings = replace(SMALL, reserve_bytes=1 << 60)
            assert session.log.fault is None
            given_back = 0
            assert "bytes left" in session.log.fault.message


# --- sessions that come back --------------------------------------------------------------------------------


@run
async def test_a_session_of_an_earlier_version_opens_for_its_key() -> None:
    """Its owner is the digest which that version made of the key."""
    with folder() as path:
        link = reciting("Hello Ann.")
        async with registry_in(path, link) as registry:
            session = registry.create(owner=b"former")
            await ask(session, "I am Ann.")
            assert await registry.resume(session.handles.current, b"now", None, b"former") is session
            handle = await left(session)
        async with registry_in(path, ScriptedLink(link.model, END)) as registry:
            for owner, former in ((b"now", None), (b"now", b"other")):
                with pytest.raises(HandleUnknown):
                    await registry.resume(handle, owner, None, former)
            found = await registry.resume(handle, b"now", None, b"former")
            (fork,) = await Forks(registry).fork(found.session.id, [b""])
            assert fork.handles.owner == b"former", "a tree has one owner"


@run
async def test_a_session_that_is_not_kept_is_none_of_those_that_an_earlier_version_numbered() -> None:
    with folder() as path:
        with store_in(path) as store:
            store.write([entry for number in range(1, 4) for entry in birth(number)])
        async with registry_in(path, reciting()) as registry:
            unkept = registry.create(kept=False)
            assert await registry.delete(1) is None and registry.is_open(unkept)
            await registry.close(unkept.id)
        with store_in(path) as store:
            assert sorted(one for one in store.sessions.states if store.sessions.states.keeps(one)) == [2, 3]


@run
@pytest.mark.parametrize("deleted", [False, True])
async def test_a_session_opens_while_something_that_is_queued_needs_it(deleted: bool) -> None:
    """Such as a fork of it, for another client. One that was deleted meanwhile does not: what was said in it
    would be lost with it."""
    with folder() as path:
        link = reciting("Hello Ann.")
        async with registry_in(path, link) as registry:
            session = registry.create(owner=b"key")
            await ask(session, "I am Ann.")
            handle = await left(session)
            await registry.close(session.id)
            registry.journal.hold(session.log.number)
            if deleted:
                await registry.delete(session.log.number)
                with pytest.raises(HandleUnknown):
                    await registry.resume(handle, b"key")
            else:
                assert (await resumed(registry, handle, b"key")).session.id == session.id


@run
async def test_a_reply_without_items_that_an_earlier_version_stored_is_not_gone_on_from() -> None:
    """A client that sends its conversation again begins with that session."""
    link, item = reciting("Ok"), Message(id="hi", role="user", text="Hi")
    spans = (Span(node="turn_old", keep=0, prompt=packed(one_shot(("user", "Hi")))),)
    ended = Ended(response="old", status=ReplyStatus.COMPLETED, reason=EndReason.STOP, kept=True, spans=spans)
    with folder() as path:
        async with registry_in(path, link) as registry:
            log = registry.create().log
            for operation in (
                Inserted(item=item),
                Begun(response="old", request={}),
                Emitted(response="old", ids=packed(toks("The capital"))),
                ended,
            ):
                log.append(operation)
        async with registry_in(path, link) as registry:
            given = GivenConversation(b"", Preamble(), [item])
            branched = await Forks(registry).branch_off_stored(log.number, given, b"")
            session, shared = branched
            assert shared == 1 and [one.text for one in session.history.items()] == ["Hi"]
            assert (await ask(session, "And?")).status is ReplyStatus.COMPLETED
            assert prompts(link)[-1] == one_shot(("user", "Hi"), ("user", "And?"))


@run
async def test_a_session_comes_back_with_its_words_its_tokens_and_its_date() -> None:
    with folder() as path:
        link = reciting("Hello Ann.", "You are Ann.")
        async with registry_in(path, link, now=lambda: datetime(2025, 3, 1)) as registry:
            session = registry.create(salt=b"salt", owner=b"key", config=b"c")
            session.history.preamble = Preamble(instructions="Be brief.", tools=(Tool(name="f"),))
            session.log.append(Configured(preamble=session.history.preamble, config=b"new"))
            await ask(session, "I am Ann.")
            items, head = session.history.items(), session.history.head
            handle = await left(session)
        again = ScriptedLink(link.model, END)
        async with registry_in(path, again) as registry:
            found = await resumed(registry, handle, b"key")
            session = found.session
            assert session.id == found.record.id and found.record.config == b"c"
            assert found.replayed.config == b"new" and session.history.items() == items
            assert session.history.head.id == head.id
            assert session.history.head.tokens().tolist() == head.tokens().tolist()
            done = await ask(session, "Who am I?")
            assert done.items[0].text == "You are Ann."
            prompt = prompts(again)[-1]
            assert prompt[: head.length - 1] == head.tokens().tolist()[:-1], (
                "what it saw, not a new rendering"
            )
            opened = next(entry for entry in again.log if entry[0] == "begin")
            assert opened[1] == b"salt"


@run
async def test_a_reply_that_was_interrupted_goes_on_where_it_was() -> None:
    with folder() as path:
        whole = toks("One two three four five six.")
        link = reciting(whole)
        async with registry_in(path, link) as registry:
            session = registry.create()
            say(session, "Count.")
            response = session.respond(TurnRequest.checked(seed=5, max_output_tokens=50), "resp_1", b"note")
            told = []
            while len([event for event in told if isinstance(event, ReplyTextDelta)]) < 3:
                told.append(await anext(response))
            handle = await left(session)
            session.log.close()  # the server dies here
        spoken = len(toks("".join(event.text for event in told if isinstance(event, ReplyTextDelta))))
        link = ScriptedLink(lambda tokens: [*whole, END][continued(tokens, whole)], END)
        async with registry_in(path, link) as registry:
            found = await resumed(registry, handle)
            past = found.replayed.last
            assert past.ids.tolist() == whole[: len(past.ids)] and len(past.ids) >= spoken >= 3
            assert past.note == b"note" and past.ended is None
            assert past.request.sampling.seed == 5 and past.request.max_output_tokens == 50
            events = [event async for event in found.session.go_on(past)]
            texts = [event.text for event in events if isinstance(event, ReplyTextDelta)]
            assert "".join(texts) == "One two three four five six."
            before = [event for event in told if isinstance(event, ReplyTextDelta)]
            assert (
                before == [event for event in events if isinstance(event, ReplyTextDelta)][: len(before)]
            ), "the same events, item ids and all"
            assert events[-1].status is ReplyStatus.COMPLETED
            handle = await left(found.session)
        async with registry_in(path, ScriptedLink(link.model, END)) as registry:
            found = await resumed(registry, handle)
            retold = found.session.retold(found.replayed.last)
            assert [event for event in retold if isinstance(event, ReplyTextDelta)] == [
                event for event in events if isinstance(event, ReplyTextDelta)
            ]
            assert retold[-1] == events[-1]


@run
async def test_the_journal_keeps_which_stop_string_ended_a_reply() -> None:
    with folder() as path:
        async with registry_in(path, reciting(toks("One two three."))) as registry:
            session = registry.create()
            say(session, "Count.")
            _, done = await read(session, TurnRequest.checked(stop=["zzz", "thr"]))
            assert done.stopped_by == "thr"
            handle = await left(session)
        async with registry_in(path, reciting()) as registry:
            found = await resumed(registry, handle)
            assert found.session.retold(found.replayed.last)[-1] == done


@pytest.mark.parametrize("deltas", [1, 20, 45])
@run
async def test_a_reply_that_goes_round_ends_at_the_same_token_after_an_interruption(deltas: int) -> None:
    cycle = toks(" one two three")
    whole, most = cycle * 40, 48
    request = TurnRequest.checked(seed=5, bounds=RequestBounds(cycle_tokens=most))
    with folder() as path:
        async with registry_in(path, reciting(whole)) as registry:
            session = registry.create()
            say(session, "Count.")
            response = session.respond(request, "resp_1", b"note")
            while deltas:
                deltas -= isinstance(await anext(response), ReplyTextDelta)
            handle = await left(session)
            session.log.close()  # the server dies here
        link = ScriptedLink(lambda tokens: [*whole, END][continued(tokens, whole)], END)
        async with registry_in(path, link) as registry:
            found = await resumed(registry, handle)
            past = found.replayed.last
            assert past.ended is None and past.request.cycle_tokens == most
            events = [event async for event in found.session.go_on(past)]
            assert (events[-1].status, events[-1].reason) == (ReplyStatus.INCOMPLETE, EndReason.REPETITION)
            assert events[-1].usage.output_tokens == len(cycle) + most
            handle = await left(found.session)
        async with registry_in(path, ScriptedLink(link.model, END)) as registry:
            found = await resumed(registry, handle)
            assert found.session.retold(found.replayed.last)[-1] == events[-1]


def continued(tokens: list[int], whole: list[int]) -> int:
    """How much of ``whole`` the tokens end with."""
    return next(n for n in range(len(whole), -1, -1) if tokens[len(tokens) - n :] == whole[:n])


@run
async def test_a_refused_turn_is_not_gone_on_with() -> None:
    with folder() as path:
        link = reciting("Fine.")
        link.max_context = 30
        async with registry_in(path, link) as registry:
            session = registry.create()
            say(session, "word " * 100)
            with pytest.raises(Exception, match="context"):
                await read(session)
            handle = await left(session)
        async with registry_in(path, reciting("Fine.")) as registry:
            found = await resumed(registry, handle)
            assert found.replayed.last.ended.error.code == "prompt_too_long"
            assert found.session.retold(found.replayed.last) == []
            assert not found.session.history.busy
            assert (await ask(found.session, "And now?")).status is ReplyStatus.COMPLETED


@run
async def test_handles_unknown_foreign_expired_and_used_up_get_one_answer() -> None:
    with folder() as path:
        async with registry_in(path, reciting()) as registry:
            session = registry.create(owner=b"mine")
            first = await left(session)
            answers = []

            async def refused(handle: str, owner: bytes = b"mine") -> None:
                with pytest.raises(HandleUnknown) as caught:
                    await registry.resume(handle, owner)
                answers.append((caught.value.message, caught.value.param, caught.value.code))

            await refused("hold_nothing")
            await refused(first, b"another's")
            await refused("")
            assert await registry.resume(first, b"mine") is session
            second = session.handles.current
            assert await registry.resume(first, b"mine") is session, "valid until the new one has been used"
            third = session.handles.current
            assert await registry.resume(second, b"mine") is session, "whichever of the answers arrived"
            await refused(first)
            await refused(third)
            for _ in range(5):
                assert await registry.resume(second, b"mine") is session
            third = session.handles.current
            assert await registry.resume(third, b"mine") is session
            number, last = session.log.number, await left(session)
            await registry.close(session.id)
            await refused(last, b"another's")
            await refused(second)
            await registry.journal.read(lambda store: store.make_room(frozenset()))
            await refused(last)
            assert len(set(answers)) == 1 and number not in registry.journal.live
            assert len(last) >= 22 and last != first


@run
async def test_handles_outlive_the_server() -> None:
    with folder() as path:
        async with registry_in(path, reciting()) as registry:
            first = await left(registry.create())
        async with registry_in(path, reciting()) as registry:
            second = await left((await resumed(registry, first)).session)
        async with registry_in(path, reciting()) as registry:
            third = await left((await resumed(registry, first)).session)
        async with registry_in(path, reciting()) as registry:
            await resumed(registry, third)
            for used_up in (first, second):
                with pytest.raises(HandleUnknown):
                    await registry.resume(used_up, b"")


@run
async def test_a_clock_that_is_wrong_when_a_server_starts_loses_no_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with folder() as path:
        async with registry_in(path, reciting()) as registry:
            handle = await left(registry.create())
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + 2 * SMALL.max_age_seconds)
        async with registry_in(path, reciting()) as registry:
            await resumed(registry, handle)


@run
async def test_a_damaged_session_ends_alone_and_is_counted() -> None:
    with folder() as path, pytest.MonkeyPatch.context() as patch:
        async with registry_in(path, reciting("Fine.")) as registry:
            one, other = registry.create(), registry.create()
            say(one, "hello")
            handles = [await left(one), await left(other)]
            struck = one.log.number
        async with registry_in(path, reciting("Fine.")) as registry:
            whole = LogFolder.read

            def damaged(logs: LogFolder, location: int) -> object:
                found = whole(logs, location)
                if (found.session, found.kind) == (struck, Kind.OPERATION):
                    raise RecordDamaged("a checksum is wrong")
                return found

            patch.setattr(LogFolder, "read", damaged)
            for _ in range(2):
                with pytest.raises(RecordDamaged):
                    await registry.resume(handles[0], b"")
            session = (await resumed(registry, handles[1])).session
            assert (await ask(session, "hello")).status is ReplyStatus.COMPLETED
            assert (await registry.journal.statistics())["journal_damaged"] == 1


@run
async def test_a_resume_during_a_close_waits_for_its_end() -> None:
    with folder() as path:
        async with registry_in(path, reciting()) as registry:
            session = registry.create()
            handle, settled = await left(session), asyncio.Event()
            closing = asyncio.create_task(registry.close(session.id, leave_readers=settled.wait))
            await asyncio.sleep(0)
            coming = asyncio.create_task(registry.resume(handle, b""))
            await asyncio.sleep(0.01)
            assert not coming.done()
            settled.set()
            await closing
            assert isinstance(await coming, Reopened)


def test_requests_are_kept_by_name() -> None:
    request = TurnRequest.checked(
        temperature=0.5,
        top_k=3,
        seed=9,
        stop=["x"],
        max_output_tokens=7,
        format=Grammar(GrammarKind.REGEX, "[a-f]+"),
    )
    form = request_form(request)
    assert request_from(form) == request
    assert form["sampling"]["seed"] == 9
    older = {**form, "sampling": {"seed": 9}}
    del older["parse_calls"]
    assert request_from(older).sampling == Sampling(seed=9)
    newer = {**form, "sampling": {**form["sampling"], "of_the_future": 1}}
    assert request_from(newer) == request
    with pytest.raises(RecordDamaged):
        request_from({**form, "sampling": {"seed": "nine"}})


def test_a_digest_takes_any_text() -> None:
    assert digest_of("\ud800") != digest_of("a")


# --- long lives -----------------------------------------------------------------------------------------------


@run
async def test_a_long_life_costs_its_length_and_not_its_events() -> None:
    """Text typed key by key, taken back, edited: what is kept and read is what the session has come to."""
    with folder() as path:
        link = reciting(*["Well."] * 40)
        async with registry_in(path, link, snapshot_operations=20, max_events=30) as registry:
            session = registry.create()
            most = 0
            for turn in range(40):
                for letter in range(25):
                    session.log.append(EventReceived(event=f"{turn}-{letter}"))
                    session.log.append(Typed(start=letter, text="x", role="user", item=f"item_{turn}"))
                session.log.append(Typed(start=0))
                item = say(session, f"Words {turn}")
                session.history.delete(item.id)
                await ask(session, f"Turn {turn}")
                most = max(most, len((await shortened(registry, session)).operations))
            stored = await shortened(registry, session)
            assert stored.written > 40 * 50 and most < 400
            assert isinstance(stored.operations[0], SessionSnapshot) and len(stored.operations[0].heard) == 30
            items, tokens = session.history.items(), session.history.head.tokens().tolist()
            handle = await left(session)
        link = reciting("Still here.")
        async with registry_in(path, link) as registry:
            found = await resumed(registry, handle)
            assert found.session.history.items() == items
            assert found.session.history.head.tokens().tolist() == tokens
            assert found.replayed.responses == 40 and found.replayed.heard[-1] == "39-24"
            done = await ask(found.session, "And now?")
            assert done.items[0].text == "Still here."
            assert prompts(link)[-1][: len(tokens) - 1] == tokens[:-1]
            handle = await left(found.session)
        async with registry_in(path, reciting()) as registry:
            assert (await resumed(registry, handle)).session.history.items()[-1].text == "Still here."


@run
async def test_what_runs_is_never_part_of_a_snapshot() -> None:
    with folder() as path:
        whole = toks("One two three four five six.")
        async with registry_in(path, reciting("First.", whole), snapshot_operations=2) as registry:
            session = registry.create()
            await ask(session, "Begin.")
            say(session, "Count.")
            response = session.respond(TurnRequest.checked(), "resp_1")
            for _ in range(4):
                await anext(response)
                session.log.append(EventReceived(event="e"))
                stored = await shortened(registry, session)
                assert isinstance(stored.operations[0], SessionSnapshot)
                assert sum(isinstance(one, Begun) for one in stored.operations) == 1
            handle = await left(session)
            session.log.close()
        link = ScriptedLink(lambda tokens: [*whole, END][continued(tokens, whole)], END)
        async with registry_in(path, link) as registry:
            found = await resumed(registry, handle)
            assert found.replayed.last.ended is None
            events = [event async for event in found.session.go_on(found.replayed.last)]
            assert "".join(one.text for one in events if isinstance(one, ReplyTextDelta)) == (
                "One two three four five six."
            )


@run
async def test_a_session_that_cannot_be_made_shorter_goes_on_as_it_was(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with folder() as path, pytest.MonkeyPatch.context() as patch:
        async with registry_in(path, reciting("Well.", "Still."), snapshot_operations=2) as registry:
            patch.setattr(JournalStore, "condense", lambda *_: 1 / 0)
            session = registry.create()
            await ask(session, "Begin.")
            await ask(session, "And?")
            handle = await left(session)
        assert "cannot be condensed" in caplog.text
        async with registry_in(path, reciting()) as registry:
            assert [item.text for item in (await resumed(registry, handle)).session.history.items()] == [
                "Begin.",
                "Well.",
                "And?",
                "Still.",
            ]


@run
async def test_log_probabilities_are_told_again_as_they_were() -> None:
    with folder() as path:
        link = reciting("One two three.")
        link.logprobs = True
        async with registry_in(path, link, snapshot_operations=2) as registry:
            session = registry.create()
            say(session, "Count.")
            request = TurnRequest.checked(top_logprobs=2)
            events, _ = await read(session, request)
            await shortened(registry, session)
            handle = await left(session)
        scored = [event for event in events if isinstance(event, ReplyTextDelta)]
        assert all(event.scores for event in scored)
        async with registry_in(path, reciting()) as registry:
            found = await resumed(registry, handle)
            retold = found.session.retold(found.replayed.last)
            assert [event for event in retold if isinstance(event, ReplyTextDelta)] == scored


@run
async def test_arguments_are_told_again_in_the_types_of_the_turns_tools() -> None:
    """A parameter with tags has no type of its own: the schema says that 7 is a number."""
    tool = Tool(name="add", parameters={"type": "object", "properties": {"a": {"type": "integer"}}})
    said = "<tool_call>\n<function=add>\n<parameter=a>\n7\n</parameter>\n</function>\n</tool_call>"
    language = replace(journal_stage.LANGUAGE, forms=Forms(CallForm.QWEN3_CODER))
    with folder() as path, patch.object(journal_stage, "LANGUAGE", language):
        async with registry_in(path, reciting(said)) as registry:
            session = registry.create()
            say(session, "Add.")
            events, _ = await read(session, TurnRequest.checked(tools=[tool]))
            handle = await left(session)
        (done,) = [event for event in events if isinstance(event, ReplyCallDone)]
        assert done.arguments == '{"a": 7}'
        async with registry_in(path, reciting()) as registry:
            found = await resumed(registry, handle)
            assert done in found.session.retold(found.replayed.last)


@run
async def test_instructions_come_back_without_any_item() -> None:
    with folder() as path:
        async with registry_in(path, reciting()) as registry:
            session = registry.create()
            session.history.preamble = Preamble(instructions="Be brief.")
            session.log.append(Configured(preamble=session.history.preamble))
            handle = await left(session)
        async with registry_in(path, reciting()) as registry:
            session = (await resumed(registry, handle)).session
            assert session.history.preamble == Preamble(instructions="Be brief.")


# --- any history --------------------------------------------------------------------------------------------

ACTIONS = st.lists(
    st.sampled_from(["say", "ask", "cancel", "fail", "insert", "delete", "preamble", "aside", "restart"]),
    min_size=1,
    max_size=14,
)


@settings(max_examples=settings().max_examples // 10)
@given(actions=ACTIONS, seed=st.integers(0, 2**16))
@example(actions=["preamble", "restart"], seed=0)
def test_a_session_that_is_opened_again_goes_on_as_one_that_was_not(actions: list[str], seed: int) -> None:
    """Two sessions live the same life; one of them is put away at every chance."""

    async def live(registry: SessionRegistry, link: ScriptedLink, restarts: bool) -> tuple[object, ...]:
        session = registry.create()
        for at, action in enumerate(actions):
            if action == "restart" and restarts:
                handle = await left(session)
                await registry.close(session.id)
                session = (await resumed(registry, handle)).session
            elif action != "restart":
                await act(session, link, action, at)
        say(session, "The last.")
        await read(session)
        texts = [getattr(item, "text", "") for item in session.history.items()]
        return texts, prompts_of(link)[-1], session.history.head.tokens().tolist()

    async def act(session: Session, link: ScriptedLink, action: str, at: int) -> None:
        items = session.history.items()
        item = Message(id=f"item_{at}", role="user", text=f"Words {at} {seed}")
        match action:
            case "say":
                session.history.insert(item)
            case "insert":
                session.history.insert(item, items[seed % len(items)].id if items else "root")
            case "delete" if items:
                session.history.delete(items[seed % len(items)].id)
            case "preamble":
                session.history.preamble = Preamble(instructions=f"Be {at}.")
                session.log.append(Configured(preamble=session.history.preamble))
            case "ask" | "fail" | "aside" | "cancel":
                session.history.insert(item)
                link.failing = action == "fail"
                request = TurnRequest.checked(instructions="Now." if action == "aside" else None)
                response = session.respond(request, f"resp_{at}")
                async for event in response:
                    if action == "cancel" and isinstance(event, ReplyTextDelta):
                        await response.cancel()
                link.failing = False

    async def both() -> None:
        with folder() as path:
            lives = []
            often = {"snapshot_operations": 1 + seed % 5}
            for name in ("one", "other"):
                link = parrot()
                (path / name).mkdir()
                async with registry_in(path / name, link, lambda: datetime(2025, 3, 1), **often) as registry:
                    lives.append(await live(registry, link, restarts=name == "other"))
            assert lives[0] == lives[1]

    asyncio.run(asyncio.wait_for(both(), 30))
    gc.collect()


class Parrot(ScriptedLink):
    """Says after each prompt a number of words that depends on the prompt alone."""

    failing = False
    asked: list[list[int]]


def parrot() -> Parrot:
    said = toks("Well then, let us say so and be done.")
    link: Parrot

    def model(tokens: list[int]) -> int:
        if link.failing:
            raise RuntimeError("not a number")
        at = continued(tokens, said)
        if at == 0:
            link.asked.append(list(tokens))
        return END if at == len(said) else said[at]

    link = Parrot(model, END)
    link.asked = []
    return link


def prompts_of(link: ScriptedLink) -> list[list[int]]:
    assert isinstance(link, Parrot)
    return link.asked


@run
async def test_an_output_that_is_streamed_in_outlives_a_snapshot() -> None:
    with folder() as path:
        async with registry_in(path, reciting(*["Well."] * 3), snapshot_operations=20) as registry:
            session = registry.create()
            await ask(session, "Look!")
            for at in range(60):
                session.log.append(Typed(start=at, text="x", item="item_9", call="call_1"))
            await ask(session, "Still looking?")
            await ask(session, "And now?")
            assert isinstance((await shortened(registry, session)).operations[0], SessionSnapshot)
            handle = await left(session)
        async with registry_in(path, reciting()) as registry:
            typed = (await resumed(registry, handle)).replayed.typed
            assert typed == InputTextBuffer("x" * 60, None, "item_9", "call_1")


@run
@pytest.mark.parametrize("closing", [False, True], ids=["open", "being closed"])
async def test_a_deletion_that_is_durable_outlives_a_server_that_dies_then(closing: bool) -> None:
    with folder() as path, folder() as copies:
        async with registry_in(path, reciting("Hello.")) as registry:
            session = registry.create()
            await ask(session, "Hi.")
            handle = await left(session)
            gate, closed = asyncio.Event(), None
            if closing:
                closed = asyncio.create_task(
                    registry.close(session.id, leave_readers=gate.wait)  # type: ignore[arg-type]
                )
                await asyncio.sleep(0)
            await registry.delete(session.log.number)
            await registry.journal.sync()
            shutil.copytree(path, copies / "store")
            gate.set()
            if closed is not None:
                await closed
        async with registry_in(copies / "store", reciting()) as registry:
            with pytest.raises(HandleUnknown):
                await resumed(registry, handle)


@run
async def test_whatever_making_room_raises_the_thread_goes_on() -> None:
    small = replace(SMALL, max_bytes=1 << 18, segment_bytes=1 << 14, cursor_seconds=0.001)
    with folder() as path, pytest.MonkeyPatch.context() as patch:
        journal = await Journal.open(path, MODEL, small)
        make_room, calls = JournalStore.make_room, iter(range(1000))

        def fails(store: JournalStore, keep: frozenset[int]) -> bool:
            if next(calls) == 1:
                raise OSError(24, "Too many open files")
            return make_room(store, keep)

        patch.setattr(JournalStore, "make_room", fails)
        for number in range(1, 200):
            log = SessionLog.begin(journal, record_of(number))
            log.append(EventReceived(event="x" * 3000))
            ticket = log.sync()
            log.close()
            await ticket
        assert next(calls) > 2
        await journal.aclose()


@run
async def test_clients_that_come_back_together_share_commits() -> None:
    with folder() as path:
        async with registry_in(path, reciting()) as registry:
            sessions = [registry.create() for _ in range(30)]
            for session in sessions:
                await ask(session, "Hello?")
            handles = [await left(session) for session in sessions]
        async with registry_in(path, reciting()) as registry:
            assert registry.journal is not None
            before = await registry.journal.statistics()
            found = await asyncio.gather(*(resumed(registry, handle) for handle in handles))
            await asyncio.gather(*(left(one.session) for one in found))
            after = await registry.journal.statistics()
            assert after["journal_commits"] - before["journal_commits"] < 15


@run
async def test_one_session_is_opened_once_for_clients_that_come_back_together() -> None:
    with folder() as path:
        async with registry_in(path, reciting()) as registry:
            session = registry.create()
            await ask(session, "Hello?")
            handle = await left(session)
        async with registry_in(path, reciting()) as registry:
            found = await asyncio.gather(*(registry.resume(handle, b"") for _ in range(10)))
            opened = [one for one in found if isinstance(one, Reopened)]
            assert len(opened) == 1 and all(one is opened[0].session for one in found if one is not opened[0])
