"""The deadline for request heads, the listening socket's bounds, and a client that takes nothing."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import uvicorn
import websockets
from websockets.asyncio.client import ClientConnection

from holdfast.gateway.access.turn_queue import PLACE, Place, TurnQueue
from holdfast.gateway.net.deadlines import ConnectionStage, Deadlines
from holdfast.gateway.net.http_connection import LimitedHTTP, http_protocol
from holdfast.gateway.net.listener import Decide, Door, Refused, listen
from holdfast.gateway.net.serving import served
from holdfast.gateway.net.websocket_connection import BURST
from holdfast.gateway.settings import ClientLimits

pytestmark = pytest.mark.anyio
PATIENT = replace(ClientLimits(), header_seconds=60.0)
REQUEST = b"GET / HTTP/1.1\r\nHost: here\r\n"


async def greet(scope: dict, receive: object, send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


def undecided(data: bytes, peer: object, *, close: bool) -> None:
    """Decides nothing."""


@asynccontextmanager
async def connected(
    limits: ClientLimits,
    decide: Decide = undecided,
    app: Any = greet,
    made: list[Any] | None = None,
    parsed: list[bytes] | None = None,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A raw connection to a server with this protocol. ``made`` gets the protocol's objects, ``parsed`` what
    the parser gets."""
    loop = asyncio.get_running_loop()
    bound = http_protocol(limits, Door(Deadlines(limits, loop), decide))

    class Noted(bound):  # type: ignore[valid-type, misc]
        def handle_events(self) -> None:
            if parsed is not None:
                parsed.append(self.conn.trailing_data[0])
            super().handle_events()

    config = uvicorn.Config(app, http=Noted, ws="none", lifespan="off", log_config=None)
    config.load()
    server = uvicorn.Server(config)

    def protocol() -> asyncio.Protocol:
        one: LimitedHTTP = Noted(config, server.server_state, {})
        if made is not None:
            made.append(one)
        return one

    with listen("127.0.0.1", 0, limits) as sock:
        listening = await loop.create_server(protocol, sock=sock)
        async with listening:
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            try:
                yield reader, writer
            finally:
                writer.close()
                await asyncio.gather(writer.wait_closed(), return_exceptions=True)


@pytest.mark.parametrize("size", [1, 2, 9, len(REQUEST), len(REQUEST) + 1])
async def test_a_head_that_comes_in_pieces_is_one_decision_and_one_parse(size: int) -> None:
    decided, parsed = list[bytes](), list[bytes]()

    def decide(data: bytes, peer: object, *, close: bool) -> None:
        decided.append(data)

    async with connected(PATIENT, decide, parsed=parsed) as (reader, writer):
        for request in (REQUEST + b"\r\n", REQUEST.replace(b"\r", b"") + b"\n"):
            for at in range(0, len(request), size):
                writer.write(request[at : at + size])
                await writer.drain()
                await asyncio.sleep(0)
            assert (await reader.readuntil(b"hi")).startswith(b"HTTP/1.1 200")
            assert decided == [request]
            assert parsed[0] == request
            decided.clear(), parsed.clear()


@pytest.mark.parametrize("sent", [b"\x16\x03\x01", b"GET / HTTP/1.1\r\nX: " + b"x" * 40000])
async def test_what_can_become_no_head_is_refused_before_its_end(sent: bytes) -> None:
    async with connected(PATIENT) as (reader, writer):
        writer.write(sent)
        assert (await reader.readline()).startswith(b"HTTP/1.1 4")


async def test_a_refused_request_leaves_its_connection_open_unless_its_answer_is_not_read() -> None:
    answers, end = [b"short", b"long" * (1 << 22)], b"\r\n\r\n"

    def decide(data: bytes, peer: object, *, close: bool) -> Refused | None:
        return Refused(answers[data[0] == ord("L")], close) if data[:1] in b"SL" else None

    async with connected(PATIENT, decide) as (reader, writer):
        for sent, told in ((b"S", b"short"), (REQUEST[:-2], b"HTTP/1.1 200 OK\r\n"), (b"S", b"short")):
            writer.write(sent + end)
            assert await reader.readexactly(len(told)) == told
            if told.startswith(b"HTTP"):
                await reader.readuntil(b"hi")
        writer.write(b"L" + end)
        assert len(await reader.read()) == len(answers[1]), "closed behind it"


async def test_each_refusal_gives_its_connection_as_much_time_as_an_answer_does() -> None:
    made: list[Any] = []

    def decide(data: bytes, peer: object, *, close: bool) -> Refused | None:
        return Refused(b"no", close) if data == refused else None

    refused = REQUEST.replace(b"/", b"/refused") + b"\r\n"
    async with connected(PATIENT, decide, made=made) as (reader, writer):
        times = []
        for sent, told in ((refused, b"no"), (refused, b"no"), (REQUEST + b"\r\n", b"hi"), (refused, b"no")):
            writer.write(sent)
            await reader.readuntil(told)
            assert made[0].deadline.stage is ConnectionStage.IDLE, "no head is awaited"
            times.append(made[0].deadline.due)
        assert times == sorted(set(times))


@pytest.mark.parametrize("more", [b"\r\n", REQUEST + b"\r\n", REQUEST])
async def test_what_comes_behind_a_request_leaves_it_its_place(more: bytes) -> None:
    queue, places, made, go = TurnQueue(), list[Place](), list[Any](), asyncio.Event()

    def decide(data: bytes, peer: object, *, close: bool) -> Place | None:
        if not places:
            places.append(Place(queue, b""))
            return places[0]
        return None

    async def wait(scope: dict, receive: object, send) -> None:
        if len(places) == 1:
            places.append(scope[PLACE])
            await go.wait()
        else:
            assert PLACE not in scope
        await greet(scope, receive, send)

    async with connected(PATIENT, decide, wait, made) as (reader, writer):
        writer.write(REQUEST + b"\r\n")
        while len(places) < 2:  # noqa: ASYNC110 (what it watches has no event)
            await asyncio.sleep(0)
        writer.write(more)
        while made[0].conn.trailing_data[0] != more:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert places[0] is places[1] and places[0].free and len(queue) == 1
        places.append(places[0])
        go.set()
        await reader.readuntil(b"hi")
        assert len(queue) == 0
        if more == REQUEST + b"\r\n":
            await reader.readuntil(b"hi")


async def test_connections_inherit_the_bounds_of_the_listening_socket() -> None:
    limits = replace(ClientLimits(), send_buffer_bytes=32768, stall_seconds=7.0)
    with listen("127.0.0.1", 0, limits) as sock:
        client = socket.create_connection(sock.getsockname())
        accepted, _ = sock.accept()
        with client, accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * 32768
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000


async def test_a_taken_port_is_an_os_error_that_says_so() -> None:
    with listen("127.0.0.1", 0, ClientLimits()) as sock, pytest.raises(OSError) as taken:
        listen("127.0.0.1", sock.getsockname()[1], ClientLimits())
    assert taken.value.errno == errno.EADDRINUSE


def test_an_accepted_socket_sends_small_frames_at_once() -> None:
    with listen("127.0.0.1", 0, ClientLimits()) as server, socket.create_connection(server.getsockname()[:2]):
        accepted, _ = server.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@asynccontextmanager
async def talking(app: Callable[..., Awaitable[None]]) -> AsyncIterator[ClientConnection]:
    """A WebSocket to ``app`` by our protocol."""
    sock = listen("127.0.0.1", 0, PATIENT)
    host, port = sock.getsockname()
    async with (
        served(app, sock, PATIENT),  # type: ignore[arg-type]
        websockets.connect(f"ws://{host}:{port}", compression=None) as client,
    ):
        yield client


async def test_an_accepted_socket_keeps_no_headers() -> None:
    seen: list[int] = []

    async def accepting(scope: dict, receive, send) -> None:
        await receive()
        kept = scope["headers"]  # as a framework that reads them does
        seen.append(len(kept))
        await send({"type": "websocket.accept"})
        seen.append(len(kept) + len(scope["headers"]))
        await send({"type": "websocket.send", "text": "hi"})
        while (await receive())["type"] == "websocket.receive":
            pass

    async with talking(accepting) as client:
        assert await client.recv() == "hi"
    assert seen[0] > 3 and seen[1] == 0


async def test_several_frames_leave_in_one_write() -> None:
    async def telling(scope: dict, receive, send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        write_now = scope["extensions"][BURST]["write_now"]
        assert write_now(b"one") and write_now(b"two", b"x" * 70_000, b"three")
        while (await receive())["type"] == "websocket.receive":
            pass

    async with talking(telling) as client:
        assert [await client.recv() for _ in range(4)] == ["one", "two", "x" * 70_000, "three"]


async def test_a_client_that_is_behind_is_sent_no_more_and_gets_all_in_order() -> None:
    """As long as the application takes each message there is no pause."""
    reads, got, text = asyncio.Event(), [], "x" * 100_000

    async def slow(scope: dict, receive, send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await reads.wait()
        while (message := await receive())["type"] == "websocket.receive":
            got.append(message["text"])

    async with talking(slow) as client:

        async def flood() -> None:
            for number in range(200):
                await client.send(f"{number} {text}")

        flooding = asyncio.create_task(flood())
        done, _ = await asyncio.wait({flooding}, timeout=1.0)
        assert not done, "20 MB were sent, and the client took nothing"
        reads.set()
        await flooding
    assert [one.partition(" ")[0] for one in got] == [str(number) for number in range(200)]


async def test_messages_that_are_taken_one_by_one_never_stop_the_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paused = []
    pause = asyncio.selector_events._SelectorSocketTransport.pause_reading
    monkeypatch.setattr(
        asyncio.selector_events._SelectorSocketTransport,
        "pause_reading",
        lambda transport: (paused.append(transport), pause(transport))[1],
    )

    async def echo(scope: dict, receive, send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            await send({"type": "websocket.send", "text": message["text"]})

    async with talking(echo) as client:
        for number in range(20):
            await client.send(str(number))
            assert await client.recv() == str(number)
    assert not paused
