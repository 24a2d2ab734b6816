"""Sessions that outgrow the model's context: they go on, recall what stayed, and tell what left."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from holdfast.gateway.embedded import embedded
from holdfast.gateway.settings import GatewaySettings
from holdfast.runtime.settings import EngineSettings
from holdfast.sdk import Chat, Client, NoSummary, ServerError, connect, tool
from holdfast.sdk.frames.items import MessageItem
from holdfast.sdk.frames.response import TruncatedContext
from holdfast.sdk.frames.session import RetentionRatio
from holdfast.tests.threaded import serving

from .wires import wire

pytestmark = pytest.mark.anyio

SMALL = EngineSettings(model="pocket", dtype="float32", blocks=256, max_context=512, debug=True)
STORY = "Tell me the story of the fox."
FACTS = ("My name is Marisol.", "I live in Oslo.")


@pytest.fixture(scope="module")
async def small() -> AsyncIterator[Client]:
    async with embedded(engine=SMALL) as client:
        yield client


def truncated(chat: Chat) -> TruncatedContext | None:
    told = chat.last.response.truncated
    return told if isinstance(told, TruncatedContext) else None


async def overflow(chat: Chat, most: int = 40) -> TruncatedContext:
    """Talk until something leaves the context."""
    for number in range(most):
        await chat.say(f"Repeat after me: word{number} and nothing else.").text()
        if (told := truncated(chat)) is not None:
            return told
    raise AssertionError("the context was never full")


async def test_sixty_turns_in_a_context_of_2048_tokens(client: Client) -> None:
    cuts = 0
    fields = {"temperature": 0, "instructions": "Answer in one sentence, as shortly as you can."}
    async with client.session(**fields) as chat:
        assert chat.session.truncation == "auto"
        for number in range(60):
            new = f"Repeat after me: word{number} and nothing else."  # no context comes twice
            line = (new, STORY, "My name is Marisol.", "What is my name?")[number % 4]
            text = await chat.say(line, max_output_tokens=180).text()
            usage, kv = chat.last.usage, chat.last.kv
            assert usage is not None and kv is not None
            assert usage.input_tokens <= 2048 - 180
            if number % 4 == 3:
                assert text == "Your name is Marisol."
            if truncated(chat) is None:
                assert kv.prefilled == kv.new and kv.recomputed == 0
            else:
                cuts += 1
                assert kv.miss_reason == "context_truncated"
                assert 0 < kv.resident == usage.input_tokens - kv.prefilled
    assert 1 < cuts < 10, "a cut makes room for several turns"


async def test_a_disabled_truncation_is_refused_until_it_is_enabled(small: Client) -> None:
    async with small.session(temperature=0, truncation="disabled") as chat:
        with pytest.raises(ServerError) as refused:
            await overflow(chat)
        assert refused.value.code == "context_length_exceeded"
        updated = await chat.update(truncation={"type": "retention_ratio", "retention_ratio": 0.5})
        assert updated.truncation == RetentionRatio(retention_ratio=0.5)
        await chat.say("My name is Marisol.").text()
        assert truncated(chat) is not None
        assert await chat.say("What is my name?").text() == "Your name is Marisol."
        assert (await chat.update(truncation=None)).truncation == "auto"


async def test_what_has_left_can_be_retrieved_and_gone_back_to(small: Client) -> None:
    async with small.session(temperature=0) as chat:
        first = await chat.add(MessageItem.of("user", "My name is Marisol."))
        await chat.say().text()
        left = await overflow(chat)
        assert left.items[0] == first.id and left.tokens > 0
        found = await chat.retrieve(left.items[0])
        assert isinstance(found, MessageItem) and found.text == "My name is Marisol."
        (fork,) = await chat.fork(at=left.items[1])
        assert await fork.say("What is my name?").text() == "Your name is Marisol."
        rewound = await chat.rewind(left.items[1])
        assert rewound.item_id == left.items[1]
        assert await chat.say("What is my name?").text() == "Your name is Marisol."
        assert truncated(chat) is None


async def test_streamed_input_that_overflows_is_answered(small: Client) -> None:
    async with small.session(temperature=0) as chat:
        await overflow(chat)
        for _ in range(12):
            async with chat.input() as typing:
                for piece in ("My name is ", "Marisol. ", "I live in ", "Oslo. " * 5):
                    await typing.append(piece)
            await chat.say(max_output_tokens=30).text()
        async with chat.input() as typing:
            await typing.append("What is ")
            await typing.append("my name?")
        assert await chat.say().text() == "Your name is Marisol."


async def test_a_text_longer_than_the_context_is_refused_in_one_line(small: Client) -> None:
    async with small.session(temperature=0) as chat:
        await chat.say("My name is Marisol.").text()
        with pytest.raises(ServerError) as refused:
            await chat.say("seven " * 700).text()
        assert refused.value.code == "context_length_exceeded" and "\n" not in refused.value.message
        assert await chat.say("What is my name?").text() == "Your name is Marisol."
        await chat.update(instructions="seven " * 700)
        with pytest.raises(ServerError, match="instructions and tools have") as refused:
            await chat.say("Hello").text()
        assert refused.value.code == "context_length_exceeded"
        await chat.update(instructions="")
        assert await chat.say("What is my name?").text() == "Your name is Marisol."


async def test_tools_with_long_outputs_outgrow_the_context_and_the_run_goes_on(small: Client) -> None:
    @tool
    async def get_weather(city: str) -> str:
        """Get the weather in a city."""
        return '{"temperature": 7, "sky": "cloudy", "note": "' + "as it was before, " * 5 + '"}'

    gone: list[str] = []
    async with small.session(temperature=0, tools=[get_weather]) as chat:
        for _ in range(8):
            assert await chat.say("What is the weather in Oslo?").text()
            for one in chat.rounds:
                left = one.response.truncated
                gone += left.items if isinstance(left, TruncatedContext) else []
    assert gone


async def test_responses_out_of_band_leave_the_conversation_as_it_is(small: Client) -> None:
    async with small.session(temperature=0) as chat:
        await overflow(chat)
        while True:  # nearly full, so that more does not fit
            await chat.say("My name is Marisol.", max_output_tokens=30).text()
            usage = chat.last.usage
            assert usage is not None
            if usage.input_tokens > 400:
                break
        before = usage.input_tokens
        aside = chat.respond(conversation="none", max_output_tokens=250)  # which needs more room
        async for _ in aside:
            pass
        assert truncated(chat) is not None
        assert await chat.say("What is my name?", max_output_tokens=30).text() == "Your name is Marisol."
        assert truncated(chat) is None and chat.last.usage.input_tokens > before


async def test_a_server_that_dies_in_a_cutting_turn_leaves_the_same_items_out(tmp_path: Path) -> None:
    """The next server goes on with the reply, and with the context that it began with."""
    lines = [f"Repeat after me: word{number} and nothing else." for number in range(14)]
    more = {"min_output_tokens": 60, "max_output_tokens": 100}

    async def talk(chat: Chat, lines: list[str]) -> list[tuple[str, int, list[str]]]:
        told = []
        for line in lines:
            text = await chat.say(line, **more).text()
            left = truncated(chat)
            usage = chat.last.usage
            assert usage is not None
            told.append((text, usage.input_tokens, [] if left is None else [str(len(left.items))]))
        return told

    settings = GatewaySettings(port=0, store=tmp_path, drain_seconds=0.0)
    async with serving(settings, SMALL) as running, connect(running.url) as client:
        async with client.session(temperature=0) as chat:
            wanted = await talk(chat, lines)
        cut = next(at for at, (_, _, left) in enumerate(wanted) if left)
        async with client.session(temperature=0) as chat:
            assert await talk(chat, lines[:cut]) == wanted[:cut]
            turn = chat.say(lines[cut], **more)
            begin = "".join([await anext(turn) for _ in range(3)])
            handle = chat.handle
            assert handle is not None
            await running.service.close()
    async with serving(settings, SMALL) as running, wire(running.url) as one:
        await one.send({"type": "session.resume", "handle": handle})
        events = await one.until("response.done")
        done = events[-1]["response"]
        text = "".join(one["delta"] for one in events if one["type"] == "response.output_text.delta")
        assert text.startswith(begin) and text == wanted[cut][0]
        assert (done["usage"]["input_tokens"], [str(len(done["truncated"]["items"]))]) == wanted[cut][1:]
        handle = events[-1]["handle"]
        async with connect(running.url) as client, client.resume(handle) as chat:
            assert await talk(chat, lines[cut + 1 :]) == wanted[cut + 1 :]


async def test_a_compacted_fork_goes_on_from_a_summary(client: Client) -> None:
    async with client.session(temperature=0) as chat:
        for line in (*FACTS, STORY, STORY, STORY):
            await chat.say(line).text()
        usage = chat.last.usage
        assert usage is not None
        child = await chat.compact(1, request="What is my name?", max_output_tokens=30)
        asked, kv = chat.last, chat.last.kv
        assert asked.text == "Your name is Marisol." and kv is not None
        assert kv.prefilled == kv.new < 40, "the summary is asked for behind what is resident"
        assert await child.say("What is my name?").text() == "Your name is Marisol."
        assert child.last.usage is not None
        assert child.last.usage.input_tokens < usage.input_tokens
        await child.say("I live in Oslo.").text()
        assert child.last.kv is not None and child.last.kv.prefilled == child.last.kv.new
        await chat.say("Where do I live?").text()
        assert chat.last.kv is not None and chat.last.kv.prefilled == chat.last.kv.new
        assert chat.last.text == "You live in Oslo.", "the original is as it was"


async def test_an_empty_summary_makes_no_fork(client: Client) -> None:
    async with client.session(temperature=0) as chat:
        await chat.say(FACTS[0]).text()
        grammar = {"type": "choice", "choices": [" "]}
        with pytest.raises(NoSummary):
            await chat.compact(grammar=grammar)
        assert len(await chat.tree()) == 1
        with anyio.fail_after(60):
            assert await chat.say("What is my name?").text() == "Your name is Marisol."
