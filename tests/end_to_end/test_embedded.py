"""The embedded engine: the same client, no sockets; what cannot load says why; nothing is left behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.gateway.embedded import embedded
from holdfast.gateway.settings import ClientLimits, GatewaySettings
from holdfast.runtime.errors import ModelUnreadable
from holdfast.runtime.settings import EngineSettings
from holdfast.sdk import Client, ConnectionFailed, ConnectionLost, connect
from holdfast.sdk.connection.reconnect import Patience
from holdfast.sdk.frames.client import ItemCreate, ResponseCreate
from holdfast.sdk.frames.items import MessageItem

pytestmark = pytest.mark.anyio


async def test_the_embedded_engine_replies_as_a_server_does(client: Client, server) -> None:
    async def talk(client: Client) -> list[str]:
        async with client.session(temperature=0) as chat:
            return [await chat.say(line).text() for line in ("I live in Oslo.", "Where do I live?")]

    async with connect(server.url) as remote:
        assert await talk(client) == await talk(remote)


async def test_a_model_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelUnreadable, match="no such folder"):
        async with embedded(str(tmp_path / "nothing")):
            pass


async def test_another_model_than_its_own_is_refused(client: Client) -> None:
    with pytest.raises(ConnectionFailed, match="another"):
        async with Client(client._dial, "another").session():
            pass


def once(patience: Patience) -> Iterator[float]:
    """The pauses of a client that reconnects in vain: there is a first try."""
    yield 0.0
    pytest.fail("it went on looking")


async def test_leaving_ends_its_sessions_and_its_thread(
    pocket: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Patience, "pauses", once)
    threads, tasks = set(threading.enumerate()), asyncio.all_tasks()
    async with embedded(engine=pocket) as client:
        session = client.session()
        chat = await session.__aenter__()
        await chat.send(ItemCreate(item=MessageItem.of("user", "Tell me the story of the fox.")))
        await chat.send(ResponseCreate())
    with pytest.raises(ConnectionLost, match="server_going_away"):
        async for _ in chat.events():
            pass
    await session.__aexit__(None, None, None)
    started = set(threading.enumerate()) - threads
    assert not [thread for thread in started if thread.name.startswith("holdfast")]
    assert asyncio.all_tasks() <= tasks, "of those before some may have ended"


async def test_a_frame_beyond_the_limit_is_refused_and_the_session_goes_on(pocket: EngineSettings) -> None:
    settings = GatewaySettings(limits=replace(ClientLimits(), frame_bytes=2000))
    async with embedded(engine=pocket, settings=settings) as client, client.session() as chat:
        assert await chat.say("My name is Marisol.").text()
        await chat.send(ItemCreate(item=MessageItem.of("user", "x" * 2000)))
        assert (await anext(chat.events())).error.code == "frame_too_large"
        assert "Marisol" in await chat.say("What is my name?").text()
