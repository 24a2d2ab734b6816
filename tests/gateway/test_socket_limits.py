"""What one socket can make the server keep or do is bounded; what an honest one sends is not cut."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trustme
import uvicorn
import websockets

from holdfast.gateway.net import websocket_connection
from holdfast.gateway.net.deadlines import Deadlines
from holdfast.gateway.net.http_connection import http_protocol
from holdfast.gateway.net.listener import Door, listen
from holdfast.gateway.net.rates import Rate, TokenBucket
from holdfast.gateway.net.websocket_connection import websocket_protocol
from holdfast.gateway.settings import ClientLimits

pytestmark = pytest.mark.anyio
UNBOUNDED = Rate(1e12, 10**12)
MARK, TLS_MARK = 64 << 10, 512 << 10
"""asyncio's: above it a transport is not written to."""
UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
TEXT, CONTINUATION, CLOSE, PING, PONG = 1, 0, 8, 9, 10


def frame(opcode: int, payload: bytes = b"", *, final: bool = True) -> bytes:
    """A client's frame, masked with zeros."""
    assert len(payload) < 126
    return bytes([opcode | 0x80 * final, 0x80 | len(payload)]) + bytes(4) + payload


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Opcode and payload of a server's frame."""
    first, length = await reader.readexactly(2)
    if length == 126:
        (length,) = struct.unpack("!H", await reader.readexactly(2))
    elif length == 127:
        (length,) = struct.unpack("!Q", await reader.readexactly(8))
    return first & 0x0F, await reader.readexactly(length)


async def echo(scope: dict, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": message["text"]})


def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's and its clients'."""
    authority = trustme.CA()
    secured, trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.issue_cert("localhost").configure_cert(secured)
    authority.configure_trust(trusting)
    return secured, trusting


class Listening:
    """A server of ``app`` with these limits, in this process; ``trusting``: its clients' TLS."""

    def __init__(
        self, server: uvicorn.Server, address: tuple[str, int], trusting: ssl.SSLContext | None = None
    ) -> None:
        self.server = server
        self.address = address
        self.trusting = trusting

    @property
    def unsent(self) -> int:
        """Bytes in the transports of all connections."""
        return sum(one.transport.get_write_buffer_size() for one in self.server.server_state.connections)

    @asynccontextmanager
    async def raw(
        self, *, upgraded: bool = True
    ) -> AsyncIterator[tuple[asyncio.StreamReader, socket.socket]]:
        """A connection with small buffers: its reader, and its socket, which never blocks."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, self.address)
        named = None if self.trusting is None else "localhost"
        reader, writer = await asyncio.open_connection(
            sock=sock, limit=1024, ssl=self.trusting, server_hostname=named
        )
        try:
            if upgraded:
                writer.write(UPGRADE)
                await reader.readuntil(b"\r\n\r\n")
            yield reader, writer
        finally:
            writer.transport.abort()


@asynccontextmanager
async def listening(
    limits: ClientLimits, app: Callable[..., Awaitable[None]] = echo, *, tls: bool = False
) -> AsyncIterator[Listening]:
    secured, trusting = contexts() if tls else (None, None)
    config = uvicorn.Config(
        app,
        http=http_protocol(limits, Door(Deadlines(limits, asyncio.get_running_loop()))),
        ws=websocket_protocol(limits),
        lifespan="off",
        log_config=None,
        ssl_context_factory=None if secured is None else lambda config, default: secured,
    )
    config.load()
    server = uvicorn.Server(config)
    with listen("127.0.0.1", 0, limits) as sock:
        serving = asyncio.create_task(server.serve([sock]))
        yield Listening(server, sock.getsockname()[:2], trusting)
        server.should_exit = True
        await serving


async def flooded(writer: asyncio.StreamWriter, data: bytes, seconds: float = 1.0) -> int:
    """Write ``data`` until none is taken for ``seconds``. Returns the bytes that were written."""
    sent = 0
    for _ in range(2000):
        writer.write(data)
        try:
            async with asyncio.timeout(seconds):
                await writer.drain()
        except (TimeoutError, ConnectionError):
            break
        sent += len(data)
    return sent


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
async def test_pings_of_a_client_that_does_not_read_are_not_read_and_not_kept(tls: bool) -> None:
    limits = replace(ClientLimits(), control_frames=UNBOUNDED, send_buffer_bytes=4096)
    pings = frame(PING, b"x" * 125) * 500
    async with listening(limits, tls=tls) as server, server.raw() as (_, writer):
        sent = await flooded(writer, pings)
        assert server.unsent <= (TLS_MARK if tls else MARK) + 200
        assert sent < 2000 * len(pings), "the server stopped reading"


async def test_of_pings_that_come_together_the_latest_is_answered() -> None:
    async with listening(ClientLimits()) as server, server.raw() as (reader, writer):
        writer.write(b"".join(frame(PING, b"%d" % number) for number in range(100)))
        writer.write(frame(TEXT, b"done"))
        pongs = []
        while (got := await read_frame(reader))[0] != TEXT:
            pongs.append(got)
        assert pongs[-1] == (PONG, b"99") and len(pongs) < 10


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
async def test_too_many_control_frames_close_the_socket_with_1008(tls: bool) -> None:
    limits = replace(ClientLimits(), control_frames=Rate(1e-9, 50))
    async with listening(limits, tls=tls) as server, server.raw() as (reader, writer):
        for _ in range(50):
            writer.write(frame(PING, b"x"))
        writer.write(frame(TEXT, b"still here"))
        while (got := await read_frame(reader))[0] != TEXT:
            assert got[0] == PONG
        writer.write(frame(PONG))
        while (got := await read_frame(reader))[0] != CLOSE:
            assert got[0] == PONG
        assert got[1] == struct.pack("!H", 1008) + b"too_many_control_frames"


async def test_a_message_in_too_many_fragments_closes_the_socket_with_1008() -> None:
    limits = replace(ClientLimits(), fragments=100, frames=UNBOUNDED)
    whole = frame(TEXT, b"a", final=False) + frame(CONTINUATION, b"b", final=False) * 98
    async with listening(limits) as server, server.raw() as (reader, writer):
        writer.write(whole + frame(CONTINUATION, b"c"))
        assert await read_frame(reader) == (TEXT, b"a" + b"b" * 98 + b"c")
        writer.write(whole + frame(CONTINUATION, final=False) * 100_000)
        assert await read_frame(reader) == (CLOSE, struct.pack("!H", 1008) + b"too_many_fragments")


async def test_frames_that_come_too_fast_are_read_later_and_none_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock of the bucket stands still, so that the rest waits until the test lets time go on."""
    limits = replace(ClientLimits(), frames=Rate(1000.0, 10))
    now, got, taken = [0.0], [], asyncio.Event()
    monkeypatch.setattr(
        websocket_connection, "TokenBucket", lambda rate, _: TokenBucket(rate, lambda: now[0])
    )

    async def collect(scope: dict, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            got.append(message["text"])
            taken.set()

    async with listening(limits, collect) as server, server.raw() as (_, writer):
        writer.write(b"".join(frame(TEXT, b"%d" % number) for number in range(2000)))
        await taken.wait()
        for _ in range(5000):
            await asyncio.sleep(0)
        assert len(got) <= 10 + 4096 // 7, "one slice beyond the burst"
        while len(got) < 2000:
            taken.clear()
            now[0] += 1.0
            await taken.wait()
        assert got == [str(number) for number in range(2000)]


async def test_frames_before_a_client_vanished_are_passed_on() -> None:
    got, ended = [], asyncio.Event()

    async def slow(scope: dict, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            got.append(message["text"])
            await asyncio.sleep(0)
        ended.set()

    limits = replace(ClientLimits(), frames=Rate(100.0, 5))
    async with listening(limits, slow) as server, server.raw() as (_, writer):
        writer.write(b"".join(frame(TEXT, b"%d" % number) for number in range(100)))
        await writer.drain()
        writer.write_eof()
        await ended.wait()
    assert got == [str(number) for number in range(100)]


async def test_an_honest_stream_of_small_frames_is_never_cut() -> None:
    async with listening(ClientLimits()) as server:
        host, port = server.address
        async with websockets.connect(f"ws://{host}:{port}", compression=None) as client:
            pieces = [os.urandom(256).hex() for _ in range(2048)]
            sending = asyncio.create_task(client.send(pieces))
            assert await client.recv() == "".join(pieces)
            await sending
            for number in range(3000):
                await client.send(str(number))
                assert await client.recv() == str(number)
            for _ in range(100):
                await (await client.ping())


async def test_pipelined_requests_of_a_client_that_does_not_read_wait_unread() -> None:
    async def large(scope: dict, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8192")]})
        await send({"type": "http.response.body", "body": b"x" * 8192})

    limits = replace(ClientLimits(), send_buffer_bytes=4096)
    request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with listening(limits, large) as server, server.raw(upgraded=False) as (_, writer):
        sent = await flooded(writer, request * 500)
        assert server.unsent <= MARK + 8192 + 1024
        assert sent < 2000 * 500 * len(request), "the server stopped reading"


async def test_a_body_that_goes_on_after_the_answer_ends_the_connection() -> None:
    async def refuse(scope: dict, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 405, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    limits = replace(ClientLimits(), header_seconds=0.2)
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with listening(limits, refuse) as server, server.raw(upgraded=False) as (reader, writer):
        writer.write(head)
        assert b"405" in await reader.readuntil(b"\r\n\r\n")

        async def go_on() -> None:
            while True:  # a fast machine sends much before the deadline
                writer.write(b"1\r\nx\r\n" * 100)
                await writer.drain()
                await asyncio.sleep(0)

        with pytest.raises(ConnectionError):
            await go_on()


def test_a_bucket_refills_up_to_its_burst_and_pays_its_debt_first() -> None:
    now = [0.0]
    bucket = TokenBucket(Rate(per_second=2.0, burst=3), lambda: now[0])
    assert [bucket.spend() for _ in range(5)] == [True, True, True, False, False]
    assert bucket.seconds_until(0.0) == 1.0
    now[0] = 1.5
    assert bucket.seconds_until(0.0) == 0.0
    assert [bucket.spend() for _ in range(2)] == [True, False]
    now[0] = 100.0
    assert [bucket.spend() for _ in range(4)] == [True, True, True, False]
