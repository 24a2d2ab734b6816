"""Text that is typed beside tools that stream, and what of it the server refuses or has from before."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

import anyio
import pytest

from holdfast.sdk import CallFinished, Chat, Client, ServerError, ToolContext
from holdfast.sdk.connection.transport import Transport
from holdfast.sdk.frames import client, server
from holdfast.sdk.frames.client import ClientEvent
from holdfast.sdk.frames.items import FunctionCallOutputItem

from .connection.test_reconnect import QUICK, SESSION
from .scripted import Script, chatting

pytestmark = pytest.mark.anyio


class Buffered:
    """A server that knows the buffer: what is committed becomes an item, and more than ``most`` is refused."""

    def __init__(self, held: str = "", call_id: str | None = None, most: int = 1000) -> None:
        self.held, self.call_id, self.most = held, call_id, most
        self.made: dict[str, tuple[str | None, str]] = {}
        self.changed = anyio.Event()

    async def holds(self, call_id: str) -> None:
        """Wait until some of what this call answers is there."""
        while self.call_id != call_id or not self.held:
            await self.changed.wait()

    async def made_one(self) -> None:
        while not self.made:
            await self.changed.wait()

    def __call__(self, script: Script, event: ClientEvent) -> Iterable[server.ServerEvent]:
        match event:
            case client.TextAppend(text=text, call_id=call_id):
                other = bool(self.held or self.call_id) and call_id != self.call_id
                if other or len(self.held + text) > self.most:
                    yield script.error("invalid_value", event.event_id)
                else:
                    self.held, self.call_id = self.held + text, call_id
            case client.TextClear():
                self.held, self.call_id = "", None
                yield server.TextCleared(event_id=script.id())
            case client.TextCommit():
                item_id = script.id()
                self.made[item_id] = self.call_id, self.held
                call = {} if self.call_id is None else {"call_id": self.call_id}
                yield server.TextCommitted(
                    event_id=script.id(), item_id=item_id, prefilled_tokens=0, left_tokens=1, **call
                )
                self.held, self.call_id = "", None
            case client.ItemDelete(item_id=item_id):
                self.made.pop(item_id, None)
                yield from script.usual(event)
            case _:
                yield from script.usual(event)
        self.changed.set()
        self.changed = anyio.Event()


async def test_the_commit_of_an_output_is_not_taken_for_that_of_typed_text() -> None:
    buffered = Buffered()
    script = Script([("first", "{}"), ("second", "{}")], ["Done."], answer=buffered)
    typed = anyio.Event()

    async def first() -> AsyncIterator[str]:
        yield "one"
        await buffered.holds("c0")

    async def second() -> str:
        await typed.wait()
        return "two"

    async with chatting(script) as chat, anyio.create_task_group() as group:

        async def speak() -> None:
            await buffered.made_one()
            async with chat.input() as text:
                await text.append("Wait!")
            assert text.committed is not None
            assert buffered.made[text.committed.item_id] == (None, "Wait!")
            typed.set()

        group.start_soon(speak)
        await chat.run("Go", [first, second]).done()
    assert list(buffered.made.values()) == [("c0", "one"), (None, "Wait!")]


async def too_much(chat: Chat, known: bool) -> None:
    async with chat.input() as text:
        await text.append("Twelve men")
        await text.append(" and a dog")
        if known:
            await chat.say().text()
        await text.append("")


@pytest.mark.parametrize("known", [False, True], ids=["unread", "read"])
async def test_text_of_which_a_piece_was_refused_is_no_item(known: bool) -> None:
    buffered = Buffered(most=10)
    script = Script(["Hello."], answer=buffered)
    async with chatting(script) as chat:
        with pytest.raises(ServerError) as refused:
            await too_much(chat, known)
        assert refused.value.code == "invalid_value"
        assert (buffered.held, buffered.made) == ("", {})
        async with chat.input() as text:
            await text.append("One man")
    assert list(buffered.made.values()) == [(None, "One man")]


@pytest.mark.parametrize("late", [False, True], ids=["told before", "told after"])
async def test_an_output_that_leaves_no_room_for_an_answer_is_taken_back_as_a_whole_one_is(
    late: bool,
) -> None:
    """The session could say nothing more: the next turn would find it in its way too."""
    buffered = Buffered()

    def full(script: Script, event: ClientEvent) -> Iterable[server.ServerEvent]:
        if isinstance(event, client.ResponseCreate) and buffered.made and not refused:
            refused.append(event)
            yield script.error("context_length_exceeded", event.event_id)
            yield from waiting
            return
        for told in buffered(script, event):
            if late and isinstance(told, server.TextCommitted):
                waiting.append(told)
            else:
                yield told

    waiting: list[server.ServerEvent] = []
    refused: list[ClientEvent] = []
    calls: list[str | tuple[str, str]] = [("plain", "{}"), ("talks", "{}"), ("talks", "{}")]
    script = Script(calls, ["Hello."], answer=full)

    async def talks(context: ToolContext) -> AsyncIterator[str]:
        yield "one"
        await buffered.holds(context.call_id)

    async def plain() -> str:
        return "all"

    async with chatting(script) as chat:
        with pytest.raises(ServerError) as told:
            await chat.run("Go", [plain, talks]).done()
        assert told.value.code == "context_length_exceeded"
        assert buffered.made == {} and len(waiting) == (2 if late else 0)
        assert script.outputs() == ["all"]
        (item,) = [one.id for one in script.added() if isinstance(one, FunctionCallOutputItem)]
        assert item in [event.item_id for event in script.got if isinstance(event, client.ItemDelete)]
        assert await chat.say("Hi").text() == "Hello."


# --- what an earlier client has left ---


def resuming(script: Script) -> Client:
    async def again(model: str | None) -> Transport:
        await script.receive()
        await script.receive()  # it greets no client that comes back
        script.tell(server.SessionResumed(event_id="back", session=SESSION, handle="second"))
        return script

    return Client(again, None, again, QUICK)


async def speaks(chat: Chat, buffered: Buffered) -> None:
    async with chat.input() as text:
        await text.append("Hello")


async def runs(chat: Chat, buffered: Buffered) -> None:
    async def talks() -> AsyncIterator[str]:
        yield "one"
        with anyio.move_on_after(1):
            await buffered.holds("c0")

    await chat.run("Go", [talks]).done()


@pytest.mark.parametrize(("does", "made"), [(speaks, (None, "Hello")), (runs, ("c0", "one"))])
@pytest.mark.parametrize("left", [("half an out", "c9"), ("half a sent", None)])
async def test_text_left_by_another_client_is_cleared(does, made, left) -> None:
    buffered = Buffered(*left)
    script = Script([("talks", "{}")], ["Done."], answer=buffered)
    async with resuming(script).resume("first") as chat:
        await does(chat, buffered)
    assert list(buffered.made.values()) == [made]
    assert script.kinds().count("input_text_buffer.clear") == 1


async def test_text_of_a_refused_commit_does_not_stand_before_the_next() -> None:
    buffered, full = Buffered(), [True]

    def answer(script: Script, event: ClientEvent) -> Iterable[server.ServerEvent]:
        if isinstance(event, client.TextCommit) and full and full.pop():
            yield script.error("store_full", event.event_id)
        else:
            yield from buffered(script, event)

    async with chatting(Script(["Done."], answer=answer)) as chat:
        with pytest.raises(ServerError):
            async with chat.input() as typed:
                await typed.append("Refused. ")
        async with chat.input() as typed:
            await typed.append("Hello")
    assert list(buffered.made.values()) == [(None, "Hello")]


# --- tools ---


async def test_a_generator_that_never_waits_lets_other_tasks_run() -> None:
    script = Script([("polls", "{}")], ["Done."])
    began, stirred = anyio.Event(), anyio.Event()

    async def polls() -> AsyncIterator[str]:
        began.set()
        for _ in range(3_000_000):
            if stirred.is_set():
                yield "there"
                return
            yield ""

    async def stir() -> None:
        await began.wait()
        stirred.set()

    async with chatting(script) as chat, anyio.create_task_group() as group:
        group.start_soon(stir)
        events = [event async for event in chat.run("Go", [polls])]
    (finished,) = [event for event in events if isinstance(event, CallFinished)]
    assert finished.output == "there"
