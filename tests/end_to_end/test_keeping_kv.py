"""Leases, stage and settle over a real socket: KV goes down and comes back, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from holdfast.gateway.server import serving
from holdfast.gateway.settings import GatewaySettings
from holdfast.runtime.settings import EngineSettings
from holdfast.sdk import Client, ServerError, connect
from holdfast.sdk.frames.client import ItemCreate, ResponseCreate, SessionStage
from holdfast.sdk.frames.items import MessageItem
from holdfast.sdk.frames.response import ResponseParams
from holdfast.sdk.frames.server import ErrorEvent

from .wires import LONG

pytestmark = pytest.mark.anyio

LINES = ("My name is Marisol. " * 4, "My locker code is 4821.", "What is my name?", "And my locker code?")


async def test_settled_kv_comes_back_and_replies_are_the_same(
    client: Client, pocket: EngineSettings, tmp_path: Path
) -> None:
    async with client.session(temperature=0, instructions="Be brief.") as calm:
        wanted = [await calm.say(line).text() for line in LINES]
    settings = msgspec.structs.replace(pocket, store=str(tmp_path), disk_bytes=64 << 20, host_bytes=32 << 20)
    async with (
        serving(GatewaySettings(port=0), settings) as server,
        connect(server.url) as remote,
        remote.session(temperature=0, instructions="Be brief.") as chat,
    ):
        assert await chat.say(LINES[0]).text() == wanted[0]
        receipt = await chat.lease(priority=1, ttl=60.0, returns_in=30.0)
        assert receipt.status == "granted" and receipt.tokens > 16
        settled = await chat.settle("disk")
        assert settled.tier == "disk" and settled.tokens == receipt.tokens - 1
        assert await chat.say(LINES[1]).text() == wanted[1]
        kv = chat.last.kv
        assert kv is not None and kv.disk >= settled.tokens - 16
        assert kv.prefilled + kv.recomputed == kv.new and kv.restore_ms > 0

        settled = await chat.settle("host")
        assert settled.tier == "host"
        staged = await chat.stage()
        assert staged.source == "host" and staged.tokens == settled.tokens
        assert (await chat.stage()).source == "device"
        assert await chat.say(LINES[2]).text() == wanted[2]
        kv = chat.last.kv
        assert kv is not None and (kv.host, kv.prefilled, kv.recomputed) == (staged.tokens, kv.new, 0)


async def test_a_session_settled_and_staged_in_one_process(client: Client) -> None:
    async with client.session(temperature=0) as chat:
        assert (await chat.lease(ttl=5.0)).status == "granted"
        await chat.say("Hello!").text()
        leased = await chat.lease(99, 1e12, -1.0)
        assert (leased.status, leased.priority, leased.ttl, leased.returns_in) == ("clipped", 8, 86400.0, 0.0)
        await chat.settle("disk")  # there is none: as far down as it goes
        staged = await chat.stage()
        assert staged.source == "host" and staged.tokens > 0
        assert (await chat.lease(ttl=0)).tokens == 0


async def test_a_refused_verb_is_a_typed_error_and_the_session_goes_on(client: Client) -> None:
    async with client.session(temperature=0) as chat:
        await chat.send(ItemCreate(item=MessageItem.of("user", "Tell me the story of the fox.")))
        await chat.send(ResponseCreate(response=ResponseParams(**LONG)))
        sent = await chat.send(SessionStage())
        async for event in chat.events():
            if isinstance(event, ErrorEvent):
                assert event.error.event_id == sent
                assert event.error.code == "conversation_already_has_active_response"
                break
        with pytest.raises(ServerError) as refused:
            await chat.settle("tape")  # type: ignore[arg-type]
        assert (refused.value.code, refused.value.param) == ("invalid_value", "tier")
        assert await chat.say("Hello!").text()


async def test_blocks_are_where_settle_and_stage_put_them(pocket: EngineSettings, tmp_path: Path) -> None:
    settings = msgspec.structs.replace(pocket, store=str(tmp_path), disk_bytes=64 << 20, host_bytes=32 << 20)
    async with (
        serving(GatewaySettings(port=0), settings) as server,
        connect(server.url) as remote,
        remote.session(temperature=0, instructions="Be brief.") as chat,
    ):
        assert (await chat.blocks()).blocks.total == 0
        during = [await chat.blocks() async for _ in chat.say(LINES[0])]
        assert during[0].blocks.device > 0 and during[0].runs[0].tier == "device"
        for move, tier in (
            (lambda: chat.settle("host"), "host"),
            (lambda: chat.settle("disk"), "disk"),
            (chat.stage, "device"),
        ):
            await move()
            listed = await chat.blocks()
            assert [(run.tier, run.shared) for run in listed.runs] == [(tier, False)]
            assert getattr(listed.blocks, tier) == listed.blocks.total == -(-listed.tokens // 16)
        (child,) = await chat.fork()
        listed = await chat.blocks()
        assert listed.blocks.shared >= listed.tokens // 16 and listed.runs[0].shared
        assert (await child.blocks()).blocks == listed.blocks
        await chat.prune(child)
        assert (await chat.blocks()).blocks.shared == 0
