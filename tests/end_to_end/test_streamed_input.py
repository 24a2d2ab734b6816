"""Text that is prefilled while it comes: token for token what is said at once, and less is left to do."""

from __future__ import annotations

import random

import anyio
import pytest

from holdfast.sdk import Client, InputClosed
from holdfast.sdk.text_input import TextInput

pytestmark = pytest.mark.anyio

LINES = (
    "My name is Marisol.",
    "My locker code is 4821.",
    "My favourite colour is teal.",
    "What is my name?",
    "Repeat after me: bagruk 72 plimeen.",
    "My friend lives in Bergen.",
    "What is my locker code?",
    "Tell me the story of the fox.",
    "What is my favourite colour?",
    "What is my dog called?",
)
PAUSES = (0.4, 3.0, 30.0)
"""Seconds after which what came early has been computed: the first are enough but on a very busy machine."""
LONG = "Repeat after me: " + " ".join(f"word{number} and" for number in range(40)) + " the end."


def in_pieces(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.sample(range(1, len(text)), min(5, len(text) - 1)))
    return [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


async def stream(typing: TextInput, text: str, rng: random.Random, pause: float = 0.01) -> None:
    """Send it in pieces, with things taken back in between."""
    for piece in in_pieces(text, rng):
        at = len(typing.text)
        if rng.random() < 0.3:
            await typing.append("no, that is not what I wanted to say")
            await anyio.sleep(pause)
            await typing.replace(at, piece)
        else:
            await typing.append(piece)
        await anyio.sleep(pause)


@pytest.mark.parametrize(("temperature", "turns"), [(0, 10), (0.8, 5)])
async def test_turns_streamed_say_what_they_say_sent_at_once(
    client: Client, temperature: float, turns: int
) -> None:
    rng = random.Random(7)
    async with (
        client.session(temperature=temperature, seed=11) as plain,
        client.session(temperature=temperature, seed=11) as streamed,
    ):
        for turn in range(turns):
            line = LINES[turn % len(LINES)]
            expected = await plain.say(line).text()
            async with streamed.input() as typing:
                await stream(typing, line, rng)
            assert await streamed.say().text() == expected, f"turn {turn}"
            assert streamed.last.usage.input_tokens == plain.last.usage.input_tokens
            assert streamed.last.kv.new == plain.last.kv.new


async def test_what_came_early_is_computed_when_the_reply_is_asked_for(client: Client) -> None:
    for pause in PAUSES:
        async with client.session(max_output_tokens=8) as chat:
            async with chat.input() as typing:
                await typing.append(LONG)
                await anyio.sleep(pause)
            committed = typing.committed
            assert committed is not None
            await chat.say().text()
            assert chat.last.kv.prefilled == chat.last.kv.new, "nothing is computed twice"
            assert committed.prefilled_tokens + committed.left_tokens == chat.last.kv.new
        if committed.prefilled_tokens > 4 * committed.left_tokens:
            return
    pytest.fail(f"nothing was computed within {pause} seconds")


async def test_what_was_taken_back_is_told_and_forgotten(client: Client) -> None:
    for pause in PAUSES:
        async with client.session() as chat:
            await chat.say("My name is Marisol.").text()
            typing = chat.input()
            await typing.append(
                "My name is Bella, and I live in Oslo, with a dog called Rex and a cat called Tom."
            )
            await anyio.sleep(pause)
            await typing.clear()
            with pytest.raises(InputClosed):
                await typing.append("more")
            assert "Marisol" in await chat.say("What is my name?").text()
            early, reason = chat.last.kv.prefilled > chat.last.kv.new, chat.last.kv.miss_reason
            await chat.say("My locker code is 4821.").text()
            assert chat.last.kv.prefilled == chat.last.kv.new, "an abandoned buffer costs nothing later"
        if early:
            assert reason == "input_retracted"
            return
    pytest.fail(f"nothing was computed within {pause} seconds")


async def test_text_that_comes_while_a_reply_runs_waits(client: Client) -> None:
    async with client.session() as chat:
        await chat.say("My name is Marisol.").text()
        story = chat.say("Tell me the story of the fox.")
        first = await anext(story)
        typing = chat.input()
        await typing.append("What is ")
        told = first + "".join([piece async for piece in story])
        assert "fox" in told
        await typing.append("my name?")
        await typing.commit()
        assert "Marisol" in await chat.say().text()
        assert chat.last.kv.prefilled == chat.last.kv.new


async def test_text_committed_within_the_loop_that_reads_a_reply_costs_nothing_of_it(client: Client) -> None:
    async with client.session() as plain:
        await plain.say("My name is Marisol.").text()
        expected = await plain.say("Tell me the story of the fox.").text()
    async with client.session() as chat:
        await chat.say("My name is Marisol.").text()
        pieces = []
        async for piece in chat.say("Tell me the story of the fox."):
            pieces.append(piece)
            if len(pieces) == 5:
                async with chat.input() as typing:
                    await typing.append("What is my name?")
        assert typing.committed is not None
        assert "".join(pieces) == expected
        assert "Marisol" in await chat.say().text()


async def broken_off(typing: TextInput) -> None:
    async with typing:
        await typing.append("My name is Bella.")
        raise KeyError


async def test_a_block_that_raises_takes_the_text_back(client: Client) -> None:
    async with client.session() as chat:
        typing = chat.input()
        with pytest.raises(KeyError):
            await broken_off(typing)
        assert typing.committed is None
        assert "not told" in await chat.say("What is my name?").text()
