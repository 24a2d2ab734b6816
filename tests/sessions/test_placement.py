"""A session's lease, stage and settle: on which sequence, with which tokens, after which engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from holdfast.runtime.errors import EngineDied
from holdfast.runtime.verbs import Grant, KVTier, TierRun
from holdfast.sessions.engine_copy import MAX_KILLS
from holdfast.sessions.errors import ConversationBusy, EngineUnavailable, SequencePoisoned
from holdfast.sessions.session import Session
from holdfast.sessions.settings import SessionSettings
from holdfast.sessions.turn.events import ReplyStatus
from holdfast.sessions.turn.request import TurnRequest

from .scripted_link import ScriptedLink
from .session_stage import ask, reciting, run, say, session_on


def verbs(link, *names: str) -> list[tuple]:
    return [entry for entry in link.log if entry[0] in names]


@run
async def test_they_speak_of_the_sequence_that_is_there() -> None:
    link = reciting("Hello!")
    session = session_on(link)
    await ask(session, "Hi")
    held = len(link.held[1].tokens)
    receipt = await session.placement.lease(1, 60.0, 5.0)
    assert (receipt.grant, receipt.tokens) == (Grant.GRANTED, held)
    assert (await session.placement.settle(disk=True)).disk == link.held[1].computed
    await session.placement.stage()
    assert verbs(link, "lease", "settle", "stage") == [
        ("lease", 1, 1, 60.0, 5.0),
        ("settle", 1, True),
        ("stage", 1),
    ]


@run
async def test_a_new_session_has_a_lease_before_its_first_word() -> None:
    link = reciting("Hello!")
    session = session_on(link)
    assert (await session.placement.lease(None, 60.0, None)).tokens == 0
    await ask(session, "Hi")
    assert len(verbs(link, "open")) == 1 and len(link.held) == 1


@run
async def test_after_another_engine_the_branch_is_opened_with_its_tokens_and_its_lease() -> None:
    link = reciting("Hello!", "Again!")
    session = session_on(link)
    await ask(session, "Hi")
    held = link.held[1].tokens
    await session.placement.lease(2, 60.0, 30.0)
    link.die(outside=True)
    link.restart()
    link.log.clear()
    await session.placement.stage()
    (opened,) = verbs(link, "open")
    assert opened[2] == held
    ((_, seq, priority, ttl, returns_in),) = verbs(link, "lease")
    assert (seq, priority) == (verbs(link, "stage")[0][1], 2)
    assert 0 < returns_in < ttl <= 60.0


@run
async def test_a_lease_given_back_is_not_wished_for_again() -> None:
    link = reciting("Hello!", "Again!")
    session = session_on(link)
    await ask(session, "Hi")
    await session.placement.lease(2, 60.0, 30.0)
    await session.placement.lease(None, 0.0, None)
    link.die(outside=True)
    link.restart()
    link.log.clear()
    await ask(session, "And?")
    assert not verbs(link, "lease")


@run
async def test_an_engine_that_died_over_the_branch_is_not_tried_again_for_its_kv() -> None:
    link = reciting("Hello, you there!", "Again!")
    session = session_on(link)
    say(session, "Hi")
    link.flowing = False
    reading = asyncio.ensure_future(anext(aiter(session.respond(TurnRequest.checked()))))
    await reading
    link.die()
    link.restart()
    session.history.preamble = session.history.preamble
    with pytest.raises((EngineDied, ConversationBusy)):
        await session.placement.stage()


@run
async def test_kv_is_not_moved_under_a_reply_but_may_be_leased() -> None:
    link = reciting("Hello, you there!")
    session = session_on(link)
    say(session, "Hi")
    reply = aiter(session.respond(TurnRequest.checked()))
    await anext(reply)
    for verb in (session.placement.stage(), session.placement.settle(disk=True)):
        with pytest.raises(ConversationBusy):
            await verb
    assert (await session.placement.lease(1, 5.0, None)).grant is Grant.GRANTED
    async for _ in reply:
        pass
    await session.placement.stage()


@run
async def test_numbers_of_any_size_cross_the_link() -> None:
    link = reciting("Hello!")
    session = session_on(link)
    await ask(session, "Hi")
    await session.placement.lease(10**40, 1e300, float("nan"))
    assert verbs(link, "lease") == [("lease", 1, 10**9, 1e9, 0.0)]


@run
async def test_the_map_of_blocks_is_of_the_sequence_that_is_there_also_while_a_reply_writes() -> None:
    link = reciting("Hello, you there!")
    session = session_on(link)
    assert (await session.placement.locate()).runs == []
    say(session, "Hi")
    reply = aiter(session.respond(TurnRequest.checked()))
    await anext(reply)
    await anext(reply)
    assert (await session.placement.locate()).tokens == len(link.held[1].tokens)
    async for _ in reply:
        pass
    assert verbs(link, "locate") == [("locate", None, [], b""), ("locate", 1, [], b"")]


@run
async def test_the_map_of_a_session_that_the_engine_does_not_hold_opens_nothing() -> None:
    link = reciting("Hello!", "Again!")
    session = session_on(link)
    await ask(session, "Hi")
    held = link.held[1].tokens
    link.die(outside=True)
    link.restart()
    link.log.clear()
    located = await session.placement.locate()
    assert located.runs == [TierRun(KVTier.NONE, False, len(held))]
    assert link.log == [("locate", None, held, b"")] and not link.held


@run
async def test_a_sequence_that_is_closed_while_it_is_asked_for_is_asked_for_by_its_tokens() -> None:
    link = reciting("Hello!")
    session = session_on(link)
    await ask(session, "Hi")
    link.held.clear()
    assert (await session.placement.locate()).runs[0].tier is KVTier.NONE
    assert [entry[1] for entry in verbs(link, "locate")] == [1, None]


@run
async def test_the_map_of_blocks_waits_for_the_engine_that_is_started_again() -> None:
    link = reciting("Hello!")
    session = session_on(link)
    await ask(session, "Hi")
    link.die(outside=True)
    asked = asyncio.create_task(session.placement.locate())
    await link.waiting.wait()
    assert not asked.done()
    link.restart()
    assert (await asked).tokens > 0


PLACING = {
    "lease": lambda session: session.placement.lease(1, 60.0, None),
    "stage": lambda session: session.placement.stage(),
    "settle": lambda session: session.placement.settle(disk=True),
}


async def answered_by_the_next_engine(
    link: ScriptedLink, session: Session, asked: asyncio.Task[object], verb: str
) -> None:
    link.log.clear()
    link.restart()
    await asked
    assert len(verbs(link, verb)) == 1 and len(verbs(link, "open")) == 1
    assert (await ask(session, "And?")).status is ReplyStatus.COMPLETED


@pytest.mark.parametrize("during", [False, True])
@pytest.mark.parametrize("verb", PLACING)
@run
async def test_each_waits_for_the_engine_that_is_started_again(verb: str, during: bool) -> None:
    link = reciting("Hello!", "Again!")
    session = session_on(link)
    await ask(session, "Hi")
    if during:
        link.cut_off.add(verb)
    else:
        link.die(outside=True)
    asked = asyncio.create_task(PLACING[verb](session))
    if during:
        await link.stuck.wait()
        link.die(outside=True)
        link.cut_off.clear()
        link.freed.set()
    await link.waiting.wait()
    assert not asked.done()
    await answered_by_the_next_engine(link, session, asked, verb)


@pytest.mark.parametrize("verb", PLACING)
@run
async def test_each_is_refused_where_no_engine_comes_in_time(verb: str) -> None:
    link = reciting("Hello!")
    session = session_on(link, settings=SessionSettings(recovery_seconds=0.01))
    await ask(session, "Hi")
    link.die(outside=True)
    with pytest.raises(EngineUnavailable):
        await PLACING[verb](session)
    assert not session.history.busy


@pytest.mark.parametrize("verb", ["stage", "settle"])
@run
async def test_a_turn_that_begins_while_a_move_waits_goes_first(verb: str) -> None:
    link = reciting("Hello!", "Again!")
    session = session_on(link)
    await ask(session, "Hi")
    link.die(outside=True)
    asked = asyncio.create_task(PLACING[verb](session))
    await link.waiting.wait()
    say(session, "And?")
    response = session.respond(TurnRequest.checked())
    link.restart()
    with pytest.raises(ConversationBusy):
        await asked
    assert [event async for event in response][-1].status is ReplyStatus.COMPLETED


def dies_in_step(link, *, outside: bool) -> None:
    """The engine dies with every sequence that it held in its last step, idle ones too."""
    held = frozenset(link.held)
    link.die(outside)
    link.deaths[-1] = replace(link.deaths[-1], step=held)


@pytest.mark.parametrize("verb", PLACING)
@run
async def test_an_engine_killed_from_outside_is_held_against_no_idle_session(verb: str) -> None:
    link = reciting("Hello!", "Again!")
    session = session_on(link)
    await ask(session, "Hi")
    dies_in_step(link, outside=True)
    asked = asyncio.create_task(PLACING[verb](session))
    await link.waiting.wait()
    await answered_by_the_next_engine(link, session, asked, verb)


@pytest.mark.parametrize("verb", PLACING)
@run
async def test_an_engine_that_crashed_in_a_step_of_the_session_is_not_tried_again(verb: str) -> None:
    link = reciting("Hello!", "Again!")
    session = session_on(link)
    await ask(session, "Hi")
    dies_in_step(link, outside=False)
    link.restart()
    link.log.clear()
    with pytest.raises(EngineDied, match="died over this session"):
        await PLACING[verb](session)
    assert not link.log
    assert (await ask(session, "And?")).status is ReplyStatus.COMPLETED
    await PLACING[verb](session)


@pytest.mark.parametrize("verb", PLACING)
@run
async def test_a_death_that_is_no_longer_remembered_counts_no_more(verb: str) -> None:
    link = reciting("Hello!")
    session = session_on(link)
    await ask(session, "Hi")
    dies_in_step(link, outside=False)
    link.restart()
    link.deaths.clear()
    link.log.clear()
    await PLACING[verb](session)
    assert len(verbs(link, verb)) == 1


@run
async def test_engines_killed_over_one_verb_end_it_after_so_many() -> None:
    link = reciting("Hello!", "Again!")
    session = session_on(link)
    await ask(session, "Hi")
    link.cut_off.add("settle")
    asked = asyncio.create_task(session.placement.settle(disk=False))
    for death in range(MAX_KILLS):
        await link.stuck.wait()
        assert not asked.done(), death
        link.stuck.clear()
        link.waiting.clear()
        dies_in_step(link, outside=True)
        link.freed.set()
        await link.waiting.wait()
        link.freed.clear()
        link.restart()
    with pytest.raises(SequencePoisoned):
        await asked
    link.cut_off.clear()
    await session.placement.settle(disk=False)
