"""The journal's disk is full: new turns are refused by name, nothing is acknowledged, and it heals."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from websockets.asyncio.client import connect as dial

from holdfast.gateway.server import Serving, serving
from holdfast.gateway.settings import GatewaySettings
from holdfast.kvstore.reserve import held_by
from holdfast.runtime.settings import EngineSettings
from holdfast.sdk import connect
from holdfast.sessions.settings import JournalSettings

from .wires import Json, Wire, get, text_of, wire

pytestmark = pytest.mark.anyio
MIB = 1 << 20


@pytest.fixture
def small_disk(tmpfs: Callable[[str], Path]) -> Path:
    return tmpfs("4m")


@pytest.fixture
def wider_disk(tmpfs: Callable[[str], Path]) -> Path:
    return tmpfs("24m")


@asynccontextmanager
async def server_on(disk: Path, reserve: int, pocket: EngineSettings) -> AsyncIterator[Serving]:
    journal = JournalSettings(reserve_bytes=reserve, retry_seconds=0.02)
    settings = GatewaySettings(port=0, store=disk / "store", journal=journal)
    async with serving(settings, pocket) as running:
        yield running


def fill(disk: Path, leave: int) -> Path:
    """A file that takes all but ``leave`` bytes."""
    ballast = disk / "ballast"
    found = os.statvfs(disk)
    ballast.write_bytes(bytes(max(0, found.f_bavail * found.f_frsize - leave)))
    return ballast


async def available(running: Serving) -> None:
    while (await running.service.snapshot()).gateway["journal_unavailable"]:
        pass


def message(text: str, **fields: str) -> Json:
    part = {"type": "input_text", "text": text}
    item = {"type": "message", "role": "user", "content": [part]}
    return {"type": "conversation.item.create", "item": item, **fields}


async def test_with_the_reserve_touched_new_turns_are_refused_and_the_running_one_ends(
    small_disk: Path, pocket: EngineSettings
) -> None:
    async with server_on(small_disk, 2 * MIB, pocket) as running, wire(running.url) as one:
        await one.say("My name is Marisol.")
        await one.send(message("Tell me the story of the fox."))
        await one.send({"type": "response.create"})
        await one.until("response.output_text.delta")
        ballast = fill(small_disk, 0)
        assert (await one.until("response.done"))[-1]["response"]["status"] == "completed"
        while not (await running.service.snapshot()).gateway["journal_unavailable"]:
            pass
        for event in (message("Hello", event_id="a"), {"type": "response.create", "event_id": "a"}):
            await one.send(event)
            refused = await one.receive()
            assert refused["type"] == "error" and refused["error"]["event_id"] == "a"
            assert refused["error"]["code"] == "storage_unavailable"
        ballast.unlink()
        await available(running)
        assert "Marisol" in text_of(await one.say("What is my name?"))


async def test_a_full_disk_acknowledges_nothing_and_heals(small_disk: Path, pocket: EngineSettings) -> None:
    async with server_on(small_disk, 0, pocket) as running:
        async with wire(running.url) as one, wire(running.url) as other:
            await one.say("My name is Marisol.")
            await other.say("My locker code is 4821.")
            ballast = fill(small_disk, 0)
            await one.send(message("x" * 40_000, event_id="a"))
            refused = await one.receive()
            assert refused["type"] == "error", "the acknowledgement of `a` must not come"
            assert refused["error"]["code"] == "storage_unavailable"
            await other.send({"type": "response.create", "event_id": "b"})
            refused = await other.receive()
            assert refused["error"]["code"] == "storage_unavailable" and refused["error"]["event_id"] == "b"
            address = running.url.replace("http", "ws", 1) + "/v1/realtime"
            async with dial(address, compression=None, proxy=None) as turned_away:
                assert (await Wire(turned_away).receive())["error"]["code"] == "storage_unavailable"
                await turned_away.wait_closed()
                assert (turned_away.close_code, turned_away.close_reason) == (1013, "storage_unavailable")
            assert (await get(running.url, "/ready"))[0] == 503
            ballast.unlink()
            late = await one.until("conversation.item.done")
            assert [event["type"] for event in late] == ["conversation.item.added", "conversation.item.done"]
            await available(running)
            assert "4821" in text_of(await other.say("What is my locker code?"))
            async with wire(running.url):
                pass
        figures = (await running.service.snapshot()).gateway
        assert figures["journal_failures"] > 0 and not figures["journal_queued"]


async def test_a_removed_store_is_reported(
    tmp_path: Path, pocket: EngineSettings, caplog: pytest.LogCaptureFixture
) -> None:
    async with server_on(tmp_path, 0, pocket) as running, wire(running.url) as one:
        await one.say("My name is Marisol.")
        shutil.rmtree(tmp_path / "store")
        while not (await running.service.snapshot()).gateway["journal_unavailable"]:
            pass
        await one.send({"type": "response.create"})
        cause = f"the store {tmp_path / 'store'} is gone"
        assert (await one.receive())["error"]["message"] == cause
        address = running.url.replace("http", "ws", 1) + "/v1/realtime"
        async with dial(address, compression=None, proxy=None) as turned_away:
            assert (await Wire(turned_away).receive())["error"]["message"] == cause
            await turned_away.wait_closed()
            assert turned_away.close_code == 1013
        status, told = await get(running.url, "/ready")
        assert status == 503 and cause in told
    assert [record.message for record in caplog.records if "gone" in record.message] == [
        f"{cause}; new turns are refused"
    ]


async def test_what_was_acknowledged_before_and_after_a_full_disk_is_there(
    small_disk: Path, pocket: EngineSettings
) -> None:
    async with server_on(small_disk, 0, pocket) as running:
        address = running.url.replace("http", "ws", 1) + "/v1/realtime?resumable=true"
        async with dial(address, compression=None, proxy=None) as socket:
            one = Wire(socket)
            handle = (await one.until("conversation.created"))[0]["handle"]
            await one.say("My name is Marisol.")
            ballast = fill(small_disk, 0)
            await one.send(message("x" * 40_000, event_id="a"))
            assert (await one.receive())["error"]["code"] == "storage_unavailable"
            ballast.unlink()
            big = (await one.until("conversation.item.done"))[-1]["item"]["id"]
            await one.send({"type": "conversation.item.delete", "item_id": big})
            await one.until("conversation.item.deleted")
            await one.say("My locker code is 4821.")
    async with server_on(small_disk, 0, pocket) as running:
        address = running.url.replace("http", "ws", 1) + "/v1/realtime?resume=true"
        async with dial(address, compression=None, proxy=None) as socket:
            one = Wire(socket)
            await one.send({"type": "session.resume", "handle": handle})
            assert (await one.receive())["reopened"]
            assert "4821" in text_of(await one.say("What is my locker code?"))
            assert "Marisol" in text_of(await one.say("What is my name?"))


async def test_kv_never_takes_what_the_journal_keeps_in_reserve(
    wider_disk: Path, pocket: EngineSettings
) -> None:
    """More KV than the disk has beyond the reserve: it gives way, turns go on, and so after a restart."""
    store = wider_disk / "store"
    settings = GatewaySettings(port=0, store=store, journal=JournalSettings(reserve_bytes=16 * MIB))
    engine = msgspec.structs.replace(pocket, store=str(store), disk_bytes=23 * MIB, host_bytes=8 * MIB)
    for start in range(2):
        async with serving(settings, engine) as running, connect(running.url) as client:
            for turn in range(6):
                async with client.session() as chat:
                    story = f"{start} {turn} " + "My name is Marisol, and I like old books. " * 30
                    assert await chat.say(story, max_output_tokens=8).text()
                    await chat.settle("disk")
                found = os.statvfs(wider_disk)
                free = found.f_bavail * found.f_frsize
                assert free + held_by(store / "reserve") >= 16 * MIB
            figures = await running.engine.link.statistics()
            assert figures["disk_stored"] > 0 and figures["disk_budget"] < 8 * MIB
            assert running.clipped is not None and "--disk-bytes" in running.clipped
