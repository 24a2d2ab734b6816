"""Runs that begin at once, are left, or hold what no frame can: typed errors, and the chat goes on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import anyio
import pytest

from holdfast.sdk import ChatBusy, FrameError, RunDone, TraceFile
from holdfast.sdk.frames import client, server
from holdfast.sdk.frames.client import ClientEvent

from ..scripted import Script, add, chatting, given_up, response, weather

pytestmark = pytest.mark.anyio


class Slow:
    """Answers `session.update` when it is told to."""

    def __init__(self) -> None:
        self.held: client.SessionUpdate | None = None
        self.asked = anyio.Event()

    def __call__(self, script: Script, event: ClientEvent) -> Iterable[server.ServerEvent]:
        if isinstance(event, client.SessionUpdate) and self.held is None:
            self.held = event
            self.asked.set()
            return
        yield from script.usual(event)

    def answer(self, script: Script) -> None:
        assert self.held is not None
        for told in script.usual(self.held):
            script.tell(told)


async def test_of_two_runs_that_begin_at_once_one_is_refused() -> None:
    slow = Slow()
    script = Script([("weather", '{"city":"Rome"}')], ["Rain."], answer=slow)
    ended: list[Any] = []

    async def run(chat: Any, tools: list[Any]) -> None:
        try:
            ended.append(await chat.run("Go", tools).text())
        except Exception as error:
            ended.append(type(error))

    async with chatting(script) as chat, anyio.create_task_group() as group:
        group.start_soon(run, chat, [weather])
        await slow.asked.wait()
        group.start_soon(run, chat, [add])
        await anyio.wait_all_tasks_blocked()
        slow.answer(script)
    assert ended == [ChatBusy, "Rain."]
    assert script.kinds().count("session.update") == 1
    assert [tool.name for tool in script.session.tools] == ["weather"]


async def test_tools_whose_telling_was_cut_short_are_told_again() -> None:
    slow = Slow()
    script = Script(["Yes."], answer=slow)
    async with chatting(script, tools=[]) as chat:
        await given_up(chat.run("Go", [weather]).text)
        slow.answer(script)  # it had arrived
        assert await chat.run("Go", []).text() == "Yes."
    assert script.session.tools == []


@pytest.mark.parametrize("text", ["lone \ud800", "x" * (1 << 20)])
@pytest.mark.parametrize("how", ["run", "say"])
async def test_what_no_frame_holds_is_refused_at_once_and_the_chat_goes_on(text: str, how: str) -> None:
    script = Script(["Yes."])
    async with chatting(script) as chat:
        reading = chat.run(text) if how == "run" else chat.say(text)
        with pytest.raises(FrameError):
            await reading.text()
        assert not reading.running
        assert await chat.say("Hello?").text() == "Yes."
    assert script.kinds() == ["response.create"]


@pytest.mark.parametrize("how", ["run", "say"])
async def test_a_reply_without_a_word_may_be_interrupted_while_another_task_reads_it(how: str) -> None:
    def silent(script: Script, event: ClientEvent) -> Iterable[server.ServerEvent]:
        if isinstance(event, client.ResponseCreate):
            script.running.append("r")
            begun = response("r", "in_progress")
            yield server.ResponseCreated(event_id=script.id(), response=begun)
        elif isinstance(event, client.ItemTruncate):
            yield server.ItemTruncated(event_id=script.id(), item_id=event.item_id)
        else:
            yield from script.usual(event)

    script = Script(answer=silent)
    async with chatting(script) as chat, anyio.create_task_group() as group:
        group.start_soon(getattr(chat, how)("Go").text)
        await anyio.wait_all_tasks_blocked()
        assert await chat.interrupt() == ""
    (cut,) = [event for event in script.got if isinstance(event, client.ItemTruncate)]
    assert cut.text_end == 0, "what was on its way meanwhile was not heard either"


async def test_a_run_tells_how_it_ended_as_often_as_it_is_asked() -> None:
    script = Script(["Yes."])
    async with chatting(script) as chat:
        run = chat.run("Go")
        events = [event async for event in run]
        assert await run.done() is events[-1] and isinstance(events[-1], RunDone)
        assert await run.text() == "Yes."


async def test_a_trace_file_may_be_named_by_its_text(tmp_path: Path) -> None:
    script = Script(["Yes."])
    async with chatting(script) as chat:
        trace = TraceFile(str(tmp_path / "trace.csv"), "s")
        done = await chat.run("Go", trace=[trace]).done()
    assert done.text == "Yes." and trace is not None
