"""The book: a cap, ids that lead to sessions, and sums."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.sessions.errors import SessionClosed, SessionLimit, SessionUnknown
from holdfast.sessions.registry import SessionRegistry
from holdfast.sessions.settings import SessionSettings
from holdfast.sessions.turn.request import TurnRequest

from .session_stage import LANGUAGE, ask, reciting


def test_sessions_are_found_counted_and_closed() -> None:
    async def play() -> None:
        link = reciting("Hello")
        book = SessionRegistry(link, LANGUAGE, SessionSettings(max_sessions=2))
        one, other = book.create(), book.create(salt=b"tenant")
        assert one.id != other.id
        assert book.get(one.id) is one
        with pytest.raises(SessionLimit):
            book.create()
        await ask(other, "Hi")
        assert [entry[1] for entry in link.log if entry[0] == "begin"] == [b"tenant"]
        assert book.statistics()["sessions"] == 2
        assert book.statistics()["session_items"] == 2
        assert book.statistics()["session_tokens"] == other.history.tree.head.length
        await book.close(other.id)
        with pytest.raises(SessionUnknown):
            book.get(other.id)
        with pytest.raises(SessionClosed):
            other.respond(TurnRequest.checked())
        book.create()
        assert book.statistics()["sessions_opened"] == 3
        await book.aclose()
        assert book.statistics()["sessions"] == 0
        assert link.held == {}

    asyncio.run(play())
