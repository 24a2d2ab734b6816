"""Resuming a session: when it is tried, what is sent again, and when it ends; over scripted connections."""

from __future__ import annotations

import anyio
import pytest

from holdfast.sdk import Client, SessionLost
from holdfast.sdk.chat import Chat
from holdfast.sdk.connection.connection import Connection
from holdfast.sdk.connection.reconnect import MAX_UNSURE, Patience, Resumption, Retry
from holdfast.sdk.connection.transport import Transport, realtime_url
from holdfast.sdk.errors import ConnectionFailed, ConnectionFault, ConnectionLost, ProtocolBroken
from holdfast.sdk.frames import client, codec, server
from holdfast.sdk.frames.items import MessageItem
from holdfast.sdk.frames.response import Response
from holdfast.sdk.frames.session import SessionResource

from ..scripted import Script

pytestmark = pytest.mark.anyio
ADDRESS = "ws://127.0.0.1:1/v1/realtime"
QUICK = Patience(first=0.0, longest=0.0, total=1000.0)
SESSION = SessionResource(id="sess", model="pocket")


def resumed(**fields: object) -> server.SessionResumed:
    return server.SessionResumed(event_id="back", session=SESSION, handle="second", **fields)


class Line:
    """A connection: frames to read, then its end; keeps what is sent."""

    def __init__(self, *events: server.ServerEvent, code: int | None = None) -> None:
        self.frames = [codec.encode(event) for event in events]
        self.sent: list[client.ClientEvent] = []
        self.code = code

    async def send(self, frame: bytes) -> None:
        self.sent.append(codec.decode_client(frame))

    async def receive(self) -> bytes:
        if not self.frames:
            raise ConnectionLost("cut", self.code)
        return self.frames.pop(0)

    async def aclose(self) -> None:
        self.frames.clear()

    def ids(self) -> list[str | None]:
        return [event.event_id for event in self.sent[1:]]


def back_over(*lines: Transport | Exception, patience: Patience = QUICK) -> Resumption:
    waiting = list(lines)

    async def dial() -> Transport:
        line = waiting.pop(0)
        if isinstance(line, Exception):
            raise line
        return line

    return Resumption(dial, patience, ADDRESS, "first")


def deleted(event_id: str, item: str) -> server.ItemDeleted:
    return server.ItemDeleted(event_id=event_id, item_id=item)


async def test_a_lost_connection_is_made_again_with_the_last_event_and_the_handle() -> None:
    first, second = Line(deleted("e1", "a")), Line(resumed(), deleted("e2", "b"))
    connection = Connection(first, back_over(ConnectionFailed("not yet"), Line(), second))
    assert [(await connection.receive()).event_id for _ in range(2)] == ["e1", "e2"]
    (resume,) = second.sent
    assert isinstance(resume, client.SessionResume)
    assert (resume.handle, resume.last_event) == ("first", "e1")
    assert connection.handle == "second"


async def test_the_first_events_of_a_resumed_session_are_not_lost_with_its_connection() -> None:
    second = Line(resumed(), deleted("e2", "b"))
    back = back_over(Line(resumed()), second)
    first, _ = await back.connect()
    await Connection(first, back).receive()
    (resume,) = second.sent
    assert isinstance(resume, client.SessionResume)
    assert resume.last_event == "back"


@pytest.mark.parametrize("shared", [False, True])
async def test_a_fork_is_opened_though_connections_are_lost_meanwhile(shared: bool) -> None:
    fork = server.Fork(id="child", handle="childs")
    line = Line(server.SessionForked(event_id="e1", sessions=[fork]))
    opened = Line(resumed())
    chat = Chat(Connection(line, back_over(Line(), ConnectionFailed("not yet"), opened)), SESSION)
    (child,) = await chat.fork(shared=shared)
    assert child.handle == "second"
    (resume,) = opened.sent
    assert isinstance(resume, client.SessionResume)
    assert resume.handle == "childs"


async def test_only_what_the_server_has_not_is_sent_again() -> None:
    second = Line(resumed(last_client_event="two"), deleted("e", "x"))
    connection = Connection(Line(), back_over(second))
    for name in ("one", "two", "three"):
        await connection.send(client.ItemDelete(item_id="i", event_id=name))
    await connection.receive()
    assert second.ids() == ["three"]


async def test_a_server_that_lacks_all_events_gets_all_again() -> None:
    second = Line(resumed(), deleted("e", "x"))
    connection = Connection(Line(), back_over(second))
    await connection.send(client.ItemDelete(item_id="i", event_id="one"))
    await connection.receive()
    assert second.ids() == ["one"]


async def test_events_sent_while_a_connection_is_made_again_go_over_it_too() -> None:
    class Dead(Line):
        async def send(self, frame: bytes) -> None:
            raise ConnectionLost("cut")

    class Slow(Line):
        async def send(self, frame: bytes) -> None:
            await super().send(frame)
            if self.ids() == ["one"]:
                group.start_soon(connection.send, client.ItemDelete(item_id="i", event_id="two"))
                await anyio.wait_all_tasks_blocked()

    second = Slow(resumed(), deleted("e", "x"))
    connection = Connection(Dead(), back_over(second))
    async with anyio.create_task_group() as group:
        await connection.send(client.ItemDelete(item_id="i", event_id="one"))
    assert second.ids() == ["one", "two"]


@pytest.mark.parametrize(("reopened", "sent"), [(True, ["asked"]), (False, [])])
async def test_an_answer_lost_with_its_server_is_asked_for_again(reopened: bool, sent: list[str]) -> None:
    second = Line(resumed(last_client_event="asked", reopened=reopened), deleted("e", "x"))
    connection = Connection(Line(), back_over(second))
    await connection.send(client.ItemDelete(item_id="x", event_id="asked"))
    await connection.answer("asked", lambda event: isinstance(event, server.ItemDeleted))
    assert second.ids() == sent


async def test_of_several_answers_lost_with_a_server_all_are_asked_for_again() -> None:
    second = Line(
        resumed(last_client_event="two", reopened=True),
        deleted("e", "x"),
        deleted("f", "y"),
        deleted("g", "z"),
    )
    connection = Connection(Line(), back_over(second))

    async def answered(event_id: str, item_id: str) -> None:
        event = await connection.answer(
            event_id, lambda event: isinstance(event, server.ItemDeleted) and event.item_id == item_id
        )
        assert isinstance(event, server.ItemDeleted)

    for name, item in ("one", "x"), ("two", "y"), ("three", "z"):
        await connection.send(client.ItemDelete(item_id=item, event_id=name))
    async with anyio.create_task_group() as group:
        for name, item in ("one", "x"), ("two", "y"), ("three", "z"):
            group.start_soon(answered, name, item)
    assert second.ids() == ["one", "two", "three"]


async def test_a_turn_that_a_server_refuses_because_it_ends_is_sent_to_the_next_one() -> None:
    details = server.ErrorDetails(
        type="server_error", code="server_going_away", message="Gone", event_id="turn"
    )
    second = Line(resumed(last_client_event="behind", reopened=True), deleted("e", "x"))
    connection = Connection(
        Line(server.ErrorEvent(event_id="no", error=details), code=1012), back_over(second)
    )
    await connection.send(client.ResponseCreate(event_id="turn"))
    await connection.send(client.ItemDelete(item_id="i", event_id="behind"))
    assert (await connection.receive()).event_id == "e"
    assert second.ids() == ["turn"]


async def test_an_answer_is_asked_for_again_though_its_question_was_known_to_have_come() -> None:
    """A socket was cut before, or a later question was answered first: then the server died."""

    class Slow(Line):
        async def receive(self) -> bytes:
            await anyio.wait_all_tasks_blocked()
            return await super().receive()

    first = Slow(deleted("e", "y"))
    second = Line(resumed(last_client_event="two"))
    third = Line(resumed(last_client_event="two", reopened=True), deleted("f", "x"))
    connection = Connection(first, back_over(second, third))
    for name, item in ("one", "x"), ("two", "y"):
        await connection.send(client.ItemDelete(item_id=item, event_id=name))
    done: list[str] = []

    async def answered(event_id: str, item_id: str) -> None:
        await connection.answer(
            event_id, lambda event: isinstance(event, server.ItemDeleted) and event.item_id == item_id
        )
        done.append(event_id)

    async with anyio.create_task_group() as group:
        group.start_soon(answered, "one", "x")
        group.start_soon(answered, "two", "y")
    assert done == ["two", "one"]
    assert (second.ids(), third.ids()) == ([], ["one"])


async def test_a_session_ends_with_an_error_where_lost_events_are_not_kept() -> None:
    async def sent(last: str | None) -> list[str | None]:
        second = Line(resumed(last_client_event=last), deleted("e", "x"))
        connection = Connection(Line(), back_over(second))
        for number in range(MAX_UNSURE + 5):
            await connection.send(client.TextAppend(text="x", event_id=str(number)))
        await connection.receive()
        return second.ids()

    kept = [str(number) for number in range(5, MAX_UNSURE + 5)]
    assert await sent("4") == kept
    assert await sent("5") == kept[1:]
    for last in ("3", None):
        with pytest.raises(SessionLost, match="not kept"):
            await sent(last)


async def test_what_was_cancelled_is_cancelled_again_before_what_is_sent_behind_it() -> None:
    running = server.ResponseCreated(
        event_id="e1",
        response=Response(id="resp", status="in_progress", conversation_id="c", max_output_tokens="inf"),
    )
    first, second = Line(running), Line(resumed(running=["resp"]), deleted("e2", "b"))
    connection = Connection(first, back_over(second))
    await connection.receive()
    await connection.make_way()
    await connection.send(client.ItemDelete(item_id="b"))
    assert (await connection.receive()).event_id == "e2"
    _, again, *rest = second.sent
    assert isinstance(again, client.ResponseCancel) and again.response_id == "resp"
    assert [event.type for event in rest] == ["response.cancel", "conversation.item.delete"]


async def test_what_a_response_ends_is_not_sent_again() -> None:
    response = Response(id="r", status="in_progress", conversation_id="c", max_output_tokens="inf")
    first = Line(
        server.ResponseCreated(event_id="e1", response=response),
        server.ResponseDone(event_id="e2", response=response, handle="newer"),
    )
    second = Line(resumed(), deleted("e", "x"))
    back = back_over(second)
    connection = Connection(first, back)
    await connection.send(client.ItemCreate(item=MessageItem.of("user", "hi"), event_id="one"))
    await connection.send(client.ResponseCreate(event_id="two"))
    await connection.send(client.ItemDelete(item_id="i", event_id="three"))
    for _ in range(3):
        await connection.receive()
    assert second.ids() == ["three"]
    assert isinstance(second.sent[0], client.SessionResume) and second.sent[0].handle == "newer"


@pytest.mark.parametrize("code", [4001, 1008, 1009])
async def test_some_ends_are_final(code: int) -> None:
    connection = Connection(Line(code=code), back_over(Line(resumed())))
    with pytest.raises(ConnectionLost, match="cut"):
        await connection.receive()


async def test_a_deleted_session_raises_session_lost() -> None:
    details = server.ErrorDetails(
        type="invalid_request_error", code="session_not_found", message="No session", param="handle"
    )
    gone = Line(server.ErrorEvent(event_id="e", error=details))
    connection = Connection(Line(), back_over(gone))
    with pytest.raises(SessionLost, match="No session") as caught:
        await connection.receive()
    assert caught.value.code == "session_not_found"


async def test_patience_ends() -> None:
    tries = [ConnectionFailed("no server")] * 3
    connection = Connection(Line(), back_over(*tries, patience=Patience(0.0, longest=0.0, total=-1.0)))
    with pytest.raises(ConnectionLost, match="cut") as caught:
        await connection.receive()
    assert (caught.value.address, caught.value.handle) == (ADDRESS, "first")
    for told in (ADDRESS, "cut", "no server", "'first'"):
        assert told in caught.value.message and told in str(caught.value)


async def test_each_fault_of_a_connection_names_server_cause_and_handle() -> None:
    faults: list[ConnectionFault] = []
    closed, garbled, garbage = Connection(Line(), back_over()), Line(), Line()
    await closed.aclose()
    for line in (garbled, garbage):
        line.frames.append(b"[]")
    for connection in (Connection(Line(code=1008), back_over()), closed, Connection(garbled, back_over())):
        with pytest.raises(ConnectionFault) as caught:
            await connection.receive()
        faults.append(caught.value)
    refused = server.ErrorEvent(event_id="e", error=server.ErrorDetails(type="x", code="c", message="No"))
    for first in (ConnectionFailed("no server"), Line(refused), Line(), garbage):
        with pytest.raises(ConnectionFault) as caught:
            await back_over(first).connect()
        faults.append(caught.value)
    assert [type(fault) for fault in faults] == [
        *(ConnectionLost, ConnectionLost, ProtocolBroken),
        *(ConnectionFailed, SessionLost, ConnectionLost, ProtocolBroken),
    ]
    for fault in faults:
        assert (fault.address, fault.handle) == (ADDRESS, "first"), fault
        for told in (ADDRESS, "'first'", fault.cause):
            assert told in str(fault) == fault.message


async def test_each_try_is_told_before_it_and_then_that_the_connection_is_back() -> None:
    told: list[Retry | None] = []
    patience = Patience(first=0.0, longest=0.0, total=1000.0, tell=told.append)
    lines = (ConnectionFailed("no server"), Line(resumed(), deleted("e", "i")))
    connection = Connection(Line(), back_over(*lines, patience=patience))
    await connection.receive()
    first, second, back = told
    assert first is not None and second is not None and back is None
    assert [(one.number, one.fault.cause) for one in (first, second)] == [(1, "cut"), (2, "no server")]
    for one in (first, second):
        assert (one.fault.address, one.fault.handle) == (ADDRESS, "first")
        assert one.pause == 0.0 and 0.0 < one.left <= 1000.0


async def test_a_connection_closed_from_here_is_not_made_again() -> None:
    connection = Connection(Line(), back_over(Line(resumed())))
    await connection.aclose()
    with pytest.raises(ConnectionLost):
        await connection.receive()


def test_pauses_grow_within_their_bounds_and_differ() -> None:
    pauses = Patience(first=1.0, factor=2.0, longest=8.0).pauses()
    drawn = [next(pauses) for _ in range(40)]
    bounds = [1.0, 2.0, 4.0, *[8.0] * 37]
    assert all(0 <= pause <= bound for pause, bound in zip(drawn, bounds, strict=True))
    assert max(drawn) > 4.0 and len(set(drawn)) == 40


def test_what_is_kept_to_be_sent_again_is_bounded() -> None:
    back = back_over()
    for number in range(MAX_UNSURE + 5):
        back.sent(str(number), b"")
    assert len(back.again(resumed(), {})) == MAX_UNSURE


async def test_a_client_that_cannot_resume_raises() -> None:
    async def dial(model: str | None) -> Transport:
        return Script()

    with pytest.raises(ConnectionFailed):
        async with Client(dial).resume("handle"):
            pass
    async with Client(dial).session() as chat:
        assert chat.handle is None


def test_addresses_take_more_parameters() -> None:
    assert realtime_url("ws://h:1", "m", resumable="true") == "ws://h:1/v1/realtime?model=m&resumable=true"
