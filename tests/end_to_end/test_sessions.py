"""The SDK against the gateway in one process: sessions in turns, and what must not hurt them."""

from __future__ import annotations

from collections import Counter

import pytest

from holdfast.sdk import Chat, Client, ServerError
from holdfast.sdk.errors import FrameError
from holdfast.sdk.frames.client import ItemCreate, ResponseCancel, ResponseCreate
from holdfast.sdk.frames.items import MessageItem
from holdfast.sdk.frames.response import ResponseParams
from holdfast.sdk.frames.server import ErrorEvent, ResponseCreated, ResponseDone, ServerEvent, TextDelta

from .wires import LONG

pytestmark = pytest.mark.anyio
LINES = ("My name is Marisol.", "My locker code is 4821.", "What is my name?", "What is my locker code?")


def cost(chat: Chat) -> tuple[int, int, int, int]:
    """Prefilled, new, found resident, and the whole prompt of the last response."""
    kv, usage = chat.last.kv, chat.last.usage
    assert kv is not None and usage is not None and kv.recomputed == 0
    return kv.prefilled, kv.new, kv.resident, usage.input_tokens


async def test_every_turn_prefills_exactly_its_new_tokens(client: Client) -> None:
    async with client.session(instructions="Be brief, nobody said this before.") as chat:
        length = 0
        for line in LINES:
            assert await chat.say(line).text()
            prefilled, new, resident, prompt = cost(chat)
            assert prefilled == new > 0
            assert resident + prefilled == prompt
            assert resident == max(0, length - 1), "all but the pending token was kept"
            assert chat.last.kv.miss_reason is None
            length = prompt + chat.last.usage.output_tokens


async def test_a_session_says_what_one_prefilled_at_once_says(client: Client) -> None:
    async with client.session(temperature=0) as chat:
        replies = [await chat.say(line).text() for line in LINES]
    async with client.session(temperature=0) as whole:
        for line, reply in zip(LINES[:-1], replies, strict=False):
            await whole.add(MessageItem.of("user", line))
            await whole.add(MessageItem.of("assistant", reply))
        assert await whole.say(LINES[-1]).text() == replies[-1]


async def test_tools_are_called_and_their_answers_used(client: Client) -> None:
    asked: list[str] = []

    def get_weather(city: str) -> str:
        """Get the weather in a city."""
        asked.append(city)
        return '{"temperature": 7, "sky": "cloudy"}'

    async with client.session(tools=[get_weather]) as chat:
        reply = await chat.say("What is the weather in Oslo?").text()
        assert len(asked) == 1 and len(chat.rounds) == 2
        assert "7" in reply and "cloudy" in reply
        for finished in chat.rounds:
            assert finished.kv is not None and finished.kv.prefilled == finished.kv.new


async def test_a_session_tells_its_history_to_a_client_that_comes_back(client: Client) -> None:
    async with client.session() as chat:
        assert await chat.history() == []
        replies = [await chat.say(line).text() for line in LINES[:2]]
        handle = chat.handle
    assert handle is not None
    async with client.resume(handle) as chat:
        said = [item.text for item in await chat.history() if isinstance(item, MessageItem)]
        assert said == [LINES[0], replies[0], LINES[1], replies[1]]
        assert [item.id for item in await chat.history(2)] == [item.id for item in await chat.history()][2:]


async def test_a_cancelled_reply_keeps_its_kv_and_its_words(client: Client) -> None:
    async with client.session() as chat:
        said = ""
        async for piece in chat.say("Tell me the story of the fox.", **LONG):
            said += piece
            if len(said) > 20:
                await chat.cancel()
        assert chat.last.status == "cancelled"
        assert chat.last.response.status_details.reason == "client_cancelled"
        (item,) = chat.last.response.output
        assert item.status == "incomplete" and item.text == said
        kept = await chat.retrieve(item.id)
        assert kept.text == said
        length = chat.last.usage.input_tokens + chat.last.usage.output_tokens
        await chat.say("What is my name?").text()
        prefilled, new, resident, _ = cost(chat)
        assert prefilled == new and resident >= length - 1


async def test_cancelling_nothing_is_an_error_and_changes_nothing(client: Client) -> None:
    async with client.session() as chat:
        await chat.send(ResponseCancel(event_id="stray"))
        assert await chat.say(LINES[0]).text()


async def test_a_second_response_is_refused_and_the_first_goes_on(client: Client) -> None:
    async with client.session() as chat:
        await chat.send(ItemCreate(item=MessageItem.of("user", LINES[0])))
        await chat.send(ResponseCreate(event_id="first", response=ResponseParams(**LONG)))
        await chat.send(ResponseCreate(event_id="second"))
        events = await until_done(chat)
        (refused,) = [event.error for event in events if isinstance(event, ErrorEvent)]
        assert refused.event_id == "second"
        assert refused.code == "conversation_already_has_active_response"
        assert events[-1].response.status == "completed"
        assert await chat.say(LINES[2]).text()


async def test_responses_out_of_band_run_beside_and_leave_no_trace(client: Client) -> None:
    async with client.session() as chat:
        await chat.say(LINES[0]).text()
        await chat.send(ItemCreate(item=MessageItem.of("user", "Tell me the story of the fox.")))
        await chat.send(ResponseCreate())
        aside = ResponseParams(conversation="none", metadata={"topic": "aside"})
        for _ in range(2):
            await chat.send(ResponseCreate(response=aside))
        events = await until_done(chat, responses=3)
        done = [event.response for event in events if isinstance(event, ResponseDone)]
        assert Counter(response.conversation_id is None for response in done) == {True: 2, False: 1}
        assert all(response.status == "completed" for response in done)
        created = [event for event in events if isinstance(event, ResponseCreated)]
        assert created[-1].event_id != events[-1].event_id
        await chat.say(LINES[2]).text()
        prefilled, new, *_ = cost(chat)
        assert prefilled == new


async def test_a_prompt_beyond_the_context_is_refused_and_the_session_lives(client: Client) -> None:
    async with client.session() as chat:
        await chat.say(LINES[0]).text()
        giant = await chat.add(MessageItem.of("user", "seven " * 4000))
        with pytest.raises(ServerError) as refused:
            await chat.say().text()
        assert refused.value.code == "context_length_exceeded"
        await chat.delete(giant.id)
        assert "Marisol" in await chat.say(LINES[2]).text()


async def test_too_much_said_is_taken_back_and_the_session_is_unharmed(client: Client) -> None:
    async with client.session() as chat:
        await chat.say(LINES[0]).text()
        told = chat.last
        with pytest.raises(ServerError) as refused:
            await chat.say("seven " * 4000).text()
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", None)
        assert chat.last is told
        note = MessageItem.of("user", LINES[2])
        added = await chat.add(note)
        assert isinstance(added, MessageItem) and added.text == note.text
        assert "Marisol" in await chat.say().text()


@pytest.mark.parametrize(
    "fields",
    [{"temperature": 2.01}, {"temperature": -1}, {"top_p": -0.1}, {"top_k": -1}, {"stop": ["x"] * 17}],
)
async def test_sampling_out_of_bounds_is_refused_here_and_there(client: Client, fields: dict) -> None:
    async with client.session() as chat:
        with pytest.raises(FrameError):
            await chat.update(**fields)
        with pytest.raises(FrameError):
            chat.say("Hello", **fields)
        assert await chat.say(LINES[0]).text()


async def test_the_same_seed_draws_the_same_words(client: Client) -> None:
    async def babble(seed: int) -> str:
        async with client.session(temperature=2, seed=seed) as chat:
            return await chat.say("Why?", max_output_tokens=40).text()

    first = await babble(1)
    assert first == await babble(1)
    assert first != await babble(2)


async def test_limits_and_stops_end_a_reply(client: Client) -> None:
    async with client.session() as chat:
        await chat.say("Tell me the story of the fox.", max_output_tokens=5).text()
        assert chat.last.status == "incomplete" and chat.last.usage.output_tokens == 5
        assert chat.last.response.status_details.reason == "max_output_tokens"
        whole = await chat.say(LINES[0]).text()
        cut = await chat.say(LINES[0], stop=["Marisol"]).text()
        assert "Marisol" in whole and "Marisol" not in cut
        await chat.say(LINES[2]).text()
        prefilled, new, *_ = cost(chat)
        assert prefilled == new


async def test_an_edited_history_is_computed_again_from_there_and_says_so(client: Client) -> None:
    async with client.session() as chat:
        await chat.say(LINES[0]).text()
        (said,) = chat.last.response.output
        await chat.say(LINES[1]).text()
        await chat.delete(said.id)
        await chat.say(LINES[2]).text()
        kv = chat.last.kv
        assert kv.miss_reason == "history_edited"
        assert kv.prefilled > kv.new and kv.resident > 0


async def test_a_client_that_leaves_ends_what_it_began(client: Client) -> None:
    async with client.session() as chat:
        async for _ in chat.say("Tell me the story of the fox."):
            break
    async with client.session() as other:  # an engine in debug audits itself when the first one is gone
        assert await other.say(LINES[0]).text()


async def until_done(chat: Chat, responses: int = 1) -> list[ServerEvent]:
    events: list[ServerEvent] = []
    async for event in chat.events():
        assert not isinstance(event, TextDelta) or event.delta
        events.append(event)
        responses -= isinstance(event, ResponseDone)
        if not responses:
            return events
    raise AssertionError("the connection ended")
