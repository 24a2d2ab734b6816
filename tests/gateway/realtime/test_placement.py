"""Leases, stages and settles on a scripted engine that is long over them: they pile up nowhere."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from holdfast.gateway.embedded import in_memory
from holdfast.gateway.service import Service
from holdfast.gateway.settings import ClientLimits, GatewaySettings
from holdfast.runtime.verbs import BlockMap, KVTier, Moved, TierRun
from holdfast.sdk.frames.client import SessionStage
from holdfast.sdk.frames.server import BlockCounts, BlockRun, ErrorEvent, SessionStaged
from holdfast.sessions.registry import SessionRegistry
from holdfast.sessions.text.language import Language
from holdfast.tests.gateway.scripted_service import END, Scripted, spoken
from holdfast.tests.sessions.text.chat_languages import ours

pytestmark = pytest.mark.anyio
MOST = 3


class Slow(Scripted):
    """Answers no stage before it may."""

    def __init__(self) -> None:
        super().__init__(spoken, END, ahead=1)
        self.may, self.asked = asyncio.Event(), 0

    async def stage(self, seq: int) -> Moved:
        self.asked += 1
        await self.may.wait()
        return await super().stage(seq)


async def test_leases_and_stages_beyond_the_limit_are_refused_at_once() -> None:
    link = Slow()
    service = Service(GatewaySettings(limits=ClientLimits(moves=MOST)), "scripted", link)
    service.open(SessionRegistry(link, Language.of(ours("chatml"))))
    client = in_memory(service)
    async with client.session() as chat, client.session() as other:
        await chat.say("begin").text()
        sent = [await chat.send(SessionStage()) for _ in range(MOST + 2)]
        events = chat.events()
        refused = [await anext(events) for _ in range(2)]
        assert all(isinstance(event, ErrorEvent) for event in refused)
        assert [event.error.code for event in refused] == ["too_many_moves"] * 2
        assert [event.error.event_id for event in refused] == sent[MOST:]
        assert await other.say("another session").text()
        assert link.asked <= MOST
        link.may.set()
        assert all([isinstance(await anext(events), SessionStaged) for _ in range(MOST)])
        assert (await chat.stage()).source == "device", "there is room again"
        assert await chat.say("go on").text()
    await service.close()


class Spread(Scripted):
    """Has a sequence's blocks in every tier."""

    async def locate(
        self, seq: int | None, tokens: Sequence[int] = (), salt: bytes = b"", adapter: bytes = b""
    ) -> BlockMap:
        runs = [
            TierRun(KVTier.DEVICE, True, 3),
            TierRun(KVTier.HOST, True, 1),
            TierRun(KVTier.HOST, False, 2),
            TierRun(KVTier.DISK, False, 4),
            TierRun(KVTier.NONE, False, 5),
        ]
        return BlockMap(15 * 16, 16, runs)


async def test_a_map_of_blocks_counts_each_block_once() -> None:
    link = Spread(spoken, END, ahead=1)
    service = Service(GatewaySettings(), "scripted", link)
    service.open(SessionRegistry(link, Language.of(ours("chatml"))))
    async with in_memory(service).session() as chat:
        listed = await chat.blocks()
    assert listed.blocks == BlockCounts(device=3, host=3, disk=4, shared=4, none=5, total=15)
    assert listed.runs[2] == BlockRun(tier="host", shared=False, count=2) and len(listed.runs) == 5
    assert (listed.tokens, listed.block_tokens) == (240, 16)
    await service.close()
