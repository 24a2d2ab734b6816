"""A fault inside one sequence ends that turn alone; the others say what they say undisturbed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from holdfast.gateway.compose import opened
from holdfast.gateway.embedded import in_memory
from holdfast.gateway.service import Service
from holdfast.gateway.settings import GatewaySettings
from holdfast.runtime.build import load_engine
from holdfast.runtime.engine import Engine
from holdfast.runtime.link.thread import ThreadEngine
from holdfast.runtime.plan import Handle, Plan, Runner
from holdfast.runtime.settings import EngineSettings
from holdfast.sdk import Client, ResponseFailed

from .wires import LONG

pytestmark = pytest.mark.anyio
STORY = "Tell me the story of the fox."


class Fused:
    """Raises for a whole step as long as one of its rows is of the sequence ``cursed``."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.cursed: int | None = None

    def launch(self, plan: Plan) -> Handle:
        if any(row.seq == self.cursed for row in plan.rows):
            raise ValueError("this sequence cannot be computed")
        return self.runner.launch(plan)


@pytest.fixture
async def rig(pocket: EngineSettings) -> AsyncIterator[tuple[Client, list[Fused]]]:
    fuses: list[Fused] = []

    def load(settings, progress, liveness):
        loaded = load_engine(settings, progress, liveness)
        assert isinstance(loaded.engine, Engine)
        fuses.append(Fused(loaded.engine._runner))
        loaded.engine._runner = fuses[0]
        return loaded

    engine = ThreadEngine(pocket, load=load)
    service = Service(GatewaySettings(), "pocket", engine.link)
    async with opened(service, "pocket", engine):
        yield in_memory(service), fuses


async def test_one_sequence_fails_alone(rig: tuple[Client, list[Fused]]) -> None:
    client, (fuse,) = rig
    async with AsyncExitStack() as stack:
        chats = [await stack.enter_async_context(client.session()) for _ in range(5)]
        alone = await chats[0].say(STORY).text()
        turns = [*(chat.say(STORY) for chat in chats[1:-1]), chats[-1].say(STORY, **LONG)]
        begun = [await anext(turn) for turn in turns]  # sequences 2 to 5, one after the other
        fuse.cursed = 5
        with pytest.raises(ResponseFailed) as failed:
            await turns[-1].text()
        assert failed.value.code == "turn_failed"
        rests = await asyncio.gather(*(turn.text() for turn in turns[:-1]))
        assert [first + rest for first, rest in zip(begun, rests, strict=False)] == [alone] * 3
        fuse.cursed = None
        assert await chats[-1].say("My name is Marisol.").text()
