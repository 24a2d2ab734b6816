"""A session that is pruned while it forks or prunes: what it began is done, nothing is left behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from holdfast.gateway.embedded import in_memory
from holdfast.gateway.service import Service
from holdfast.gateway.settings import GatewaySettings
from holdfast.sdk import Client, ConnectionLost, ServerError, SessionLost
from holdfast.sdk.frames.client import SessionFork, SessionPrune
from holdfast.sessions import registry
from holdfast.sessions.journal.journal import Journal
from holdfast.sessions.journal.replay import replay
from holdfast.sessions.registry import SessionRegistry
from holdfast.sessions.settings import JournalSettings
from holdfast.sessions.text.language import Language
from holdfast.tests.gateway.scripted_service import END, WORDS, Scripted, spoken
from holdfast.tests.sessions.text.chat_languages import ours

pytestmark = pytest.mark.anyio
LONG = "something long enough to fill more than one block of the cache, so that forks share it"


class Gate:
    """Holds up one of an engine's verbs until it is opened; ``reached`` once that was asked for."""

    def __init__(self, link: Scripted, verb: str) -> None:
        self.reached, self.opened = anyio.Event(), anyio.Event()
        self._verb: Callable[..., Any] = getattr(link, verb)
        setattr(link, verb, self._held)

    async def _held(self, *args: Any, **fields: Any) -> Any:
        self.reached.set()
        await self.opened.wait()
        return await self._verb(*args, **fields)


async def until(true: Callable[[], bool]) -> None:
    """Wait for it."""
    while True:
        if true():
            return
        await anyio.sleep(0.01)


@asynccontextmanager
async def kept(store: Path) -> AsyncIterator[tuple[Client, Service, Scripted, SessionRegistry]]:
    link = Scripted(lambda tokens: spoken(tokens) if tokens[-1] in WORDS else WORDS[0], END, ahead=1)
    service = Service(GatewaySettings(), "scripted", link)
    journal = await Journal.open(store, b"model", JournalSettings(reserve_bytes=0))
    book = SessionRegistry(link, Language.of(ours("chatml")), journal=journal)
    service.open(book, journal)
    try:
        yield in_memory(service), service, link, book
    finally:
        await service.close()
        await journal.aclose()


async def test_forks_of_a_session_pruned_meanwhile_stay_registered(tmp_path: Path) -> None:
    async with kept(tmp_path) as (client, service, link, book), client.session() as chat:
        await chat.say(LONG).text()
        (fork,) = await chat.fork()
        gate = Gate(link, "fork")
        await fork.send(SessionFork(children=3))
        await gate.reached.wait()
        await chat.prune(fork.session.id or "")
        gate.opened.set()
        await until(lambda: len(service.sessions()) == 4)
        assert len(await chat.tree()) == 4
        assert book.statistics()["sessions"] == 4, "all open sessions are known to the registry"


async def test_of_two_prunes_of_one_session_the_second_finds_none(tmp_path: Path) -> None:
    async with kept(tmp_path) as (client, service, link, _), client.session() as chat:
        await chat.say(LONG).text()
        one, two = await chat.fork(2)
        await two.say(LONG).text()
        gate = Gate(link, "close")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(chat.prune, two.session.id or "")
            await gate.reached.wait()
            with pytest.raises(ServerError) as refused:
                await one.prune(two.session.id or "")
            gate.opened.set()
        with pytest.raises(ServerError) as unknown:
            await one.prune("sess_none")
        assert refused.value.code == unknown.value.code
        assert len(service.sessions()) == len(await one.tree()) == 2


async def test_a_session_pruned_while_it_prunes_completes_its_prune(tmp_path: Path) -> None:
    async with kept(tmp_path) as (client, service, link, book), client.session() as chat:
        await chat.say(LONG).text()
        one, two = await chat.fork(2)
        await two.say(LONG).text()
        handle = two.handle or ""
        gate = Gate(link, "close")
        await one.send(SessionPrune(session=two.session.id or ""))
        await gate.reached.wait()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(chat.prune, one.session.id or "")
            await until(lambda: len(service.sessions()) == 1)
            gate.opened.set()
        assert book.journal is not None
        live = book.journal.live
        await until(lambda: len(live) == 1)  # retention may forget all others
        assert book.statistics()["sessions"] == 1
        assert len(await chat.tree()) == 1
        with pytest.raises(SessionLost):
            async with client.resume(handle):
                pass


async def test_a_session_pruned_while_it_is_resumed_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with kept(tmp_path) as (client, service, _, book), client.session() as chat:
        await chat.say(LONG).text()
        (fork,) = await chat.fork()
        await fork.say(LONG).text()
        handle, name = fork.handle or "", fork.session.id or ""
        for live in service.sessions():
            if live.id == name:
                sessions = service._live
                assert sessions is not None and sessions._live.pop(name) is live
                await sessions.registry.close(name, leave_readers=live.aclose, interrupt=True)
        assert len(service.sessions()) == 1
        reached, opened, loop = anyio.Event(), threading.Event(), asyncio.get_running_loop()

        def slowly(*args: Any, **limits: Any) -> Any:
            loop.call_soon_threadsafe(reached.set)
            opened.wait(60)
            return replay(*args, **limits)

        monkeypatch.setattr(registry, "replay", slowly)
        check, checked = sessions.forks.begin_pruning, anyio.Event()

        async def told(*args: Any) -> Any:
            number = await check(*args)
            checked.set()
            return number

        sessions.forks.begin_pruning = told  # type: ignore[method-assign]
        lost: list[BaseException] = []

        async def come_back() -> None:
            try:
                async with client.resume(handle) as back:
                    await back.say(LONG).text()
            except (SessionLost, ConnectionLost) as error:
                lost.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(come_back)
            await reached.wait()
            tasks.start_soon(chat.prune, name)
            await checked.wait()
            for _ in range(9):
                await anyio.lowlevel.checkpoint()
            opened.set()
        assert lost, "it was pruned"
        assert book.statistics()["sessions"] == 1
        assert book.journal is not None
        assert len(book.journal.live) == 1
        assert (await book.journal.statistics())["journal_sessions"] == 1
        with pytest.raises(SessionLost):
            async with client.resume(handle):
                pass
