"""Answers and the events they belong to: unread turns, requests while a reply runs, refusals."""

from __future__ import annotations

from collections.abc import Iterable

import anyio
import pytest

from holdfast.sdk import errors
from holdfast.sdk.frames import client, server
from holdfast.sdk.frames.client import ClientEvent
from holdfast.sdk.frames.items import MessageItem
from holdfast.sdk.params import TOGETHER

from ..scripted import Script, chatting, given_up

pytestmark = pytest.mark.anyio
WORDS = "|".join(f"word{number} " for number in range(30))


def too_long(script: Script, event: ClientEvent) -> Iterable[server.ServerEvent]:
    """A server that refuses every response once its turns are used up."""
    used_up = isinstance(event, client.ResponseCreate) and not script.turns
    if used_up or isinstance(event, client.ResponseSteer):
        yield script.error("context_length_exceeded", event.event_id)
    else:
        yield from script.usual(event)


def committing(script: Script, event: ClientEvent) -> Iterable[server.ServerEvent]:
    """A server that knows typed text."""
    if isinstance(event, client.TextCommit):
        yield server.TextCommitted(event_id=script.id(), item_id="typed", prefilled_tokens=0, left_tokens=1)
    elif isinstance(event, client.TextClear):
        yield server.TextCleared(event_id=script.id())
    else:
        yield from script.usual(event)


def made(script: Script) -> list[str | None]:
    return [item.id for item in script.added()]


def deleted(script: Script) -> list[str]:
    return [event.item_id for event in script.got if isinstance(event, client.ItemDelete)]


def text_of(item: object) -> str:
    assert isinstance(item, MessageItem)
    return item.text


# --- answers by id ---


async def test_an_item_is_answered_by_itself_and_not_by_one_left_unread() -> None:
    script = Script()
    async with chatting(script) as chat:
        await chat.send(client.ItemCreate(item=MessageItem.of("user", "unread")))
        assert text_of(await chat.add(MessageItem.of("user", "mine"))) == "mine"
        named = MessageItem(id="name", role="user", content=[])
        assert (await chat.add(named)).id == "name"


async def test_after_a_cancel_during_a_tool_an_item_is_answered_by_itself() -> None:
    started, go_on = anyio.Event(), anyio.Event()

    async def slow() -> str:
        started.set()
        await go_on.wait()
        return "done"

    script = Script([("slow", "{}")])
    async with chatting(script, tools=[slow]) as chat:
        async with anyio.create_task_group() as group:
            group.start_soon(chat.say("Go").text)
            await started.wait()
            await chat.cancel()
            go_on.set()
        assert text_of(await chat.add(MessageItem.of("user", "mine"))) == "mine"


async def test_items_are_retrieved_and_deleted_by_their_ids() -> None:
    script = Script()
    async with chatting(script) as chat:
        await chat.send(client.ItemRetrieve(item_id="other"))
        assert (await chat.retrieve("mine")).id == "mine"
        await chat.send(client.ItemDelete(item_id="other"))
        await chat.delete("mine")
        await chat.send(client.ItemDelete(item_id="last"))
        told = await anext(chat.events())
        assert isinstance(told, server.ItemDeleted) and told.item_id == "last"


# --- text typed while a reply runs ---


@pytest.mark.parametrize("kept", [True, False])
async def test_text_typed_within_a_reply_costs_none_of_its_pieces(kept: bool) -> None:
    script = Script([WORDS], answer=committing)
    pieces = []
    async with chatting(script) as chat:
        async for piece in chat.say("Tell"):
            pieces.append(piece)
            if len(pieces) == 5:
                typing = chat.input()
                await typing.append("And then?")
                await (typing.commit() if kept else typing.clear())
        assert "".join(pieces) == chat.last.text == WORDS.replace("|", "")


async def test_text_committed_by_another_task_and_the_reply_both_arrive() -> None:
    script = Script([WORDS], answer=Script.usual)
    async with chatting(script) as chat:
        pieces: list[str] = []

        async def read() -> None:
            pieces.extend([piece async for piece in chat.say("Tell")])

        async def commit() -> None:
            async with chat.input() as typing:
                await typing.append("And then?")

        async with anyio.create_task_group() as group:
            group.start_soon(commit)
            await anyio.wait_all_tasks_blocked()  # it reads now, with no answer to come yet
            group.start_soon(read)
            await anyio.wait_all_tasks_blocked()
            script.tell(
                server.TextCommitted(event_id=script.id(), item_id="t", prefilled_tokens=0, left_tokens=1)
            )
        assert "".join(pieces) == WORDS.replace("|", "")


async def test_events_without_a_reader_are_dropped() -> None:
    script = Script([WORDS], answer=committing)
    async with chatting(script) as chat:
        turn = chat.say("Tell")
        await anext(turn)
        async with chat.input() as typing:
            await typing.append("And then?")
        await turn.text()
        for number in range(20):
            await chat.add(MessageItem.of("user", str(number)))
        assert not chat._connection._queue


# --- a turn refused before it began ---


async def test_a_refused_turn_removes_its_message() -> None:
    script = Script(["Fine"], answer=too_long)
    async with chatting(script) as chat:
        assert await chat.say("Hi").text() == "Fine"
        with pytest.raises(errors.ServerError) as caught:
            await chat.say("too long").text()
        assert caught.value.code == "context_length_exceeded"
        assert deleted(script) == made(script)[1:]
        script.turns.append(["Still here"])
        assert await chat.say("Hi").text() == "Still here"


@pytest.mark.parametrize("long", [False, True])
async def test_a_turn_that_is_refused_at_once_removes_only_what_it_had_sent_before(*, long: bool) -> None:
    def limited(script: Script, event: ClientEvent) -> Iterable[server.ServerEvent]:
        if isinstance(event, client.ResponseCreate):
            yield script.error("rate_limit_exceeded", event.event_id)
        else:
            yield from script.usual(event)

    script = Script(answer=limited)
    async with chatting(script) as chat:
        with pytest.raises(errors.ServerError):
            await chat.say("x" * (TOGETHER + 1) if long else "Hi").text()
    assert deleted(script) == (made(script) if long else [])


async def test_an_event_that_cannot_be_sent_is_not_waited_for() -> None:
    async with chatting(Script(["Fine"])) as chat:
        for turn in (chat.say("half a character: \ud83d"), chat.steer("\ud83d")):
            with pytest.raises(errors.FrameMalformed):
                await turn.text()
        text = chat.input()
        await text.append("typed")
        with pytest.raises(IndexError):
            await text.replace(-1, "")
        assert text.text == "typed"
        assert await chat.say("Hi").text() == "Fine"


async def test_a_refused_round_removes_the_outputs_of_its_tools() -> None:
    def page() -> str:
        return "a very long page"

    script = Script([("page", "{}")], answer=too_long)
    async with chatting(script, tools=[page]) as chat:
        with pytest.raises(errors.ServerError):
            await chat.say("Read it").text()
    message, output = made(script)
    assert message and deleted(script) == [output]


async def test_a_refused_steer_removes_its_message() -> None:
    script = Script(answer=too_long)
    async with chatting(script) as chat:
        with pytest.raises(errors.ServerError):
            await chat.steer("too long").text()
    (steer,) = [event for event in script.got if isinstance(event, client.ResponseSteer)]
    assert deleted(script) == [steer.input[0].id]


async def test_the_refusal_is_raised_although_nothing_can_be_removed() -> None:
    def gone(script: Script, event: ClientEvent) -> Iterable[server.ServerEvent]:
        if isinstance(event, client.ItemDelete):
            yield script.error("item_not_found", event.event_id)
        else:
            yield from too_long(script, event)

    async with chatting(Script(answer=gone)) as chat:
        with pytest.raises(errors.ServerError) as caught:
            await chat.say("too long").text()
        assert caught.value.code == "context_length_exceeded"


# --- the last response that ended ---


async def test_the_last_response_is_the_last_that_ended() -> None:
    script = Script(["Fine"], answer=too_long)
    async with chatting(script) as chat:
        await chat.say("Hi").text()
        for _ in range(2):
            with pytest.raises(errors.ServerError):
                await chat.say("too long").text()
            assert chat.last.text == "Fine"
            assert chat.rounds == []


# --- a turn that is read no more ---


@pytest.mark.parametrize("typed", [False, True])
async def test_a_turn_that_was_cancelled_while_read_gives_way(typed: bool) -> None:
    script = Script(None, ["Next"])
    async with chatting(script) as chat:
        turn = chat.respond() if typed else chat.say("Tell")

        async def read() -> None:
            async for _ in turn:
                pass

        await given_up(read)
        assert await chat.say("More").text() == "Next"
        assert [piece async for piece in turn] == []
    assert script.kinds().count("response.cancel") == 1


async def test_a_turn_given_up_and_taken_up_again_is_being_read() -> None:
    script = Script(None)
    async with chatting(script) as chat:
        turn = chat.say("Tell")
        await given_up(turn.text)
        script.tell(script.delta(script.running[0], 0, "more"))
        assert await anext(turn) == "more"
        with pytest.raises(errors.ChatBusy):
            await chat.say("More").text()


async def test_a_turn_given_up_during_a_tool_begins_no_round_after_the_next_one() -> None:
    async def stuck() -> str:
        await anyio.sleep_forever()
        return ""

    script = Script([("stuck", "{}")], ["Next"])
    async with chatting(script, tools=[stuck]) as chat:
        turn = chat.say("Go")
        await given_up(turn.text)
        assert await chat.say("More").text() == "Next"
        assert await turn.text() == ""
    assert script.kinds().count("response.create") == 2


# --- asked for by hand ---


async def test_a_refusal_after_a_later_response_leaves_nothing_running() -> None:
    """A response does not say what asked for it, and one that is refused late may have been passed."""
    late: list[str | None] = []

    def passed(script: Script, event: ClientEvent) -> Iterable[server.ServerEvent]:
        if isinstance(event, client.ResponseCreate) and not late:
            late.append(event.event_id)
            return
        yield from script.usual(event)
        if isinstance(event, client.ResponseCreate) and len(late) == 1:
            late.append(None)
            yield script.error("invalid_grammar", late[0])

    script = Script(["One"], ["Two"], answer=passed)
    async with chatting(script) as chat:
        for _ in range(2):
            await chat.send(client.ResponseCreate())
        told = list[str]()
        async for event in chat.events():
            told.append(event.type)
            if told[-1] == "error":
                break
        assert "response.done" in told
        with anyio.fail_after(20):
            assert await chat.say("Hi").text() == "Two"


async def test_an_event_with_a_too_long_id_is_not_sent() -> None:
    async with chatting(Script(["Fine"])) as chat:
        with pytest.raises(errors.FieldInvalid):
            await chat.send(client.ResponseCreate(event_id="x" * 600))
        assert await chat.say("Hi").text() == "Fine"
