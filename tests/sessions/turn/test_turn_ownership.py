"""A turn that has begun always has an owner that ends it: whatever raises, wherever a task is cancelled, the
history is as it was and the next turn works."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from holdfast.sessions import session as session_module
from holdfast.sessions.conversation.items import Preamble, Tool
from holdfast.sessions.engine_copy import EngineCopy
from holdfast.sessions.errors import GrammarInvalid
from holdfast.sessions.forks import Forks
from holdfast.sessions.journal.records import AnyOperation, Begun, Ended
from holdfast.sessions.placement import ReturnHints, Waits
from holdfast.sessions.registry import Reopened
from holdfast.sessions.session import Session
from holdfast.sessions.settings import TenantLimits
from holdfast.sessions.tenants import Tenant
from holdfast.sessions.text.language import Language
from holdfast.sessions.text.renderer import Renderer
from holdfast.sessions.tools.forms import CallForm
from holdfast.sessions.turn import response as response_module
from holdfast.sessions.turn.events import ReplyDone, ReplyStatus
from holdfast.sessions.turn.request import TurnRequest
from holdfast.sessions.turn.turn_grammar import TurnGrammar

from ..journal.journal_stage import folder, registry_in
from ..session_stage import NAME, ask, reciting, run, say, session_on
from ..text.chat_languages import ours

LOOK = Tool(name="look", parameters={"type": "object", "properties": {}})


class Planted(Exception):
    """A defect that was not foreseen."""


def once(fault: BaseException, real: Callable[..., Any]) -> Callable[..., Any]:
    """Raises the first time; then it does what the real one does."""
    planted = [fault]

    def called(*args: Any, **kwargs: Any) -> Any:
        if planted:
            raise planted.pop()
        return real(*args, **kwargs)

    return called


def plant(monkeypatch: pytest.MonkeyPatch, holder: object, name: str) -> None:
    monkeypatch.setattr(holder, name, once(Planted(name), getattr(holder, name)))


def refuse(monkeypatch: pytest.MonkeyPatch, session: Session, kind: type) -> None:
    """Let the journal refuse the next operation of this kind."""
    append, planted = session.log.append, [Planted(kind.__name__)]

    def appended(operation: AnyOperation) -> None:
        if isinstance(operation, kind) and planted:
            raise planted.pop()
        append(operation)

    monkeypatch.setattr(session.log, "append", appended)
    monkeypatch.setattr(session.history, "record", appended)


BEFORE_A_TURN = {
    "script": lambda session: (session.history, "script"),
    "hold": lambda session: (session.history, "_hold"),
    "prepare": lambda session: (session.history, "prepare"),
    "grammar": lambda session: (TurnGrammar, "grammar"),
    "bad words": lambda session: (TurnGrammar, "spell"),
    "child": lambda session: (EngineCopy, "child"),
    "form": lambda session: (session_module, "request_form"),
    "response": lambda session: (session_module, "TurnResponse"),
    "waits": lambda session: (Waits, "returns"),
    "return_hints": lambda session: (ReturnHints, "cancel"),
    "tenant": lambda session: (Tenant, "began"),
    "journal": lambda session: (session.log, "append"),
}


@pytest.mark.parametrize("strict", [False, True])
@run
async def test_a_refused_tool_choice_leaves_the_session_free(strict: bool) -> None:
    """Calls in the pythonic form can be neither forced nor strict."""
    language = Language.of(ours(NAME), calls=CallForm.PYTHONIC)
    session = Session("s", reciting("Hello"), language)
    tool = Tool(name="look", parameters=LOOK.parameters, strict=strict)
    session.history.preamble = Preamble(tools=(tool,))
    say(session, "Hi")
    choice = "auto" if strict else "required"
    for _ in range(2):
        with pytest.raises(GrammarInvalid, match="can be neither forced nor strict"):
            session.respond(TurnRequest.checked(tool_choice=choice, offered=(tool,)))
    assert not session.history.busy
    done = [event async for event in session.respond(TurnRequest.checked(tool_choice="none"))][-1]
    assert isinstance(done, ReplyDone) and done.status is ReplyStatus.COMPLETED


@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize("where", BEFORE_A_TURN)
@run
async def test_what_raises_before_a_turn_is_owned_leaves_nothing_begun(where: str, aside: bool) -> None:
    link = reciting("Hello", "Fine", "Well")
    tenant = Tenant(TenantLimits())
    session = session_on(link, tenant=tenant)
    await ask(session, "Hi")
    say(session, "And?")
    before, head = session.history.items(), session.history.head
    with pytest.MonkeyPatch.context() as monkeypatch:
        plant(monkeypatch, *BEFORE_A_TURN[where](session))
        instructions = "Be brief" if aside else None
        with suppress(Planted):  # not all of them are called by a turn that is not aside
            response = session.respond(TurnRequest.checked(instructions=instructions))
            await response.aclose()
    assert not session.history.busy
    assert (session.history.items(), session.history.head) == (before, head)
    assert session.statistics()["responses"] == tenant.turns == 0
    assert (await ask(session, "Now?")).status is ReplyStatus.COMPLETED


WHILE_IT_IS_READ = {
    "draft": lambda session: (Renderer, "draft"),
    "at rest": lambda session: (EngineCopy, "wait_stopped"),
    "reader": lambda session: (response_module, "ReplyReader"),
    "run": lambda session: (response_module, "ReplyRun"),
    "begin": lambda session: (EngineCopy, "begin"),
    "feed": lambda session: (response_module.ReplyRun, "_read"),
    "finish": lambda session: (EngineCopy, "finish"),
    "reply": lambda session: (response_module, "TurnReply"),
    "kept": lambda session: (response_module, "KeptTurn"),
    "usage": lambda session: (response_module.TurnResponse, "_usage"),
    "record": lambda session: (session.history, "record"),
    "end": lambda session: (response_module, "ended"),
}


@pytest.mark.parametrize("where", WHILE_IT_IS_READ)
@run
async def test_what_raises_while_a_reply_is_read_ends_that_turn_alone(where: str) -> None:
    link = reciting("Hello", "one two", "Fine", "Well")
    tenant = Tenant(TenantLimits())
    session = session_on(link, tenant=tenant)
    await ask(session, "Hi")
    say(session, "And?")
    before, head, last = session.history.items(), session.history.head, None
    with pytest.MonkeyPatch.context() as monkeypatch:
        plant(monkeypatch, *WHILE_IT_IS_READ[where](session))
        with suppress(Planted):
            async for event in session.respond(TurnRequest.checked()):
                last = event
    assert not isinstance(last, ReplyDone) or last.status is ReplyStatus.FAILED
    assert not session.history.busy
    assert (session.history.items(), session.history.head) == (before, head)
    assert session.statistics()["responses"] == tenant.turns == 0
    assert (await ask(session, "Now?")).status is ReplyStatus.COMPLETED
    assert len(link.held) == 1


@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize("steps", range(24))
@run
async def test_a_reader_that_is_cancelled_anywhere_leaves_no_turn(steps: int, aside: bool) -> None:
    link = reciting("Hello", *["one two three four five six"] * 4, ahead=2)
    tenant, sequence = Tenant(TenantLimits()), EngineCopy(link, b"")
    session = session_on(link, tenant=tenant, sequence=sequence)
    await ask(session, "Hi")
    say(session, "And?")

    async def talk() -> None:
        request = TurnRequest.checked(instructions="Be brief" if aside else None)
        async for _ in session.respond(request):
            pass

    others = asyncio.all_tasks()
    talking = asyncio.create_task(talk())
    for _ in range(steps):
        await asyncio.sleep(0)
    talking.cancel()
    await asyncio.sleep(0)
    talking.cancel()  # of one that is impatient
    with suppress(asyncio.CancelledError):
        await talking
    for task in asyncio.all_tasks() - others:
        await asyncio.wait([task])
    assert not session.history.busy
    assert session.statistics()["responses"] == tenant.turns == 0
    assert (await ask(session, "Now?")).status is ReplyStatus.COMPLETED
    await sequence.wait_stopped()
    assert len(link.held) == 1


@run
async def test_a_response_that_was_never_read_is_ended_with_its_session() -> None:
    link = reciting("Hello")
    session = session_on(link)
    say(session, "Hi")
    response = session.respond(TurnRequest.checked())
    await session.aclose()
    assert response.over and not session.history.busy


@run
async def test_a_reply_that_cannot_go_on_is_refused_and_its_session_lives() -> None:
    """A session from the journal with an interrupted reply; its grammar cannot be written any more."""
    with folder() as path:
        async with registry_in(path, reciting("Hello")) as registry:
            session = registry.create(owner=b"me")
            say(session, "Hi")
            response = session.respond(TurnRequest.checked())
            await anext(response)
            handle = session.handles.current
            await registry.close(session.id, interrupt=True)
        async with registry_in(path, reciting("Fine")) as registry:
            found = await registry.resume(handle, b"me")
            assert isinstance(found, Reopened) and found.replayed.last is not None
            session = found.session
            with pytest.MonkeyPatch.context() as monkeypatch:
                plant(monkeypatch, TurnGrammar, "prepare")
                with pytest.raises(Planted):
                    session.go_on(found.replayed.last)
            assert not session.history.busy
            assert (await ask(session, "Now?")).status is ReplyStatus.COMPLETED
            handle = session.handles.current
            await registry.close(session.id)
            again = await registry.resume(handle, b"me")  # and so the journal tells it
            assert isinstance(again, Reopened) and not again.session.history.busy


@run
async def test_a_turn_that_the_journal_refused_is_not_in_the_journal() -> None:
    with folder() as path:
        async with registry_in(path, reciting("Hello", "Fine")) as registry:
            session = registry.create(owner=b"me")
            say(session, "Hi")
            for kind in (Begun, Ended):
                with pytest.MonkeyPatch.context() as monkeypatch:
                    refuse(monkeypatch, session, kind)
                    with pytest.raises(Planted):
                        async for _ in session.respond(TurnRequest.checked()):
                            pass
                assert not session.history.busy
            handle = session.handles.current
            assert [item.text for item in session.history.items()] == ["Hi"]
            await registry.close(session.id)
            found = await registry.resume(handle, b"me")
            assert isinstance(found, Reopened)
            assert [item.text for item in found.session.history.items()] == ["Hi"]
            assert (await ask(found.session, "Now?")).status is ReplyStatus.COMPLETED


@run
async def test_a_fork_that_fails_leaves_no_session_without_a_handle() -> None:
    with folder() as path:
        async with registry_in(path, reciting("Hello")) as registry:
            session = registry.create(owner=b"me")
            await ask(session, "Hi")
            for planted in ("lend", "heir", "branch"):
                with pytest.MonkeyPatch.context() as monkeypatch:
                    plant(monkeypatch, session, planted)
                    with pytest.raises(Planted):
                        await Forks(registry).fork(session.id, [b"", b""])
            await session.log.sync()
            assert registry.statistics()["sessions"] == 1
            assert registry.tenants[b""].sessions == 1
            assert len((await Forks(registry).page(session.id)).members) == 1
            assert len(await Forks(registry).fork(session.id, [b"", b""])) == 2
