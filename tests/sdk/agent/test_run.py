"""The agent loop against a scripted server: what it tells and sends, where it ends, what goes wrong."""

from __future__ import annotations

import csv
import logging
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from holdfast.sdk import (
    CallFinished,
    CallProgress,
    CallStarted,
    LimitInvalid,
    ResponseFailed,
    RunDone,
    RunEvent,
    RunLimits,
    StepFinished,
    TextPiece,
    ToolContext,
    TraceFile,
    WaitFinished,
    tool,
)
from holdfast.sdk.frames import client, items, server
from holdfast.sdk.frames.client import ClientEvent
from holdfast.sdk.frames.response import CachedTokensDetails as Cached
from holdfast.sdk.frames.response import InputTokenDetails, OutputTokenDetails, StatusDetails, Usage

from ..scripted import Script, add, chatting, failed, given_up, response, weather

pytestmark = pytest.mark.anyio


def of(kind: type[Any], events: Iterable[RunEvent]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


async def hang() -> str:
    """Never answers."""
    await anyio.sleep_forever()
    return ""


def called(
    name: str, arguments: str, call_id: str = "c0", status: Any = "completed"
) -> items.FunctionCallItem:
    return items.FunctionCallItem(
        id=f"i_{call_id}", status=status, name=name, call_id=call_id, arguments=arguments
    )


class Streaming:
    """Answers `response.create` up to its call, and the rest later, on demand."""

    def __init__(self, *turns: list[items.AnyItem]) -> None:
        self.turns = list(turns)
        self.held: tuple[str, list[items.AnyItem]] | None = None

    def __call__(self, script: Script, event: ClientEvent) -> Iterable[server.ServerEvent]:
        if not isinstance(event, client.ResponseCreate) or not self.turns:
            yield from Script.usual(script, event)
            return
        response_id, output = script.id(), self.turns.pop(0)
        yield server.ResponseCreated(event_id=script.id(), response=response(response_id, "in_progress"))
        for index, item in enumerate(output):
            yield server.OutputItemDone(
                event_id=script.id(), response_id=response_id, output_index=index, item=item
            )
        self.held = (response_id, output)

    def end(self, script: Script, status: Any = "completed") -> None:
        assert self.held is not None
        response_id, output = self.held
        ended = msgspec.structs.replace(response(response_id, status), output=output)
        script.tell(server.ResponseDone(event_id=script.id(), response=ended))


async def test_the_events_of_a_run_come_in_order() -> None:
    script = Script(["Let me look. ", ("weather", '{"city":"Rome"}')], ["Rain|, then."])
    async with chatting(script) as chat:
        events = [event async for event in chat.run("Well?", [weather])]
        assert [type(event) for event in events] == [
            TextPiece, CallStarted, StepFinished, CallFinished, WaitFinished,
            TextPiece, TextPiece, StepFinished, RunDone,
        ]  # fmt: skip
        (finished,) = of(CallFinished, events)
        assert (finished.name, finished.output, finished.outcome) == ("weather", "Rain in Rome", "completed")
        done = events[-1]
        assert isinstance(done, RunDone)
        assert (done.text, done.stop, done.calls) == ("Let me look. Rain, then.", "completed", 1)
        assert len(done.rounds) == len(chat.rounds) == 2
    assert script.kinds() == [
        "session.update",
        *["response.create"] * 2,  # with the message, and with what the tool answered
    ]
    assert [len(event.items) for event in script.got if isinstance(event, client.ResponseCreate)] == [1, 1]
    assert [tool.name for tool in script.session.tools] == ["weather"]


async def test_the_session_s_tools_are_not_sent_again() -> None:
    script = Script([("add", '{"a":1,"b":2}')], ["3."], ["Yes."])
    async with chatting(script, tools=[add]) as chat:
        assert await chat.run("Sum?").text() == "3."
        assert await chat.run("Sure?", [add]).text() == "Yes."
    assert script.kinds().count("session.update") == 1
    assert script.outputs() == ["3"]


async def test_a_call_is_run_while_the_reply_goes_on() -> None:
    streaming = Streaming([called("probe", "{}")])
    script = Script(["Done."], answer=streaming)
    ran = anyio.Event()

    async def probe() -> str:
        ran.set()
        return "seen"

    async with chatting(script) as chat, anyio.create_task_group() as group:

        async def end_when_it_ran() -> None:
            await ran.wait()
            streaming.end(script)

        group.start_soon(end_when_it_ran)
        assert await chat.run("Go", [probe]).text() == "Done."
    assert script.outputs() == ["seen"]


async def test_calls_run_side_by_side_and_are_answered_in_their_order() -> None:
    second_ran = anyio.Event()

    async def first() -> str:
        await second_ran.wait()
        return "one"

    async def second() -> str:
        second_ran.set()
        return "two"

    script = Script([("first", "{}"), ("second", "{}")], ["Both."])
    async with chatting(script) as chat:
        events = [event async for event in chat.run("Go", [first, second])]
    assert [event.name for event in of(CallFinished, events)] == ["second", "first"]
    assert script.outputs() == ["one", "two"]


async def test_the_model_reads_any_error_of_a_call() -> None:
    def broken() -> None:
        raise RuntimeError("out of order")

    turns = [
        called("broken", "{}", "c1"),
        called("hangs", "{}", "c2"),
        called("unknown", "{}", "c3"),
        called("add", '{"a": 1, "b": "x"}', "c4"),
        called("add", '{"a": 1, ', "c5", "incomplete"),
        called("add", '{"a": 1, "b": 2}', "c6"),
    ]
    streaming = Streaming(list(turns))
    script = Script(["Sorry."], answer=streaming)
    async with chatting(script) as chat:
        run = chat.run("Go", [broken, add, tool(timeout=0.01, name="hangs")(hang)])
        events: list[RunEvent] = []
        async for event in run:
            events.append(event)
            if isinstance(event, CallStarted) and event.call_id == "c6":
                streaming.end(script)
    found = {event.call_id: event.outcome for event in of(CallFinished, events)}
    assert found == {
        "c1": "failed", "c2": "timed_out", "c3": "unknown_tool",
        "c4": "invalid_arguments", "c5": "invalid_arguments", "c6": "completed",
    }  # fmt: skip
    read = {event.call_id: event.output for event in of(CallFinished, events)}
    assert "out of order" in read["c1"]
    assert "0.01 seconds" in read["c2"]
    assert "`unknown`" in read["c3"] and "`add`" in read["c3"]
    assert "$.b" in read["c4"]
    assert "JSON" in read["c5"]
    assert len(script.outputs()) == 6
    assert run.running is False


async def test_a_sync_tool_reports_progress_from_its_thread() -> None:
    where: list[bool] = []

    def slow(context: ToolContext, steps: int = 2) -> str:
        where.append(threading.current_thread() is threading.main_thread())
        for step in range(steps):
            context.progress(f"step {step}", step / steps)
        return context.call_id

    script = Script([("slow", "{}")], ["Done."])
    async with chatting(script) as chat:
        events = [event async for event in chat.run("Go", [slow])]
    assert where == [False]
    assert [(event.note, event.fraction) for event in of(CallProgress, events)] == [
        ("step 0", 0),
        ("step 1", 0.5),
    ]
    assert script.outputs() == ["c0"]
    assert "context" not in script.session.tools[0].parameters["properties"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("limits", "stop", "responses", "answers"),
    [
        (RunLimits(steps=2), "steps", 2, ["2", "not run"]),
        (RunLimits(calls=1), "calls", 2, ["2", "not run"]),
        (RunLimits(calls=0), "calls", 1, ["not run"]),
    ],
)
async def test_limits_end_a_run_with_every_call_answered(
    limits: RunLimits, stop: str, responses: int, answers: list[str]
) -> None:
    script = Script(*[[("add", '{"a":1,"b":1}')]] * 4)
    async with chatting(script) as chat:
        done = await chat.run("Go", [add], limits=limits).done()
    assert (done.stop, len(done.rounds)) == (stop, responses)
    told = script.outputs()
    assert len(told) == len(answers)
    assert all(part in output for part, output in zip(answers, told, strict=True))


async def test_a_limit_in_seconds_cuts_a_tool_short() -> None:
    script = Script([("hang", "{}")], ["Never."])
    async with chatting(script) as chat:
        done = await chat.run("Go", [hang], limits=RunLimits(seconds=0.05)).done()
    assert done.stop == "seconds"
    assert "cancelled" in script.outputs()[0]
    assert script.kinds().count("response.create") == 1


async def test_a_limit_in_seconds_cuts_a_reply_short() -> None:
    script = Script(None)
    async with chatting(script) as chat:
        done = await chat.run("Go", limits=RunLimits(seconds=0.05)).done()
    assert (done.stop, done.text) == ("seconds", "Once upon")
    assert script.kinds()[-1] == "response.cancel"


async def test_each_response_gets_the_limit_in_tokens() -> None:
    def spent(event: ClientEvent, script: Script) -> Iterable[server.ServerEvent]:
        for told in script.respond():
            if isinstance(told, server.ResponseDone):
                told = msgspec.structs.replace(told, response=costing(told.response, 6))
            yield told

    def answer(script: Script, event: ClientEvent) -> Iterable[server.ServerEvent]:
        return spent(event, script) if isinstance(event, client.ResponseCreate) else script.usual(event)

    script = Script(*[[("add", '{"a":1,"b":1}')]] * 3, answer=answer)
    async with chatting(script) as chat:
        done = await chat.run("Go", [add], limits=RunLimits(tokens=10), max_output_tokens=8).done()
    asked = [event.response for event in script.got if isinstance(event, client.ResponseCreate)]
    assert [params.max_output_tokens for params in asked if params is not None] == [8, 4]
    assert (done.stop, done.usage.output_tokens, done.usage.input_tokens) == ("tokens", 12, 10)


def costing(ended: Any, tokens: int) -> Any:
    details = InputTokenDetails(cached_tokens=1, text_tokens=5, cached_tokens_details=Cached(text_tokens=1))
    usage = Usage(
        total_tokens=5 + tokens,
        input_tokens=5,
        output_tokens=tokens,
        input_token_details=details,
        output_token_details=OutputTokenDetails(text_tokens=tokens),
    )
    return msgspec.structs.replace(ended, usage=usage)


@pytest.mark.parametrize("given", [{"steps": 0}, {"calls": -1}, {"seconds": float("nan")}, {"tokens": 0}])
def test_a_limit_that_is_too_low_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(LimitInvalid, match=next(iter(given))):
        RunLimits(**given)


async def test_calls_that_the_caller_answers_end_the_run() -> None:
    script = Script([("lookup", '{"q":1}'), ("add", '{"a":1,"b":2}')], ["Found, and 3."])
    async with chatting(script) as chat:
        done = await chat.run("Go", [{"name": "lookup"}, add]).done()
        assert done.stop == "caller"
        (call,) = [call for call in chat.last.calls if call.name == "lookup"]
        await chat.answer(call, "here")
        assert await chat.run().text() == "Found, and 3."
    assert script.outputs() == ["3", "here"]


async def test_cancelling_the_chat_cancels_its_tools() -> None:
    ended: list[str] = []

    async def waits() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("cancelled")

    script = Script([("waits", "{}")], ["Again."])
    async with chatting(script) as chat:
        events: list[RunEvent] = []
        async for event in chat.run("Go", [waits]):
            events.append(event)
            if isinstance(event, StepFinished):
                await anyio.wait_all_tasks_blocked()
                await chat.cancel()
        assert isinstance(events[-1], RunDone) and events[-1].stop == "cancelled"
        assert await chat.say("And now?").text() == "Again."
    assert ended == ["cancelled"]
    assert len(script.outputs()) == 1 and "cancelled" in script.outputs()[0]


@pytest.mark.parametrize("how", ["break", "cancelled"])
async def test_a_run_that_is_left_has_an_output_for_each_call(how: str) -> None:
    script = Script([("hang", "{}")], ["Again."])
    async with chatting(script) as chat:

        async def read() -> None:
            async for event in chat.run("Go", [hang]):
                if how == "break" and isinstance(event, StepFinished):
                    break

        await given_up(read)
        assert await chat.say("And now?").text() == "Again."
    (told,) = script.outputs()
    assert "cancelled" in told
    assert script.kinds()[-2:] == ["conversation.item.create", "response.create"]


async def test_a_failed_response_drops_its_calls() -> None:
    streaming = Streaming([called("hang", "{}")])
    script = Script(["Again."], answer=streaming)
    async with chatting(script) as chat:
        run = chat.run("Go", [hang])
        assert isinstance(await anext(run), CallStarted)
        assert streaming.held is not None
        script.tell(server.ResponseDone(event_id=script.id(), response=failed(streaming.held[0])))
        with pytest.raises(ResponseFailed):
            await run.done()
        assert await chat.say("And now?").text() == "Again."
    assert script.outputs() == []


async def test_a_response_that_ends_early_ends_the_run() -> None:
    streaming = Streaming([called("hang", "{}")])
    script = Script(answer=streaming)
    async with chatting(script) as chat:
        async for event in chat.run("Go", [hang]):
            if isinstance(event, CallStarted):
                assert streaming.held is not None
                details = StatusDetails(type="incomplete", reason="steered")
                ended = msgspec.structs.replace(
                    response(streaming.held[0], "incomplete"), status_details=details
                )
                script.tell(server.ResponseDone(event_id=script.id(), response=ended))
            if isinstance(event, RunDone):
                assert event.stop == "incomplete"
    assert len(script.outputs()) == 1


async def test_tracers_get_all_events_and_their_errors_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[RunEvent] = []
    late: list[str] = []

    def breaks(event: RunEvent) -> None:
        raise RuntimeError("no")

    async def beside(event: RunEvent) -> None:
        await anyio.lowlevel.checkpoint()
        late.append(type(event).__name__)
        if isinstance(event, StepFinished):
            raise RuntimeError("no")

    script = Script([("add", '{"a":1,"b":2}')], ["3."])
    async with chatting(script) as chat:
        with caplog.at_level(logging.CRITICAL, "holdfast.sdk.agent.tracing"):
            run = chat.run("Go", [add], trace=[breaks, seen.append, beside])
            events = [event async for event in run]
    assert seen == events
    assert late == [type(event).__name__ for event in events]


async def test_the_server_gets_a_hint_of_how_long_tools_take() -> None:
    script = Script(*[[("slow", "{}")], ["Done."]] * 2)

    @tool(expected=30.0)
    async def slow() -> str:
        return "ok"

    async with chatting(script, tools=[slow]) as chat:
        events = [event async for event in chat.run("Go")]
        await chat.lease(ttl=60.0)  # from now on it is the user's
        await chat.run("Again").done()
    (started,), (wait,) = of(CallStarted, events), of(WaitFinished, events)
    assert started.expected == 30.0
    assert 0 < wait.expected <= 30.0
    hinted, own = [event for event in script.got if isinstance(event, client.SessionLease)]
    assert hinted.returns_in == wait.expected and hinted.ttl == 0
    assert (own.ttl, own.returns_in) == (60.0, None)


@pytest.mark.parametrize("status", ["granted", "denied"])
async def test_only_a_lease_that_was_given_says_when_the_session_is_back(status: str) -> None:
    def answer(script: Script, event: ClientEvent) -> Iterable[server.ServerEvent]:
        for told in script.usual(event):
            if isinstance(told, server.SessionLeased) and status == "denied":
                told = msgspec.structs.replace(told, status=status, ttl=0.0)
            yield told

    script = Script([("slow", "{}")], ["Done."], answer=answer)

    @tool(expected=30.0)
    async def slow() -> str:
        return "ok"

    async with chatting(script, tools=[slow]) as chat:
        await chat.lease(ttl=60.0)
        await chat.run("Go").done()
    hints = [event for event in script.got if isinstance(event, client.SessionLease)][1:]
    assert [hint.ttl for hint in hints] == ([0.0] if status == "denied" else [])


async def test_how_long_a_tool_takes_is_learnt() -> None:
    naps, hinted = [0.3], anyio.Event()

    def answer(script: Script, event: ClientEvent) -> Iterable[server.ServerEvent]:
        if isinstance(event, client.SessionLease):
            hinted.set()
        yield from script.usual(event)

    script = Script(*[[("slow", "{}")], ["Done."]] * 2, answer=answer)

    @tool
    async def slow() -> str:
        if naps:
            await anyio.sleep(naps.pop())
        else:
            await hinted.wait()
        return "ok"

    async with chatting(script, tools=[slow]) as chat:
        first = [event async for event in chat.run("Go", hint_seconds=0.001)]
        again = [event async for event in chat.run("Go", hint_seconds=0.001)]
    assert of(CallStarted, first)[0].expected is None
    assert of(CallStarted, again)[0].expected == of(CallFinished, first)[0].seconds
    assert [event.type for event in script.got].count("session.lease") == 1


async def test_a_trace_file_has_a_row_for_each_response(tmp_path: Path) -> None:
    def answer(script: Script, event: ClientEvent) -> Iterable[server.ServerEvent]:
        for told in Script.usual(script, event):
            if isinstance(told, server.ResponseDone):
                told = msgspec.structs.replace(told, response=costing(told.response, 6))
            yield told

    script = Script(*[[("add", '{"a":1,"b":2}')], ["3."]] * 2, answer=answer)
    file = tmp_path / "trace.csv"
    async with chatting(script, tools=[add]) as chat:
        trace = TraceFile(file, "s1")
        for _ in range(2):
            await chat.run("Go", trace=[trace]).done()
    with file.open() as text:
        rows = list(csv.DictReader(text))
    assert [row["round_idx"] for row in rows] == ["0", "1", "2", "3"]
    assert {row["session_id"] for row in rows} == {"s1"}
    assert {row["output_len"] for row in rows} == {"6"}
    assert [row["tool_wait_after_ms"] != "" for row in rows] == [True] * 4
