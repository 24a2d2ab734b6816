"""The chat against a scripted server: turns, tools, cancels, and what goes wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

import anyio
import pytest

from holdfast.sdk import ServerError, errors
from holdfast.sdk.frames import client, items, server
from holdfast.sdk.frames.client import ClientEvent, ItemCreate, ItemTruncate, ResponseCancel
from holdfast.sdk.frames.server import ItemTruncated
from holdfast.sdk.params import TOGETHER

from .scripted import Script, add, chatting, failed, given_up, response, weather

pytestmark = pytest.mark.anyio


async def test_text_comes_in_pieces() -> None:
    script = Script(["Hel|lo"], ["Again"])
    async with chatting(script, instructions="Be kind.", temperature=0.5) as chat:
        assert (chat.session.instructions, chat.session.temperature) == ("Be kind.", 0.5)
        pieces = [piece async for piece in chat.say("Hi")]
        assert pieces == ["Hel", "lo"]
        assert chat.last.text == "Hello"
        assert chat.last.status == "completed"
        assert chat.last.ttft_ms is not None
        assert 0 <= chat.last.ttft_ms <= chat.last.total_ms
        assert await chat.say("More").text() == "Again"
    assert script.kinds() == ["session.update", "response.create", "response.create"]
    assert script.closed


async def test_where_blocks_lie_may_be_asked_while_a_turn_is_read() -> None:
    script = Script(["Hel|lo"])
    async with chatting(script) as chat:
        pieces = []
        async for piece in chat.say("Hi"):
            pieces.append(piece)
            assert (await chat.blocks()).runs == [server.BlockRun(tier="device", shared=False, count=2)]
        assert pieces == ["Hel", "lo"]
    assert script.kinds() == ["response.create", "session.blocks", "session.blocks"]


async def test_nothing_is_sent_before_the_first_piece_is_wanted() -> None:
    script = Script(["Hi"])
    async with chatting(script) as chat:
        turn = chat.say("Hello")
        assert script.kinds() == []
        assert await turn.text() == "Hi"


async def test_before_the_first_response_there_is_no_last_one() -> None:
    async with chatting(Script()) as chat:
        with pytest.raises(LookupError):
            _ = chat.last


async def test_tools_are_run_and_the_reply_goes_on() -> None:
    script = Script(
        ["Let me look. ", ("weather", '{"city":"Rome"}'), ("add", '{"a":1,"b":2}')],
        [("weather", '{"city":7}')],
        ["Rain, and 3."],
    )
    async with chatting(script, tools=[weather, add]) as chat:
        assert await chat.say("Well?").text() == "Let me look. Rain, and 3."
        assert [len(finished.calls) for finished in chat.rounds] == [2, 1, 0]
    assert [tool.name for tool in script.session.tools] == ["weather", "add"]
    rain, three, wrong = script.outputs()
    assert (rain, three) == ("Rain in Rome", "3")
    assert "city" in wrong and "Error" not in wrong
    assert script.kinds()[2:] == ["response.create"] * 2
    assert [len(event.items) for event in script.got[1:] if isinstance(event, client.ResponseCreate)] == [
        1,
        2,
        1,
    ]


async def test_the_model_reads_what_a_tool_raises() -> None:
    def broken() -> None:
        raise RuntimeError("out of order")

    script = Script([("broken", "{}")], ["Sorry."])
    async with chatting(script, tools=[broken]) as chat:
        assert await chat.say("Go").text() == "Sorry."
    assert script.outputs() == ['{"error": "out of order"}']


async def test_a_call_of_an_unknown_tool_gets_an_error() -> None:
    script = Script([("forecast", "{}"), ("add", '{"a":1,"b":2}')], ["3, then."])
    async with chatting(script, tools=[weather, add]) as chat:
        assert await chat.say("Go").text() == "3, then."
    made_up, three = script.outputs()
    assert made_up == '{"error": "There is no tool `forecast`. There are: `weather`, `add`"}'
    assert three == "3"


async def test_a_tool_offered_for_one_turn_is_the_callers() -> None:
    script = Script([("forecast", "{}")])
    offered = [{"type": "function", "name": "forecast"}]
    async with chatting(script, tools=[add]) as chat:
        assert await chat.say("Go", tools=offered).text() == ""
        assert [call.name for call in chat.last.calls] == ["forecast"]
    assert script.outputs() == []


async def test_rounds_of_tools_have_a_limit() -> None:
    script = Script(*[[("add", '{"a":1,"b":1}')]] * 4)
    async with chatting(script, tools=[add], max_tool_rounds=2) as chat:
        with pytest.raises(errors.ToolRoundsExceeded):
            await chat.say("Go").text()
        assert len(chat.rounds) == 3
    assert len(script.outputs()) == 2


async def test_calls_of_dict_tools_are_the_callers() -> None:
    script = Script(["Hm. ", ("lookup", '{"q":1}')], ["Found."])
    async with chatting(script, tools=[{"name": "lookup", "parameters": {"type": "object"}}]) as chat:
        assert await chat.say("Go").text() == "Hm. "
        (call,) = chat.last.calls
        assert (call.name, call.arguments) == ("lookup", '{"q":1}')
        await chat.answer(call, "here")
        assert await chat.say().text() == "Found."
    assert script.outputs() == ["here"]


async def test_calls_of_both_kinds_wait_for_the_caller() -> None:
    script = Script([("add", '{"a":1,"b":2}'), ("lookup", "{}")])
    async with chatting(script, tools=[add, {"name": "lookup"}]) as chat:
        assert await chat.say("Go").text() == ""
    assert script.outputs() == ["3"]
    assert script.kinds().count("response.create") == 1


async def test_a_response_as_typed_events() -> None:
    script = Script(["Hel|lo"])
    async with chatting(script) as chat:
        await chat.add(items.MessageItem.of("user", "Hi"))
        events = [event.type async for event in chat.respond(max_output_tokens=5)]
        assert events == [
            "response.created",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.done",
        ]
        assert chat.last.text == "Hello"
    (asked,) = [event for event in script.got if isinstance(event, client.ResponseCreate)]
    assert asked.response is not None
    assert asked.response.max_output_tokens == 5


async def test_cancel_ends_the_turn_and_keeps_what_was_said() -> None:
    script = Script(None, ["Next"])
    async with chatting(script) as chat:
        pieces = []
        async for piece in chat.say("Tell"):
            pieces.append(piece)
            if piece == "Once ":
                await chat.cancel()
        assert pieces == ["Once ", "upon"]
        assert chat.last.status == "cancelled"
        await chat.cancel()
        assert await chat.say("More").text() == "Next"
    assert script.kinds().count("response.cancel") == 1


async def test_a_cancel_that_comes_too_late_is_no_error() -> None:
    script = Script(["Hi"], ["Next"])
    async with chatting(script) as chat:
        turn = chat.say("Hello")
        await anext(turn)
        await chat.cancel()
        assert await turn.text() == ""
        assert await chat.say("More").text() == "Next"
    assert script.kinds().count("response.cancel") == 1


async def test_a_turn_left_unread_is_cut_by_the_next() -> None:
    script = Script(None, ["Next"])
    async with chatting(script) as chat:
        async for _ in chat.say("Tell"):
            break
        assert await chat.say("More").text() == "Next"
    assert script.kinds().count("response.cancel") == 1


async def test_a_turn_behind_a_cancel_is_asked_for_before_that_is_acknowledged() -> None:
    def late(script: Script, event: ClientEvent) -> Iterable[server.ServerEvent]:
        if isinstance(event, client.ResponseCancel):
            return
        if isinstance(event, client.ResponseCreate) and script.running:
            yield from script.usual(client.ResponseCancel())
        yield from script.usual(event)

    script = Script(None, ["Next"], answer=late)
    async with chatting(script) as chat:
        async for _ in chat.say("Tell"):
            break
        await chat.cancel()
        assert await chat.say("More").text() == "Next"
        assert chat.last.status == "completed"
    assert script.kinds()[-2:] == ["response.cancel", "response.create"]


async def test_leaving_cuts_the_turn_that_is_not_read() -> None:
    script = Script(None)
    async with chatting(script) as chat:
        async for _ in chat.say("Tell"):
            break
    assert script.kinds()[-1] == "response.cancel" and not script.running and script.closed


async def test_leaving_cuts_the_turn_that_was_cancelled_while_read() -> None:
    script = Script(None)
    async with chatting(script) as chat:
        turn = chat.say("Tell")
        await given_up(turn.text)
    assert script.kinds()[-1] == "response.cancel" and not script.running and script.closed


async def test_leaving_does_not_cut_a_turn_that_a_variable_holds() -> None:
    script = Script(None)
    async with chatting(script) as chat:
        turn = chat.say("Tell")
        await anext(turn)
    assert turn.running and script.running and script.closed


async def test_a_turn_being_read_is_not_cut() -> None:
    script = Script(None, ["Next"])
    async with chatting(script) as chat:
        turn = chat.say("Tell")
        await anext(turn)
        for attempt in (chat.say("More").text(), chat.retrieve("i"), chat.update(instructions="x")):
            with pytest.raises(errors.ChatBusy):
                await attempt
        await chat.cancel()
        assert await chat.say("More").text() == "Next"
        assert await turn.text() == ""


async def test_a_second_reader_of_a_chat_is_refused() -> None:
    script = Script(None)
    async with chatting(script) as chat:
        turn = chat.say("Tell")
        await anext(turn)
        async with anyio.create_task_group() as group:
            group.start_soon(turn.text)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(errors.ChatBusy):
                await anext(chat.events())
            await chat.cancel()


async def test_an_abandoned_wait_loses_nothing() -> None:
    script = Script(None, ["Next"])
    async with chatting(script) as chat:
        turn = chat.say("Tell")
        await anext(turn)
        with anyio.move_on_after(0):
            await anext(turn)
        script.tell(script.delta(script.running[0], 0, "more"))
        await chat.cancel()
        assert await turn.text() == "moreupon"


async def test_a_refused_response_is_a_server_error() -> None:
    def busy(script: Script, event: ClientEvent) -> Iterable[server.ServerEvent]:
        if isinstance(event, client.ResponseCreate) and script.turns:
            yield from script.usual(event)
        elif isinstance(event, client.ResponseCreate):
            yield script.error("context_length_exceeded", event.event_id)
        else:
            yield from script.usual(event)

    script = Script(answer=busy)
    async with chatting(script) as chat:
        with pytest.raises(errors.ServerError) as caught:
            await chat.say("Hi").text()
        assert caught.value.code == "context_length_exceeded"
        script.turns.append(["Fine"])
        assert await chat.say("Hi").text() == "Fine"
    assert "response.cancel" not in script.kinds()


async def test_a_refused_message_ends_the_response_asked_for_with_it() -> None:
    def refuse(script: Script, event: ClientEvent) -> Iterable[server.ServerEvent]:
        if isinstance(event, ItemCreate):
            yield script.error("invalid_value", event.event_id)
        else:
            yield from script.usual(event)

    script = Script(None, ["Fine"], answer=refuse)
    async with chatting(script) as chat:
        with pytest.raises(errors.ServerError) as caught:
            await chat.say("Hi" * TOGETHER).text()  # too long to come in one frame with what it asks
        assert caught.value.code == "invalid_value"
        assert script.kinds()[-1] == "response.cancel"
        assert await chat.say().text() == "Fine"


async def test_a_failed_response_raises_with_the_servers_code() -> None:
    def fail(script: Script, event: ClientEvent) -> Iterable[server.ServerEvent]:
        if isinstance(event, client.ResponseCreate):
            yield server.ResponseCreated(event_id=script.id(), response=response("r", "in_progress"))
            yield server.ResponseDone(event_id=script.id(), response=failed("r"))
        else:
            yield from script.usual(event)

    async with chatting(Script(answer=fail)) as chat:
        with pytest.raises(errors.ResponseFailed) as caught:
            await chat.say("Hi").text()
        assert caught.value.code == "engine_unavailable"
        assert chat.last.status == "failed"


async def test_a_lost_connection_raises_with_its_close_code() -> None:
    script = Script(None)
    async with chatting(script) as chat:
        turn = chat.say("Hi")
        await anext(turn)
        script.hang_up()
        with pytest.raises(errors.ConnectionLost) as caught:
            await anext(turn)
        assert caught.value.close_code == 1011


async def test_an_invalid_server_event_raises() -> None:
    script = Script(["Hi"])
    script.tell_raw(b'{"type":"response.created"}')
    async with chatting(script) as chat:
        with pytest.raises(errors.ProtocolBroken):
            await chat.say("Hi").text()


async def test_items_are_added_retrieved_and_deleted() -> None:
    script = Script()
    async with chatting(script) as chat:
        added = await chat.add(items.MessageItem.of("system", "Note"), previous_item_id="root")
        assert added.id is not None
        assert (await chat.retrieve("i1")).id == "i1"
        await chat.delete("i1")
        sent = await chat.send(client.ItemDelete(item_id="i2"))
        told = [event async for event in first(chat.events(), 1)]
        assert sent
        assert isinstance(told[0], server.ItemDeleted)


async def first(events: AsyncIterator[server.ServerEvent], count: int) -> AsyncIterator[server.ServerEvent]:
    async for event in events:
        yield event
        count -= 1
        if not count:
            return


async def test_fields_are_checked_before_they_are_sent() -> None:
    script = Script()
    async with chatting(script) as chat:
        for attempt in (
            lambda: chat.respond(temperature=3),
            lambda: chat.say("Hi", max_output_tokens=0),
            lambda: chat.say("Hi", colour="red"),
        ):
            with pytest.raises(errors.FrameError):
                attempt()
        with pytest.raises(errors.FrameError):
            await chat.update(model=7)
    assert script.kinds() == []


def cutting(script: Script, event: client.ClientEvent) -> Iterable[server.ServerEvent]:
    """As usual, and messages are cut at `text_end`."""
    if isinstance(event, ItemTruncate):
        yield ItemTruncated(
            event_id=script.id(), item_id=event.item_id, content_index=0, text_end=event.text_end or 0
        )
    else:
        yield from script.usual(event)


@pytest.mark.parametrize("heard", [None, 3, "Once "])
async def test_a_reply_that_was_left_by_break_is_the_one_to_interrupt(heard: int | str | None) -> None:
    script = Script(["The first reply"], None, answer=cutting)
    async with chatting(script) as chat:
        await chat.say("Hi").text()
        async for _ in chat.say("Tell me a story"):
            break
        kept = await chat.interrupt(heard=heard)
        assert kept == "Once upon"[: len(kept)] and len(kept) == (heard if isinstance(heard, int) else 5)
        (cut,) = [event for event in script.got if isinstance(event, ItemTruncate)]
        assert (cut.item_id, cut.text_end) == ("i0", len(kept))
        script.running.clear()  # the server stops what is cut
        assert await chat.interrupt(heard=2) == "On", "still the same reply"


async def test_a_reply_that_was_left_is_cut_once_enough_text_has_come() -> None:
    script = Script(["The first reply"], None, answer=cutting)
    async with chatting(script) as chat:
        await chat.say("Hi").text()
        async for _ in chat.say("Tell me a story"):
            break
        script.tell(script.delta(script.running[-1], 0, "upon a time"))
        assert await chat.interrupt(heard=9) == "Once upon"
        assert [event.text_end for event in script.got if isinstance(event, ItemTruncate)] == [9]


async def test_a_reply_that_was_left_cannot_be_cut_beyond_its_text() -> None:
    script = Script(["The first reply"], None, answer=cutting)
    async with chatting(script) as chat:
        await chat.say("Hi").text()
        async for _ in chat.say("Tell me a story"):
            break
        await chat._connection.cut()
        with pytest.raises(ValueError, match="9 characters"):
            await chat.interrupt(heard=12)
        assert not any(isinstance(event, ItemTruncate) for event in script.got)


@pytest.mark.parametrize("left", [False, True], ids=["being read", "left"])
async def test_a_text_that_was_not_said_is_refused_at_once_and_changes_nothing(left: bool) -> None:
    """The reply still runs, and says no more."""
    script = Script(["The first reply"], None, answer=cutting)
    async with chatting(script) as chat:
        await chat.say("Hi").text()
        turn = chat.say("Tell me a story")
        await anext(turn)
        if left:
            del turn
        with pytest.raises(ValueError, match="does not begin"):
            await chat.interrupt(heard="Twice upon a time there was a fox")
        assert not any(isinstance(event, ItemTruncate | ResponseCancel) for event in script.got)
        assert await chat.interrupt(heard="On") == "On"


async def test_a_refused_turn_leaves_the_reply_before_it_to_interrupt() -> None:
    def answer(script: Script, event: client.ClientEvent) -> Iterable[server.ServerEvent]:
        if isinstance(event, client.ResponseCreate) and not script.turns:
            yield script.error("conversation_busy", event.event_id)
        else:
            yield from cutting(script, event)

    script = Script(["The first reply"], answer=answer)
    async with chatting(script) as chat:
        await chat.say("Hi").text()
        with pytest.raises(ServerError):
            await chat.say("More").text()
        assert await chat.interrupt(heard=9) == "The first"
