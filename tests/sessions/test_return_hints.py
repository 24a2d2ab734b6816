"""Return hints: the engine is told when a reply waits for tools and no lease says more; and pauses as they
were."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.sessions.conversation.items import FunctionCallOutput, Preamble, Tool
from holdfast.sessions.placement import PATIENCE, Waits
from holdfast.sessions.session import Session

from .scripted_link import ScriptedLink
from .session_stage import ask, read, reciting, run, session_on

CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
LONG_ENOUGH = 6 * PATIENCE


def calling(*replies: str, waits: Waits | None = None) -> tuple[Session, ScriptedLink]:
    link = reciting(*replies)
    return session_on(link, Preamble(tools=(Tool(name="f"),)), waits=waits), link


def said(link: ScriptedLink) -> list[tuple]:
    return [entry for entry in link.log if entry[0] == "lease"]


async def answered(session: Session) -> None:
    (call,) = session.history.head.reply.items
    session.history.insert(FunctionCallOutput(id="o", call_id=call.call_id, output="21"))
    await read(session)


@run
async def test_a_reply_that_ends_in_calls_may_go_on_any_moment() -> None:
    session, link = calling(CALL, "Done.")
    await ask(session, "Hi")
    assert not said(link), "most tools have answered by the time that this could be said"
    await asyncio.sleep(LONG_ENOUGH)
    assert said(link) == [("lease", 1, None, 0.0, 0.0)]
    await answered(session)
    await asyncio.sleep(LONG_ENOUGH)
    assert len(said(link)) == 1, "the reply after it waits for a person"


@run
async def test_nothing_is_said_where_the_tool_has_answered() -> None:
    session, link = calling(CALL, "Done.")
    await ask(session, "Hi")
    await answered(session)
    await asyncio.sleep(LONG_ENOUGH)
    assert not said(link)


@pytest.mark.parametrize(("ttl", "returns_in"), [(0.0, 30.0), (60.0, None), (60.0, 5.0)])
@pytest.mark.parametrize("late", [False, True])
@run
async def test_a_lease_replaces_the_hint(ttl: float, returns_in: float | None, late: bool) -> None:
    session, link = calling(CALL, "Done.", CALL)
    if not late:
        await session.placement.lease(None, ttl, returns_in)
    await ask(session, "Hi")
    if late:
        await session.placement.lease(None, ttl, returns_in)
    await asyncio.sleep(LONG_ENOUGH)
    if ttl or late:
        assert [entry[3:] for entry in said(link)] == [(ttl, returns_in)]
    else:
        assert said(link)[-1][3:] == (0.0, 0.0), "what was said of its last return is over"


@run
async def test_no_session_is_expected_before_now() -> None:
    waits = Waits()
    session, _ = calling(CALL, "Done.", waits=waits)
    await ask(session, "Hi")
    for returns_in in (float("nan"), float("-inf"), -1e9):
        await session.placement.lease(None, 0.0, returns_in)
    await answered(session)
    assert waits.statistics()["waits_expected_seconds"] == 0.0


@run
async def test_what_was_said_of_its_return_is_said_to_another_engine_until_it_is_back() -> None:
    session, link = calling(CALL, "Done.", "Done.")
    await ask(session, "Hi")
    await session.placement.lease(None, 0.0, 30.0)
    link.die(outside=True)
    link.restart()
    link.log.clear()
    await session.placement.stage()
    ((_, _, priority, ttl, returns_in),) = said(link)
    assert (priority, ttl) == (0, 0.0) and 29 < returns_in <= 30.0
    await answered(session)
    link.die(outside=True)
    link.restart()
    link.log.clear()
    await session.placement.stage()
    assert not said(link)


class Slow:
    """Makes the link's leases wait for their answers, as an engine in a long step does."""

    def __init__(self, link: ScriptedLink) -> None:
        self.asked, self.answers = asyncio.Event(), asyncio.Event()
        self._lease = link.lease
        link.lease = self  # type: ignore[method-assign, assignment]

    async def __call__(self, *wish: object) -> object:
        receipt = await self._lease(*wish)
        self.asked.set()
        await self.answers.wait()
        return receipt


@pytest.mark.parametrize(("ttl", "returns_in"), [(60.0, None), (60.0, 5.0), (None, None)])
@run
async def test_a_lease_that_is_on_its_way_is_not_taken_back_by_a_guess(
    ttl: float | None, returns_in: float | None
) -> None:
    session, link = calling(CALL)
    slow = Slow(link)
    await ask(session, "Hi")
    asked = asyncio.create_task(session.placement.lease(None, ttl, returns_in))
    await asyncio.sleep(LONG_ENOUGH)
    slow.answers.set()
    await asked
    assert [entry[3:] for entry in said(link)] == [(ttl, returns_in)]


@run
async def test_a_return_that_was_answered_when_it_was_over_says_nothing_of_the_next() -> None:
    session, link = calling(CALL, CALL)
    slow = Slow(link)
    await ask(session, "Hi")
    asked = asyncio.create_task(session.placement.lease(None, 0.0, 30.0))
    await slow.asked.wait()
    await answered(session)
    slow.answers.set()
    await asked
    await asyncio.sleep(LONG_ENOUGH)
    assert [entry[3:] for entry in said(link)] == [(0.0, 30.0), (0.0, 0.0)]


@run
async def test_a_session_that_is_closed_says_nothing() -> None:
    session, link = calling(CALL)
    await ask(session, "Hi")
    await session.aclose()
    await asyncio.sleep(LONG_ENOUGH)
    assert not said(link)


def test_a_pause_is_kept_with_what_was_expected_of_it() -> None:
    now = [0.0]
    waits = Waits(clock=lambda: now[0])
    for session, expected, real in (("a", 1.0, 3.0), ("b", 5.0, 2.0), ("c", 4.0, 4.5)):
        waits.leaves(session, expected)
        assert waits.statistics()["waiting"] == 1
        now[0] += real
        waits.returns(session)
    assert waits.statistics() == {
        "waits_ended": 3,
        "waits_early": 1,
        "waits_expected_seconds": 10.0,
        "waits_real_seconds": 9.5,
        "waiting": 0,
    }


def test_the_last_expectation_counts_and_a_closed_session_does_not_return() -> None:
    now = [0.0]
    waits = Waits(clock=lambda: now[0])
    waits.leaves("a", 60.0)
    now[0] = 5.0
    waits.leaves("a", 1.0)
    now[0] = 7.0
    waits.returns("a")
    waits.returns("a")
    waits.returns("unknown")
    found = waits.statistics()
    assert (found["waits_ended"], found["waits_expected_seconds"], found["waits_real_seconds"]) == (
        1,
        1.0,
        2.0,
    )
    waits.leaves("b", 1.0)
    waits.ends("b")
    waits.returns("b")
    assert waits.statistics()["waits_ended"] == 1 and waits.statistics()["waiting"] == 0
