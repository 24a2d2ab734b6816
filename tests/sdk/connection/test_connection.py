"""The receive task: bounded queues, answers by request, cancelled waits, losses and shared connections."""

from __future__ import annotations

import asyncio
import json
from collections import deque

import anyio
import pytest

from holdfast.sdk.connection import connection as connections
from holdfast.sdk.connection import multiplex
from holdfast.sdk.connection.connection import Connection
from holdfast.sdk.connection.multiplex import SharedTransport
from holdfast.sdk.errors import ChatBusy, ConnectionLost, ProtocolBroken
from holdfast.sdk.frames import client, codec, server

from .test_reconnect import back_over, resumed

pytestmark = pytest.mark.anyio


class Wire:
    """A transport that a test feeds; `read` counts the frames that were taken from it."""

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.sent: list[client.ClientEvent] = []
        self.read = 0
        self._changed = asyncio.Event()
        self._lost: ConnectionLost | None = None

    def tell(self, *events: server.ServerEvent) -> None:
        self.tell_raw(*map(codec.encode, events))

    def tell_raw(self, *frames: bytes) -> None:
        self.frames += frames
        self._changed.set()

    def lose(self, code: int | None = None) -> None:
        self._lost = ConnectionLost("cut", code)
        self._changed.set()

    async def send(self, frame: bytes) -> None:
        if self._lost is not None:
            raise self._lost
        self.sent.append(codec.decode_client(frame))

    async def receive(self) -> bytes:
        while not self.frames:
            if self._lost is not None:
                raise ConnectionLost(self._lost.message, self._lost.close_code)
            self._changed.clear()
            await self._changed.wait()
        self.read += 1
        return self.frames.popleft()

    async def aclose(self) -> None:
        self.lose()


def deleted(item: str, **fields: str) -> server.ItemDeleted:
    return server.ItemDeleted(event_id=f"e_{item}", item_id=item, **fields)


async def test_events_beyond_the_bound_are_left_on_the_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_QUEUED", 4)
    wire = Wire()
    connection = Connection(wire)
    wire.tell(*(deleted(str(number)) for number in range(20)))
    assert await connection.receive() == deleted("0")
    await anyio.wait_all_tasks_blocked()
    assert wire.read == 4
    assert [await connection.receive() for _ in range(19)] == [deleted(str(n)) for n in range(1, 20)]
    await connection.aclose()


@pytest.mark.parametrize("shared", [False, True])
async def test_one_wake_hands_over_all_that_is_queued(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    count, loop, scheduled = 60, asyncio.get_running_loop(), list[object]()
    wire = Wire()
    connection = Connection(SharedTransport(wire, "one").session("one") if shared else wire)

    async def read() -> list[server.ServerEvent]:
        return [await connection.receive() for _ in range(count)]

    reading = asyncio.create_task(read())
    await anyio.wait_all_tasks_blocked()
    whole = loop.call_soon

    def call_soon(work: object, *words: object, **named: object) -> asyncio.Handle:
        scheduled.append(work)
        return whole(work, *words, **named)

    monkeypatch.setattr(loop, "call_soon", call_soon)
    wire.tell(*(deleted(str(number)) for number in range(count)))
    assert await reading == [deleted(str(number)) for number in range(count)]
    assert len(scheduled) < 10, "a wake for each task on the way, not for each event"
    await connection.aclose()


async def test_a_request_is_answered_behind_a_full_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_QUEUED", 4)
    wire = Wire()
    connection = Connection(wire)
    await connection.send(client.ResponseCreate())
    wire.tell(*(deleted(str(number)) for number in range(20)))
    assert await connection.receive() == deleted("0")
    wire.tell(deleted("wanted"))
    await connection.delete("wanted")
    assert [await connection.receive() for _ in range(19)] == [deleted(str(n)) for n in range(1, 20)]
    await connection.aclose()


async def test_each_answer_goes_to_one_request() -> None:
    wire = Wire()
    connection = Connection(wire)
    answers: list[str] = []

    async def stage() -> None:
        answers.append((await connection.request(client.SessionStage(), server.SessionStaged)).event_id)

    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(stage)
            await anyio.wait_all_tasks_blocked()
        for event_id in ("first", "second"):
            wire.tell(server.SessionStaged(event_id=event_id, source="device", tokens=0, ms=0.0))
            await anyio.wait_all_tasks_blocked()
    assert answers == ["first", "second"]
    await connection.aclose()


async def test_an_answer_that_comes_while_its_request_is_still_being_sent_is_not_lost() -> None:
    class Slow(Wire):
        async def send(self, frame: bytes) -> None:
            await super().send(frame)
            self.tell(deleted("a"))
            await anyio.wait_all_tasks_blocked()

    connection = Connection(Slow())
    connection._start()
    with anyio.fail_after(5):
        await connection.delete("a")
    await connection.aclose()


async def test_a_cancelled_wait_loses_no_event_and_leaves_no_request() -> None:
    wire = Wire()
    connection = Connection(wire)
    for wait in (connection.receive(), connection.delete("a")):
        with anyio.move_on_after(0.001) as scope:
            await wait
        assert scope.cancelled_caught
    assert not connection._requests
    wire.tell(deleted("a"))
    assert await connection.receive() == deleted("a")
    await connection.aclose()


async def test_a_second_reader_is_refused_and_the_first_goes_on() -> None:
    wire = Wire()
    connection = Connection(wire)

    async def read() -> None:
        assert await connection.receive() == deleted("a")

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(ChatBusy):
            await connection.receive()
        wire.tell(deleted("a"))
    await connection.aclose()


async def test_a_broken_frame_is_raised_in_its_order() -> None:
    wire = Wire()
    connection = Connection(wire)
    wire.tell(deleted("a"))
    wire.tell_raw(b"{")
    wire.tell(deleted("b"))
    assert await connection.receive() == deleted("a")
    with pytest.raises(ProtocolBroken):
        await connection.receive()
    assert await connection.receive() == deleted("b")
    wire.tell_raw(b"{")
    with pytest.raises(ProtocolBroken):
        await connection.delete("c")
    await connection.aclose()


async def test_a_connection_lost_while_nothing_waits_is_made_again_by_the_next_that_does() -> None:
    first, second = Wire(), Wire()
    connection = Connection(first, back_over(second))
    first.tell(deleted("a"))
    assert await connection.receive() == deleted("a")
    first.lose()
    await anyio.wait_all_tasks_blocked()
    assert not second.sent
    second.tell(resumed(), deleted("b"))
    await connection.delete("b")
    assert [event.type for event in second.sent] == ["session.resume", "conversation.item.delete"]
    await connection.aclose()


async def test_closing_ends_the_receive_task_and_all_that_wait() -> None:
    wire = Wire()
    connection = Connection(wire)
    ended: list[str] = []

    async def wait_for(what: str) -> None:
        with pytest.raises(ConnectionLost):
            await (connection.receive() if what == "event" else connection.delete("a"))
        ended.append(what)

    async with anyio.create_task_group() as group:
        for what in ("event", "answer"):
            group.start_soon(wait_for, what)
        await anyio.wait_all_tasks_blocked()
        await connection.aclose()
    assert sorted(ended) == ["answer", "event"]
    assert connection._task is not None and connection._task.done()


async def test_a_connection_is_shared_while_a_task_reads_it() -> None:
    wire = Wire()
    connection = Connection(wire)
    read: list[server.ServerEvent] = []

    async def reader() -> None:
        read.extend([await connection.receive(), await connection.receive()])

    async with anyio.create_task_group() as group:
        group.start_soon(reader)
        await anyio.wait_all_tasks_blocked()
        wire.tell(deleted("a"))
        await connection.share("sess")
        wire.tell(deleted("b", session_id="sess"), deleted("c", session_id="other"))
    assert [getattr(event, "item_id", None) for event in read] == ["a", "b"]
    await connection.aclose()


async def test_a_slow_session_leaves_a_shared_connection_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(multiplex, "MAX_QUEUED", 4)
    monkeypatch.setattr(connections, "MAX_QUEUED", 4)
    wire, own = Wire(), Wire()
    shared = SharedTransport(wire, "fast")
    fast = Connection(shared.session("fast"))
    slow = Connection(shared.session("slow"), back_over(own))
    wire.tell(deleted("0", session_id="slow"))
    assert (await slow.receive()).event_id == "e_0"
    for number in range(1, 20):
        wire.tell(deleted(str(number), session_id="slow"), deleted(f"f{number}", session_id="fast"))
    with anyio.fail_after(5):
        assert [(await fast.receive()).event_id for _ in range(19)] == [f"e_f{n}" for n in range(1, 20)]
    (detach,) = wire.sent
    assert isinstance(detach, client.SessionDetach) and detach.session_id == "slow"
    own.tell(resumed(), *(deleted(str(number)) for number in range(9, 20)))
    assert [(await slow.receive()).event_id for _ in range(19)] == [f"e_{n}" for n in range(1, 20)]
    (resume,) = own.sent
    assert isinstance(resume, client.SessionResume) and resume.last_event == "e_8"
    await slow.aclose()
    await fast.aclose()
    assert json.loads(codec.encode(resume))["handle"] == "first"
