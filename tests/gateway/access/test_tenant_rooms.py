"""A tenant at its limit of open sessions: sessions on no connection make room for clients that come."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from holdfast.gateway.embedded import in_memory
from holdfast.gateway.service import Service
from holdfast.gateway.settings import GatewaySettings
from holdfast.sdk import Chat, Client, ServerError, SessionLost
from holdfast.sdk import chat as chats
from holdfast.sdk.connection.connection import Connection
from holdfast.sdk.frames.client import ClientEvent, SessionFork, SessionTree
from holdfast.sdk.frames.server import SessionTreeListed
from holdfast.sessions.journal.journal import Journal
from holdfast.sessions.registry import SessionRegistry
from holdfast.sessions.settings import JournalSettings, JournalShare, SessionSettings, TenantLimits
from holdfast.sessions.text.language import Language
from holdfast.tests.gateway.scripted_service import END, Scripted, spoken
from holdfast.tests.sessions.text.chat_languages import ours

pytestmark = pytest.mark.anyio
TWO = SessionSettings(tenants={b"": TenantLimits(sessions=2)})
SMALL = JournalSettings(reserve_bytes=0)


@asynccontextmanager
async def scripted(
    store: Path | None, settings: SessionSettings = TWO, bytes_: int = 1 << 30
) -> AsyncIterator[Client]:
    """A client of a service with one tenant."""
    link = Scripted(spoken, END, ahead=1)
    service = Service(GatewaySettings(), "scripted", link)
    numbers = replace(SMALL, tenants={b"": JournalShare(bytes=bytes_)})
    journal = None if store is None else await Journal.open(store, b"model", numbers)
    service.open(SessionRegistry(link, Language.of(ours("chatml")), settings, journal), journal)
    try:
        yield in_memory(service)
    finally:
        await service.close()
        if journal is not None:
            await journal.aclose()


async def forked(chat: Chat) -> Chat:
    """A fork, once the server has noticed which clients have left."""
    while True:
        with suppress(ServerError):
            return (await chat.fork())[0]


async def refused(chat: Chat, line: str) -> ServerError:
    """The refusal of a turn, once the journal's thread has written what makes the share full."""
    while True:
        try:
            await chat.say(line).text()
        except ServerError as refusal:
            return refusal
        await anyio.sleep(0.05)


async def test_sessions_that_were_left_make_room_and_come_back(tmp_path: Path) -> None:
    async with scripted(tmp_path) as client:
        async with client.session() as left:
            first = await left.say("begin").text()
        async with client.session() as stays, client.session() as other:
            assert await other.say("begin").text() == first
            with pytest.raises(ServerError) as refused:
                async with client.session():
                    pass
            assert refused.value.code == "session_limit_reached"
            with pytest.raises(SessionLost):
                async with client.resume(left.handle):
                    pass
            with pytest.raises(ServerError) as refused:
                await stays.fork()
            assert refused.value.code == "session_limit_reached"
            await other.aclose()
            fork = await forked(stays)
            assert await fork.say("begin").text() == first
            await fork.aclose()
            assert await forked(stays), "instead of the fork before"
        async with client.resume(left.handle) as again, client.resume(other.handle) as same:
            assert (again.session.id, same.session.id) == (left.session.id, other.session.id)
            assert await again.say("go on").text() == await same.say("go on").text()


async def test_without_a_journal_a_client_that_may_come_back_keeps_its_place() -> None:
    async with scripted(None) as client, client.session() as left, client.session():
        await left.say("begin").text()
        await left.aclose()
        for _ in range(20):  # whenever the server has noticed
            with pytest.raises(ServerError):
                async with client.session():
                    pass
        async with client.resume(left.handle) as again:
            assert again.session.id == left.session.id


async def test_a_tenant_with_a_full_share_may_still_prune(tmp_path: Path) -> None:
    async with scripted(tmp_path, SessionSettings(), bytes_=12_000) as client, client.session() as chat:
        await chat.say("begin").text()
        (fork,) = await chat.fork()
        await fork.say("long " * 800, max_output_tokens=4).text()
        for line in ("more", "and more"):
            assert (await refused(chat, line)).code == "storage_unavailable"
        await chat.prune(fork.session.id)
        assert await chat.say("go on").text()


async def test_a_tree_comes_in_pages_and_the_client_asks_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chats, "MAX_LISTED", 4)
    asked, send = list[SessionTree](), Connection.send

    async def noted(connection: Connection, event: ClientEvent) -> str:
        asked.extend([event] if isinstance(event, SessionTree) else [])
        return await send(connection, event)

    monkeypatch.setattr(Connection, "send", noted)
    async with scripted(None, SessionSettings()) as client, client.session() as chat:
        forks = await chat.fork(9)
        found = await chat.tree()
        assert [one.id for one in found] == [chat.session.id, *(fork.session.id for fork in forks)]
        assert [event.after for event in asked] == [None, found[3].id, found[7].id]


async def test_a_tree_is_listed_a_hundred_at_a_time_by_default() -> None:
    async with scripted(None, SessionSettings()) as client, client.session() as chat:
        for _ in range(2):
            await chat.send(SessionFork(children=64))
        for limit, told in ((None, 100), (7, 7), (1000, 129)):
            await chat.send(SessionTree() if limit is None else SessionTree(limit=limit))
            async for event in chat.events():
                if isinstance(event, SessionTreeListed):
                    assert (len(event.sessions), event.has_more) == (told, told < 129)
                    break
