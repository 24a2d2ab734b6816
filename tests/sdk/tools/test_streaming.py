"""Tools that yield: what is sent while they run, in which order, and what the model reads in the end."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import anyio
import pytest

from holdfast.sdk import (
    CallFinished,
    CallPiece,
    ConnectionLost,
    RunEvent,
    RunLimits,
    ServerError,
    StepFinished,
    ToolContext,
    ToolInvalid,
    tool,
)
from holdfast.sdk.frames import client, items, server
from holdfast.sdk.frames.client import ClientEvent
from holdfast.sdk.tools.context import MAX_OUTPUT_BYTES
from holdfast.sdk.tools.tool import tool_of

from ..agent.test_run import Streaming, called, of
from ..scripted import Script, chatting, given_up

pytestmark = pytest.mark.anyio
Answer = Callable[[Script, ClientEvent], Iterable[server.ServerEvent]]


class Watched:
    """A server that says when so many characters are in the buffer."""

    def __init__(self, inner: Answer = Script.usual) -> None:
        self.inner = inner
        self.held = 0
        self.changed = anyio.Event()

    def __call__(self, script: Script, event: ClientEvent) -> Iterable[server.ServerEvent]:
        match event:
            case client.TextAppend(text=text):
                self.held += len(text)
            case client.TextReplace(start=start, text=text):
                self.held = start + len(text)
            case client.TextClear() | client.TextCommit():
                self.held = 0
        yield from self.inner(script, event)
        self.changed.set()
        self.changed = anyio.Event()

    async def holds(self, count: int) -> None:
        while self.held < count:
            await self.changed.wait()


def read(script: Script) -> list[tuple[str, str]]:
    """The outputs as the model reads them, with their calls: those from the buffer and those sent whole."""
    outputs: list[tuple[str, str]] = []
    text, call_id = "", None
    for event in script.got:
        match event:
            case client.TextAppend():
                assert call_id in (None, event.call_id), "the buffer holds one output at a time"
                text, call_id = text + event.text, event.call_id
            case client.TextReplace(start=start, text=rest):
                text = text[:start] + rest
            case client.TextClear():
                text, call_id = "", None
            case client.TextCommit():
                assert call_id is not None
                outputs.append((call_id, text))
                text, call_id = "", None
            case client.ItemCreate(item=items.FunctionCallOutputItem() as item):
                outputs.append((item.call_id, item.output))
            case client.ResponseCreate():
                assert call_id is None, "nothing is half sent when the model goes on"
                whole = [one for one in event.items if isinstance(one, items.FunctionCallOutputItem)]
                outputs += [(one.call_id, one.output) for one in whole]
    return outputs


def frames(script: Script) -> list[str]:
    """What was sent between two responses, by kind."""
    kinds = [kind.removeprefix("input_text_buffer.") for kind in script.kinds()]
    first = kinds.index("response.create")
    return kinds[first + 1 : kinds.index("response.create", first + 1)]


async def test_what_a_tool_yields_is_sent_while_it_runs() -> None:
    watched = Watched()
    script = Script([("search", '{"query":"fox"}')], ["Found."], answer=watched)

    async def search(query: str) -> AsyncIterator[str]:
        """Look for it."""
        yield f"{query}: "
        await watched.holds(5)
        yield "in the "
        yield "forest"

    async with chatting(script) as chat:
        events = [event async for event in chat.run("Go", [search])]
    assert frames(script) == ["append", "append", "commit"]
    assert read(script) == [("c0", "fox: in the forest")]
    assert [event.text for event in of(CallPiece, events)] == ["fox: ", "in the ", "forest"]
    (finished,) = of(CallFinished, events)
    assert (finished.output, finished.outcome) == ("fox: in the forest", "completed")


async def test_a_streaming_call_starts_without_text_and_may_have_an_empty_output() -> None:
    begun = anyio.Event()

    def answer(script: Script, event: ClientEvent) -> Iterable[server.ServerEvent]:
        if isinstance(event, client.TextAppend):
            begun.set()
        return Script.usual(script, event)

    script = Script([("quiet", "{}")], ["Well."], answer=answer)

    async def quiet() -> AsyncIterator[str]:
        await begun.wait()
        for piece in ("", ""):
            yield piece

    async with chatting(script) as chat:
        await chat.run("Go", [quiet]).done()
    assert frames(script) == ["append", "commit"]
    assert read(script) == [("c0", "")]


async def test_a_sync_generator_runs_in_a_thread_and_streams() -> None:
    watched, where = Watched(), list[bool]()
    script = Script([("count", '{"to":3}')], ["Done."], answer=watched)
    seen = threading.Event()

    def count(to: int, context: ToolContext) -> Iterator[str]:
        where.append(threading.current_thread() is threading.main_thread())
        for number in range(to):
            yield f"{number} "
            if number == 0:
                seen.wait(30)

    async with chatting(script) as chat, anyio.create_task_group() as group:

        async def let_go() -> None:
            await watched.holds(2)
            seen.set()

        group.start_soon(let_go)
        events = [event async for event in chat.run("Go", [count])]
    assert where == [False]
    assert read(script) == [("c0", "0 1 2 ")]
    assert "".join(event.text for event in of(CallPiece, events)) == "0 1 2 "


async def test_a_plain_tool_may_write_and_return_the_rest() -> None:
    watched = Watched()
    script = Script([("build", "{}"), ("note", "{}")], ["Done."], answer=watched)

    async def build(context: ToolContext) -> dict[str, int]:
        context.write("compiling\n")
        await watched.holds(10)
        return {"errors": 0}

    async def note(context: ToolContext) -> None:
        context.write("noted")

    async with chatting(script) as chat:
        await chat.run("Go", [build, note]).done()
    assert "append" in frames(script)
    assert read(script) == [("c0", 'compiling\n{"errors": 0}'), ("c1", "noted")]


async def test_many_pieces_go_in_few_frames() -> None:
    watched = Watched()
    script = Script([("flood", "{}")], ["Done."], answer=watched)

    async def flood() -> AsyncIterator[str]:
        for round_number in range(2):
            for _ in range(500):
                yield "x"
            await watched.holds(500 * (round_number + 1))

    async with chatting(script) as chat:
        await chat.run("Go", [flood]).done()
    assert read(script) == [("c0", "x" * 1000)]
    assert frames(script) == ["append", "append", "commit"]


async def test_what_came_before_the_response_is_over_is_kept_until_then() -> None:
    streaming = Streaming([called("early", "{}")])
    watched = Watched(streaming)
    script = Script(["Done."], answer=watched)
    yielded = anyio.Event()

    async def early() -> AsyncIterator[str]:
        yield "before "
        yielded.set()
        await watched.holds(7)
        yield "and after"

    async with chatting(script) as chat, anyio.create_task_group() as group:

        async def end() -> None:
            await yielded.wait()
            await anyio.wait_all_tasks_blocked()
            assert watched.held == 0
            streaming.end(script)

        group.start_soon(end)
        await chat.run("Go", [early]).done()
    assert read(script) == [("c0", "before and after")]


# --- in the order of the calls ---


def three(watched: Watched, order: str) -> list[Callable[..., Any]]:
    """Tools `a`, `b`, `c`, the capital ones streaming; each answers its name, the last one first."""
    done = {name: anyio.Event() for name in order.lower()}
    names = order.lower()

    async def turn(name: str) -> None:
        at = names.index(name)
        for later in names[at + 1 :]:
            await done[later].wait()

    async def whole(name: str) -> str:
        await turn(name)
        done[name].set()
        return name

    async def pieces(name: str) -> AsyncIterator[str]:
        yield name.upper()
        await turn(name)
        done[name].set()
        yield "!"

    made = [functools.partial(pieces if name.isupper() else whole, name=name.lower()) for name in order]
    return [tool(name=name.lower())(function) for name, function in zip(order, made, strict=True)]


@pytest.mark.parametrize("order", ["Abc", "aBc", "abC", "ABC", "aBC", "AbC"])
@pytest.mark.parametrize("_again", range(2))
async def test_outputs_are_sent_in_the_order_of_the_calls(order: str, _again: int) -> None:
    watched = Watched()
    script = Script([(name, "{}") for name in order.lower()], ["Done."], answer=watched)
    async with chatting(script) as chat:
        await chat.run("Go", three(watched, order)).done()
    wanted = [f"{name}!" if name.isupper() else name for name in order]
    assert [output for _, output in read(script)] == wanted


async def test_one_that_streams_waits_for_those_before_it_and_goes_on_then() -> None:
    watched = Watched()
    script = Script([("slow", "{}"), ("talks", "{}"), ("last", "{}")], ["Done."], answer=watched)
    talked = anyio.Event()

    async def slow() -> str:
        await talked.wait()
        return "slow"

    async def talks() -> AsyncIterator[str]:
        yield "one "
        talked.set()
        await watched.holds(4)
        yield "two"

    async def last() -> str:
        return "last"

    async with chatting(script) as chat:
        await chat.run("Go", [slow, talks, last]).done()
    assert frames(script) == ["conversation.item.create", "append", "append", "commit"]
    assert read(script) == [("c0", "slow"), ("c1", "one two"), ("c2", "last")]


# --- what goes wrong ---


def told(output: str) -> tuple[str, str]:
    """What was written before, and the error."""
    written, _, error = output.rpartition("\n")
    return written, json.loads(error)["error"]


@pytest.mark.parametrize("how", ["raises", "hangs", "yields a number"])
async def test_what_was_written_stays_and_behind_it_what_went_wrong(how: str) -> None:
    watched = Watched()
    script = Script([("breaks", "{}")], ["Sorry."], answer=watched)

    async def breaks() -> AsyncIterator[Any]:
        yield "half of "
        yield "it"
        await watched.holds(10)
        if how == "raises":
            raise RuntimeError("out of order")
        if how == "yields a number":
            yield 7
        await anyio.sleep_forever()

    async with chatting(script) as chat:
        timeout = 0.2 if how == "hangs" else 30
        events = [event async for event in chat.run("Go", [tool(timeout=timeout)(breaks)])]
    ((_, output),) = read(script)
    (finished,) = of(CallFinished, events)
    assert finished.output == output
    assert finished.outcome == ("timed_out" if how == "hangs" else "failed")
    written, error = told(output)
    assert written == "half of it"
    assert {"raises": "out of order", "hangs": "0.2 seconds", "yields a number": "not text"}[how] in error


async def test_an_endless_output_is_refused_as_a_whole() -> None:
    watched = Watched()
    script = Script([("yes", "{}")], ["Sorry."], answer=watched)

    def yes() -> Iterator[str]:
        while True:
            yield "y\n" * 1000

    async with chatting(script) as chat:
        await chat.run("Go", [yes]).done()
    ((_, output),) = read(script)
    assert "bytes" in json.loads(output)["error"] and len(output) < 200


async def test_an_output_that_was_sent_before_it_was_too_long_gives_way() -> None:
    watched = Watched()
    script = Script([("long", "{}")], ["Sorry."], answer=watched)

    async def long() -> AsyncIterator[str]:
        yield "first"
        await watched.holds(5)
        yield "x" * MAX_OUTPUT_BYTES

    async with chatting(script) as chat:
        await chat.run("Go", [long]).done()
    assert frames(script) == ["append", "replace", "commit"]
    ((_, output),) = read(script)
    assert "bytes" in json.loads(output)["error"]


async def endless(watched: Watched) -> AsyncIterator[str]:
    yield "begun"
    await anyio.sleep_forever()
    yield "never"


def hanging(watched: Watched) -> Any:
    return tool(name="endless")(functools.partial(endless, watched=watched))


async def test_a_limit_in_seconds_ends_a_stream_with_what_it_had() -> None:
    watched = Watched()
    script = Script([("endless", "{}")], ["Never."], answer=watched)
    async with chatting(script) as chat:
        done = await chat.run("Go", [hanging(watched)], limits=RunLimits(seconds=0.2)).done()
    assert done.stop == "seconds"
    ((_, output),) = read(script)
    assert told(output) == ("begun", "The call was cancelled")


@pytest.mark.parametrize("how", ["break", "cancelled"])
async def test_a_run_left_while_it_streams_has_an_output_for_each_call(how: str) -> None:
    watched = Watched()
    script = Script([("endless", "{}"), ("endless", "{}")], ["Again."], answer=watched)
    async with chatting(script) as chat:

        async def leave() -> None:
            async for event in chat.run("Go", [hanging(watched)]):
                if how == "break" and isinstance(event, StepFinished):
                    await watched.holds(5)
                    break

        await given_up(leave)
        assert await chat.say("And now?").text() == "Again."
    assert [(call_id, *told(output)) for call_id, output in read(script)] == [
        ("c0", "begun", "The call was cancelled"),
        ("c1", "begun", "The call was cancelled"),
    ]


async def test_closing_a_chat_takes_back_an_output_that_is_partly_sent() -> None:
    watched = Watched()
    script = Script([("endless", "{}")], answer=watched)
    async with chatting(script) as chat:
        async for event in chat.run("Go", [hanging(watched)]):
            if isinstance(event, StepFinished):
                await watched.holds(5)
                break
    assert script.kinds()[-1] == "input_text_buffer.clear"
    assert read(script) == []


async def test_reading_a_run_raises_when_another_task_closes_its_chat() -> None:
    watched = Watched()
    async with chatting(Script([("endless", "{}")], answer=watched)) as chat:
        reading = asyncio.ensure_future(chat.run("Go", [hanging(watched)]).done())
        await watched.holds(5)
        await chat.aclose()
        with pytest.raises(ConnectionLost, match="closed"):
            await reading


async def test_a_run_raises_where_the_server_refuses_a_streamed_output() -> None:
    def answer(script: Script, event: ClientEvent) -> Iterable[server.ServerEvent]:
        if isinstance(event, client.TextCommit):
            yield script.error("invalid_tool_call_id", event.event_id)
        else:
            yield from watched(script, event)

    watched = Watched()
    script = Script([("talks", "{}")], ["What?"], ["Again."], answer=answer)

    async def talks() -> AsyncIterator[str]:
        yield "one"
        await watched.holds(3)

    async with chatting(script) as chat:
        with pytest.raises(ServerError) as refused:
            await chat.run("Go", [talks]).done()
        assert refused.value.code == "invalid_tool_call_id"
        assert await chat.say("And now?").text() == "Again."


# --- elsewhere ---


async def test_a_turn_runs_a_tool_that_yields_to_its_end() -> None:
    def parts(of_what: str) -> Iterator[str]:
        yield from (of_what, " in ", "parts")

    script = Script([("parts", '{"of_what":"cake"}')], ["Well."])
    async with chatting(script, tools=[parts]) as chat:
        assert await chat.say("Go").text() == "Well."
    assert script.outputs() == ["cake in parts"]
    outcome = await tool_of(parts).call('{"of_what": 7}')
    assert outcome.kind == "invalid_arguments"


class Talks:
    def __call__(self, word: str) -> Iterator[str]:
        yield word
        yield "."


async def decorated(word: str) -> AsyncIterator[str]:
    yield word
    yield "."


@functools.wraps(decorated)
def wrapped(*words: Any, **named: Any) -> AsyncIterator[str]:
    return decorated(*words, **named)


@pytest.mark.parametrize("function", [Talks(), decorated, wrapped, functools.partial(decorated)])
async def test_any_generator_is_a_tool(function: Callable[..., Any]) -> None:
    made = tool_of(function)
    assert (await made.call('{"word": "yes"}')).output == "yes."
    assert list(made.definition.parameters["properties"]) == ["word"]  # type: ignore[index]


def test_pieces_that_are_no_text_are_refused_when_decorated() -> None:
    async def numbers() -> AsyncIterator[int]:
        yield 1

    with pytest.raises(ToolInvalid, match="yields `int`"):
        tool_of(numbers)


async def test_a_thread_that_was_left_behind_writes_no_more() -> None:
    going_on, ended = threading.Event(), threading.Event()

    def slow() -> Iterator[str]:
        try:
            yield "one"
            going_on.wait(30)
            yield "two"
            yield "three"
        finally:
            ended.set()

    outcome = await tool(timeout=0.05)(slow).call("{}")
    assert told(outcome.output)[0] == "one" and outcome.kind == "timed_out"
    going_on.set()
    assert await anyio.to_thread.run_sync(ended.wait, 30), "it ends at its next piece"


# --- by hand ---


def answering(script: Script, event: ClientEvent) -> Iterable[server.ServerEvent]:
    match event:
        case client.TextCommit(call_id=call_id):
            call = {} if call_id is None else {"call_id": call_id}
            yield server.TextCommitted(
                event_id=script.id(), item_id="t", prefilled_tokens=3, left_tokens=1, **call
            )
        case client.TextClear():
            yield server.TextCleared(event_id=script.id())
        case _:
            yield from script.usual(event)


async def test_the_caller_can_stream_the_output_of_a_call() -> None:
    script = Script([("lookup", '{"q":1}')], ["Found."], answer=answering)
    async with chatting(script) as chat:
        assert (await chat.run("Go", [{"name": "lookup"}]).done()).stop == "caller"
        async with chat.output(chat.last.calls[0]) as out:
            await out.append("here ")
            await out.append("and there")
            await out.replace(5, "it is")
        assert out.committed is not None and out.committed.prefilled_tokens == 3
        assert await chat.run().text() == "Found."
    assert read(script) == [("c0", "here it is")]
    assert next(event.text for event in script.got if isinstance(event, client.TextAppend)) == ""


async def test_an_output_by_hand_can_be_empty_or_cleared() -> None:
    script = Script([("lookup", "{}")], answer=answering)
    async with chatting(script) as chat:
        await chat.run("Go", [{"name": "lookup"}]).done()
        with pytest.raises(KeyError):
            await broken_off(chat)
        async with chat.output(chat.last.calls[0]):
            pass
    assert read(script) == [("c0", "")]


async def broken_off(chat: Any) -> None:
    async with chat.output(chat.last.calls[0]) as out:
        await out.append("half")
        raise KeyError


async def test_events_stay_in_order_beside_those_of_other_calls() -> None:
    watched = Watched()
    script = Script([("talks", "{}")], ["Done."], answer=watched)

    async def talks(context: ToolContext) -> AsyncIterator[str]:
        yield "one"
        context.progress("half", 0.5)
        await watched.holds(3)
        yield "two"

    traced: list[RunEvent] = []
    async with chatting(script) as chat:
        events = [event async for event in chat.run("Go", [talks], trace=[traced.append])]
    assert traced == events
    assert [type(event).__name__ for event in events] == [
        "CallStarted", "StepFinished", "CallPiece", "CallProgress", "CallPiece", "CallFinished",
        "WaitFinished", "TextPiece", "StepFinished", "RunDone",
    ]  # fmt: skip


# --- beside a message that is typed ---


async def test_a_streaming_tool_gives_way_to_typed_text_and_sends_its_output_whole() -> None:
    watched = Watched(answering)
    script = Script([("talks", "{}")], ["Done."], ["Yes?"], answer=watched)
    typed = anyio.Event()

    async def talks() -> AsyncIterator[str]:
        yield "one "
        await typed.wait()
        yield "two"

    async with chatting(script) as chat:
        async for event in chat.run("Go", [talks]):
            if isinstance(event, StepFinished) and not typed.is_set():
                await watched.holds(4)
                text = chat.input()
                await text.append("Wait")
                await text.append("!")
                typed.set()
        assert (await text.commit()).item_id == "t"
    kinds = [kind.removeprefix("input_text_buffer.") for kind in script.kinds()]
    assert kinds[kinds.index("response.create") + 1 :] == [
        "append", "clear", "append", "append", "response.create", "commit"
    ]  # fmt: skip
    assert script.outputs() == ["one two"]


async def test_a_tool_does_not_stream_into_what_a_user_has_begun_to_type() -> None:
    typed = anyio.Event()
    script = Script([("talks", "{}")], ["Done."], answer=Watched(answering))

    async def talks() -> AsyncIterator[str]:
        yield "one "
        await typed.wait()
        await anyio.wait_all_tasks_blocked()
        yield "two"

    async with chatting(script) as chat:
        text = chat.input()
        await text.append("Wait")
        async for event in chat.run("Go", [talks]):
            if isinstance(event, CallPiece):
                typed.set()
        await text.commit()
    assert script.outputs() == ["one two"]
    calls = [
        event.call_id for event in script.got if isinstance(event, client.TextAppend | client.TextCommit)
    ]
    assert calls == [None, None]
