"""What a turn costs in rows of the engine's steps: one for its prompt, one for each token after the first."""

from __future__ import annotations

import pytest

from holdfast.gateway.server import Serving
from holdfast.sdk import Chat, connect
from holdfast.sdk.frames.items import MessageItem

pytestmark = pytest.mark.anyio

TOKENS = 4
EXACTLY = {"min_output_tokens": TOKENS, "max_output_tokens": TOKENS}


async def rows(server: Serving) -> float:
    return (await server.engine.link.statistics())["rows"]


async def rows_of(server: Serving, chat: Chat, line: str) -> float:
    before = await rows(server)
    await chat.say(line, **EXACTLY).text()
    assert chat.last.usage is not None and chat.last.usage.output_tokens == TOKENS
    return await rows(server) - before


async def test_no_step_comes_between_a_prompt_and_its_turn(server: Serving) -> None:
    async with connect(server.url) as client, client.session(instructions="A first turn.") as chat:
        assert (
            await rows_of(server, chat, "Nobody has said this before, and it is longer than a block.")
            == TOKENS
        )
        assert (
            await rows_of(server, chat, "And this is a later turn, with a prompt of some tokens.") == TOKENS
        )
        (branch,) = await chat.fork(1)
        assert (
            await rows_of(server, branch, "This goes on from a fork, which has blocks of its own.") == TOKENS
        )


async def test_no_step_comes_inside_a_turn_that_brings_all_its_input(server: Serving) -> None:
    async with connect(server.url) as client, client.session() as chat:
        told = [MessageItem.of("user", "Everything that was ever said, told again from the beginning on.")]
        before = await rows(server)
        async for _ in chat.respond(conversation="none", input=told, **EXACTLY):
            pass
        assert await rows(server) - before == TOKENS
