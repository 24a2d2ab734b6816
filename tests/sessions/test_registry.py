"""The registry: a cap, ids that lead to sessions, and sums."""

from __future__ import annotations

import asyncio
import gc

import pytest

from holdfast.sessions.errors import HandleUnknown, SessionClosed, SessionLimit, SessionUnknown
from holdfast.sessions.registry import SessionRegistry
from holdfast.sessions.settings import SessionSettings
from holdfast.sessions.turn.request import TurnRequest

from .session_stage import LANGUAGE, ask, reciting, run


def test_sessions_are_found_counted_and_closed() -> None:
    async def play() -> None:
        link = reciting("Hello")
        registry = SessionRegistry(link, LANGUAGE, SessionSettings(max_sessions=2))
        one, other = registry.create(), registry.create(salt=b"tenant")
        assert one.id != other.id
        assert registry.get(one.id) is one
        with pytest.raises(SessionLimit):
            registry.create()
        await ask(other, "Hi")
        assert [entry[1] for entry in link.log if entry[0] == "begin"] == [b"tenant"]
        assert registry.statistics()["sessions"] == 2
        sums = await registry.sums()
        assert sums["session_items"] == 2 and sums["session_tokens"] == other.history.head.length
        await registry.close(other.id)
        with pytest.raises(SessionUnknown):
            registry.get(other.id)
        with pytest.raises(SessionClosed):
            other.respond(TurnRequest.checked())
        registry.create()
        assert registry.statistics()["sessions_opened"] == 3
        await registry.aclose()
        assert registry.statistics()["sessions"] == 0
        assert link.held == {}

    asyncio.run(play())


@run
async def test_leases_and_pauses_are_measured_by_the_registrys_clock() -> None:
    now = 0.0
    link = reciting("Hello", "Again")
    registry = SessionRegistry(link, LANGUAGE, clock=lambda: now)
    session = registry.create()
    await ask(session, "Hi")
    await session.placement.lease(2, 60.0, 30.0)
    now += 61.0
    link.die()
    link.restart()
    link.log.clear()
    await ask(session, "There?")
    assert "lease" not in [entry[0] for entry in link.log]
    assert registry.statistics()["waits_real_seconds"] == 61.0


@run
async def test_owners_that_found_nothing_are_not_remembered() -> None:
    registry = SessionRegistry(reciting("Hello"), LANGUAGE)

    def locks() -> int:
        kinds = (asyncio.Lock, asyncio.Semaphore)
        return sum(isinstance(found, kinds) for found in gc.get_objects())

    before = locks()
    for number in range(20):
        with pytest.raises(HandleUnknown):
            await registry.resume("hold_none", b"owner %d" % number, former_owner=b"owner")
        await registry.wait_for_reopening(number)
    assert locks() == before
    await registry.aclose()
