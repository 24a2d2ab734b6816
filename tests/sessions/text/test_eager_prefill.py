"""Text on its way is handed to the engine before its turn: what is settled, and at the commit the rest."""

from __future__ import annotations

import asyncio

from holdfast.runtime.verbs import VerbReply
from holdfast.sessions.conversation.items import FunctionCall, FunctionCallOutput, Message, Preamble
from holdfast.sessions.session import Session
from holdfast.sessions.settings import SessionSettings
from holdfast.sessions.text.eager_prefill import PrefilledInput

from ..scripted_link import ScriptedLink
from ..session_stage import ask, one_shot, prompts, read, reciting, run, session_on

LONG_ENOUGH = 0.2
"""Seconds, within which all would be handed over."""
TEXT = "What shall we do today, and what shall we leave for tomorrow?"


async def handed(link: ScriptedLink, verbs: int) -> list[tuple]:
    """The verbs so far without their tokens, once there are so many."""
    while True:
        if len(link.log) >= verbs:
            return [(entry[0], *entry[3:]) for entry in link.log]
        await asyncio.sleep(0)


@run
async def test_what_is_left_at_the_commit_is_computed_before_the_turn_is_asked_for() -> None:
    link = reciting("Nothing.")
    session = session_on(link)
    growing = Message(id="item_1", role="user", text=TEXT[:40])
    session.expect(growing)
    assert await handed(link, 1) == [("open",)]
    whole_text = Message(id="item_1", role="user", text=TEXT)
    arrival = await session.prefilled_input(whole_text)
    session.expect(None)
    session.history.insert(whole_text)
    assert await handed(link, 2) == [("open",), ("extend", "due")]
    whole = one_shot(("user", TEXT))
    assert [held.tokens for held in link.held.values()] == [whole]
    assert arrival.prefilled + arrival.left == len(whole) and arrival.prefilled > arrival.left > 0
    await read(session)
    assert prompts(link) == [whole]
    assert [entry[0] for entry in link.log] == ["open", "extend", "generate"]


@run
async def test_nothing_is_begun_at_the_commit_that_was_not_begun_before() -> None:
    link = reciting("Nothing.")
    session = session_on(link)
    arrival = await session.prefilled_input(Message(id="item_1", role="user", text=TEXT))
    await asyncio.sleep(0)
    assert (arrival.prefilled, link.log) == (0, [])


@run
async def test_text_after_a_pause_is_handed_over_at_once_and_what_follows_is_collected() -> None:
    link = reciting("Nothing.")
    session = session_on(link, settings=SessionSettings(debounce_seconds=1.5 * LONG_ENOUGH))
    session.expect(Message(id="item_1", role="user", text=TEXT[:20]))
    async with asyncio.timeout(LONG_ENOUGH):
        assert await handed(link, 1) == [("open",)]
    for end in (30, 40, 50):
        session.expect(Message(id="item_1", role="user", text=TEXT[:end]))
        await asyncio.sleep(LONG_ENOUGH / 4)
    assert len(link.log) == 1
    assert await handed(link, 2) == [("open",), ("extend",)]
    await asyncio.sleep(LONG_ENOUGH)
    assert len(link.log) == 2


@run
async def test_text_goes_on_while_the_engine_answers_nothing_and_waits_for_no_step_that_is_over() -> None:
    link, apart, now = reciting("Nothing."), LONG_ENOUGH / 4, asyncio.get_running_loop().time
    session = session_on(link, settings=SessionSettings(debounce_seconds=apart))
    session.expect(Message(id="item_1", role="user", text=TEXT[:20]))
    assert await handed(link, 1) == [("open",)]
    link.cut_off.add("extend")
    async with asyncio.timeout(4 * LONG_ENOUGH):
        for count, end in ((2, 30), (3, 40)):
            before = now()
            session.expect(Message(id="item_1", role="user", text=TEXT[:end]))
            await handed(link, count)
    assert len(link.unanswered) == 2, "the second did not wait for the first"
    session.expect(Message(id="item_1", role="user", text=TEXT[:50]))
    await asyncio.sleep(1.5 * apart)
    assert len(link.log) == 3 or now() - before >= 3 * apart, "the third is kept back while two wait"
    for reply in link.unanswered:
        reply.set_result(VerbReply(0))
    async with asyncio.timeout(LONG_ENOUGH):
        await handed(link, 4)
    session.expect(None)


async def called(link: ScriptedLink) -> tuple[Session, PrefilledInput]:
    """A session with a call that has just got its answer, of which much was handed over while it came."""
    session = session_on(link)
    session.history.insert(FunctionCall(id="item_0", call_id="call_1", name="look", arguments="{}"))
    session.expect(FunctionCallOutput(id="item_1", call_id="call_1", output=TEXT[:40]))
    assert await handed(link, 1) == [("open",)]
    whole = FunctionCallOutput(id="item_1", call_id="call_1", output=TEXT)
    arrival = await session.prefilled_input(whole)
    session.expect(None)
    session.history.insert(whole)
    return session, arrival


@run
async def test_what_a_tool_answers_is_handed_over_as_it_comes_and_the_rest_by_its_turn() -> None:
    link = reciting("Nothing.")
    session, arrival = await called(link)
    assert arrival.prefilled > arrival.left > 0
    await read(session)
    assert [entry[0] for entry in link.log] == ["open", "extend", "generate"]
    assert [entry[3:] for entry in link.log][1] == (), "the turn's own"
    (prompt,) = prompts(link)
    otherwise = reciting("Nothing.")
    other = session_on(otherwise)
    for item in session.history.items()[:2]:
        other.history.insert(item)
    await read(other)
    assert prompt == prompts(otherwise)[0]


@run
async def test_where_no_turn_follows_the_rest_of_what_a_tool_answered_is_computed_too() -> None:
    link = reciting("Nothing.")
    await called(link)
    assert await handed(link, 2) == [("open",), ("extend", "due")]


@run
async def test_text_that_no_turn_could_be_made_of_takes_nothing_from_the_engine() -> None:
    """A lease and what is held stay; the turn says that it is too long, or the text is taken back."""
    link = reciting("Hello.", "Nothing.", max_context=80)
    session = session_on(link)
    await ask(session, "Hi")
    await session.placement.lease(None, 60.0, None)
    link.log.clear()
    session.expect(Message(id="item_1", role="user", text=TEXT * 20))
    await asyncio.sleep(LONG_ENOUGH)
    too_long = Message(id="item_1", role="user", text=TEXT * 20)
    assert (await session.prefilled_input(too_long)).left > link.max_context
    session.expect(None)
    await asyncio.sleep(LONG_ENOUGH)
    assert link.log == []


@run
async def test_text_that_is_committed_while_the_first_reply_runs_is_left_for_the_next_turn() -> None:
    link = reciting("Nothing.")
    link.flowing = False
    session = session_on(link, Preamble(instructions="Be brief."))  # the reply has no items before it
    reading = asyncio.create_task(read(session))
    verbs = len(await handed(link, 1))
    arrival = await session.prefilled_input(Message(id="item_1", role="user", text=TEXT))
    assert arrival.prefilled == 0 and 0 <= arrival.left <= len(one_shot(("user", TEXT)))
    await asyncio.sleep(0)
    assert len(link.log) == verbs, "nothing is sent to the engine"
    link.flowing = True
    await link.stuck.wait()
    link.flow()
    await reading
