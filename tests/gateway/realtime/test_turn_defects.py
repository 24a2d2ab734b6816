"""A defect anywhere between an event and the task that serves it ends that event alone: the session, its socket
and its tenant's places are as before."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.gateway.embedded import in_memory
from holdfast.gateway.live.session import LiveSession
from holdfast.gateway.realtime.conversation import Conversation
from holdfast.gateway.realtime.event_log import EventLog
from holdfast.gateway.realtime.session import RealtimeFace, RealtimeSession
from holdfast.gateway.service import Service
from holdfast.gateway.settings import GatewaySettings
from holdfast.sdk import Client, SDKError, ServerError
from holdfast.sessions.journal.journal import Journal
from holdfast.sessions.registry import SessionRegistry
from holdfast.sessions.session import Session
from holdfast.sessions.settings import JournalSettings
from holdfast.sessions.text.eager_prefill import EagerPrefill
from holdfast.sessions.text.language import Language
from holdfast.tests.gateway.scripted_service import END, WORDS, Scripted
from holdfast.tests.sessions.text.chat_languages import ours

pytestmark = pytest.mark.anyio


class Planted(Exception):
    """An unforeseen defect."""


def plant(monkeypatch: pytest.MonkeyPatch, holder: type, name: str) -> None:
    """Raises the next time; then it does what the real one does."""
    real: Callable[..., Any] = getattr(holder, name)
    planted = [Planted(name)]

    def called(*args: Any, **kwargs: Any) -> Any:
        if planted:
            raise planted.pop()
        return real(*args, **kwargs)

    monkeypatch.setattr(holder, name, called)


@asynccontextmanager
async def scripted(store: Path) -> AsyncIterator[tuple[Client, SessionRegistry]]:
    link = Scripted(lambda tokens: END if len(tokens) % 7 == 0 else WORDS[len(tokens) % len(WORDS)], END)
    service = Service(GatewaySettings(), "scripted", link)
    journal = await Journal.open(store, b"model", JournalSettings(reserve_bytes=0))
    book = SessionRegistry(link, Language.of(ours("chatml")), None, journal)
    service.open(book, journal)
    try:
        yield in_memory(service), book
    finally:
        await service.close()
        await journal.aclose()


@pytest.mark.parametrize(
    ("holder", "name"),
    [
        (Session, "respond"),
        (Conversation, "note"),
        (Conversation, "brief"),
        (Conversation, "_create_response"),
        (EventLog, "begin_reply"),
        (LiveSession, "run"),
        (RealtimeSession, "_note"),
        (Conversation, "receive"),
        (Conversation, "_insert"),
    ],
)
async def test_a_turn_that_breaks_while_it_begins_is_told_and_the_next_one_works(
    holder: type, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scripted(tmp_path) as (client, _), client.session() as chat:
        plant(monkeypatch, holder, name)
        with pytest.raises(SDKError):
            await chat.say("Hi").text()
        assert await chat.say("Again").text()
        (here,) = await chat.tree()
        assert here.items in (2, 3)  # a defect behind the items' acknowledgement leaves them


async def test_input_that_breaks_what_follows_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scripted(tmp_path) as (client, _), client.session() as chat:
        plant(monkeypatch, EagerPrefill, "expect")
        text = chat.input()
        await text.append("Hel")
        with pytest.raises(ServerError):
            await text.commit()
        assert await chat.say("Again").text()


def break_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The same for a method that brings a session to life."""
    real, planted = getattr(RealtimeFace, name), [Planted(name)]

    def broken(*args: Any) -> LiveSession:
        if planted:
            raise planted.pop()
        made: LiveSession = real(*args)
        return made

    monkeypatch.setattr(RealtimeFace, name, broken)


async def test_forks_that_cannot_be_brought_to_life_take_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scripted(tmp_path) as (client, book), client.session() as chat:
        await chat.say("Hi").text()
        break_once(monkeypatch, "begin")
        with pytest.raises(SDKError):
            await chat.fork(2)
        assert book.statistics()["sessions"] == 1
        assert len(await chat.tree()) == 1
        one, two = await chat.fork(2)
        assert await one.say("Hello").text() and await two.say("Hello").text()


async def test_a_session_that_could_not_be_opened_again_can_be_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scripted(tmp_path) as (client, _), client.session() as chat:
        await chat.say("Hi").text()
        handle = chat.handle
    assert handle is not None
    async with scripted(tmp_path) as (client, book):
        break_once(monkeypatch, "reopen")
        with pytest.raises(SDKError):
            async with client.resume(handle):
                pass
        async with client.resume(handle) as again:
            assert await again.say("Still there?").text()
        assert book.statistics()["sessions_reopened"] == 2
