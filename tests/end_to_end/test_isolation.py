"""A fault inside one sequence ends that turn alone; the others say what they say undisturbed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from holdfast.gateway.embedded import in_memory
from holdfast.gateway.service import Service, opened
from holdfast.gateway.settings import GatewaySettings
from holdfast.runtime.execution.runner import TorchRunner
from holdfast.runtime.plan import Handle, Plan
from holdfast.runtime.settings import EngineSettings
from holdfast.runtime.thread import ThreadEngine
from holdfast.sdk import Client, ResponseFailed

from .wires import LONG

pytestmark = pytest.mark.anyio
STORY = "Tell me the story of the fox."


@pytest.fixture
async def client(pocket: EngineSettings) -> AsyncIterator[Client]:
    engine = ThreadEngine(pocket)
    service = Service(GatewaySettings(), "pocket", engine.link)
    async with opened(service, "pocket", engine):
        yield in_memory(service)


async def test_one_sequence_fails_alone(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = TorchRunner.launch

    def fused(runner: TorchRunner, plan: Plan) -> Handle:
        if 5 in plan.seqs:
            raise ValueError("this sequence cannot be computed")
        return launch(runner, plan)

    async with AsyncExitStack() as stack:
        chats = [await stack.enter_async_context(client.session()) for _ in range(5)]
        alone = await chats[0].say(STORY).text()
        turns = [*(chat.say(STORY) for chat in chats[1:-1]), chats[-1].say(STORY, **LONG)]
        begun = [await anext(turn) for turn in turns]  # sequences 2 to 5, one after the other
        monkeypatch.setattr(TorchRunner, "launch", fused)
        with pytest.raises(ResponseFailed) as failed:
            await turns[-1].text()
        assert failed.value.code == "turn_failed"
        rests = await asyncio.gather(*(turn.text() for turn in turns[:-1]))
        assert [first + rest for first, rest in zip(begun, rests, strict=False)] == [alone] * 3
        monkeypatch.undo()
        assert await chats[-1].say("My name is Marisol.").text()
