"""Whatever a client sends or leaves out, and whatever library reads it, a real server answers or closes each
connection by its own timers."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest

from holdfast.gateway.net.deadlines import BOUNDS, ConnectionStage, Deadlines
from holdfast.gateway.net.listener import listen
from holdfast.gateway.net.rates import Rate
from holdfast.gateway.net.serving import served
from holdfast.gateway.settings import ClientLimits
from holdfast.tests.gateway.test_socket_limits import contexts

pytestmark = pytest.mark.anyio
HASTY = replace(
    ClientLimits(),
    header_seconds=0.3,
    idle_seconds=0.3,
    body_seconds=0.3,
    stall_seconds=0.3,
    close_seconds=0.3,
    ping_seconds=0.3,
    send_buffer_bytes=4096,
)
PATIENT = replace(ClientLimits(), **dict.fromkeys(("header_seconds", "body_seconds"), 60.0))
HOST = b"Host: localhost\r\n"
GET = b"GET / HTTP/1.1\r\n" + HOST
POST = b"POST / HTTP/1.1\r\n" + HOST
UPGRADE = (
    b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    b"Sec-WebSocket-Version: 13\r\n"
)
END = b"\r\n"
TLS_HELLO = b"\x16\x03\x01\x02\x00\x01"
MEBIBYTE = 1 << 20


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """``/large`` is answered with a mebibyte, ``/endless`` for ever, ``/early`` before its body, ``/silent``
    when its client leaves; others with what they sent. A WebSocket's messages come back."""
    if scope["type"] == "websocket":
        await receive()
        if scope["path"] == "/silent":
            await receive()
            return
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            await send({"type": "websocket.send", "text": message["text"]})
        return
    body, more = b"", True
    while (more and scope["path"] != "/early") or scope["path"] == "/silent":
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message.get("body", b""), message.get("more_body", False)
    if scope["path"] == "/large":
        body = b"x" * MEBIBYTE
    if scope["path"] == "/endless":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"x" * 4096, "more_body": True})
            await asyncio.sleep(0)
    length = b"%d" % len(body)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
    await send({"type": "http.response.body", "body": body})


class Held:
    """A server of ``app`` with ``limits``. ``open``: its connections. ``trusting``: its clients' TLS."""

    def __init__(self, open_: Deadlines, address: tuple[str, int], trusting: ssl.SSLContext | None) -> None:
        self.open = open_
        self._address = address
        self._trusting = trusting

    async def connect(self, *, plain: bool = False) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A client with small buffers. ``plain``: without TLS in any case."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, self._address)
        if plain or self._trusting is None:
            return await asyncio.open_connection(sock=sock, limit=1024)
        return await asyncio.open_connection(
            sock=sock, limit=1024, ssl=self._trusting, server_hostname="localhost"
        )

    async def empty(self) -> None:
        """Wait until no connection is left."""
        while len(self.open):  # noqa: ASYNC110 (what it watches has no event)
            await asyncio.sleep(0.001)

    async def told(self, *sent: bytes) -> bytes:
        """What the server answers to these bytes, sent one after another, until it ends the connection."""
        reader, writer = await self.connect()
        try:
            for data in sent:
                writer.write(data)
                await writer.drain()
                await asyncio.sleep(0)
            return await ended(reader)
        except ConnectionError:
            return b""
        finally:
            writer.transport.abort()


async def ended(reader: asyncio.StreamReader) -> bytes:
    """All that comes, until the connection is over."""
    found = b""
    with suppress(ConnectionError, ssl.SSLError):
        while data := await reader.read(1 << 16):
            found += data
    return found


@asynccontextmanager
async def held(limits: ClientLimits = HASTY, *, tls: bool = False) -> AsyncIterator[Held]:
    secured, trusting = contexts() if tls else (None, None)
    sock = listen("127.0.0.1", 0, limits)
    address = sock.getsockname()[:2]
    async with served(app, sock, limits, secured) as connections:  # type: ignore[arg-type]
        yield Held(connections, address, trusting)


both = pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])


def statuses(answers: bytes) -> list[int]:
    return [int(part[:3]) for part in answers.split(b"HTTP/1.1 ")[1:]]


CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
CUT: dict[str, tuple[bytes, list[int]]] = {
    "silent": (b"", []),  # an answer would be one to the next request
    "one byte": (b"G", [408]),
    "half a request line": (GET[:9], [408]),
    "half a head": (GET, [408]),
    "a head without its last byte": (GET + END[:1], [408]),
    "a PROXY line": (b"PROXY TCP4 192.0.2.1 192.0.2.2 1 2\r\n", [408]),
    "half a head of a WebSocket": (GET + UPGRADE, [408]),
    "half a second head": (GET + END + GET, [200, 408]),
    "half a body": (POST + b"Content-Length: 5\r\n\r\nab", [408]),
    "no body": (POST + b"Content-Length: 5\r\n\r\n", [408]),
    "half a chunk": (CHUNKED + b"5\r\nab", [408]),
    "no last chunk": (CHUNKED + b"2\r\nab\r\n", [408]),
    "an idle connection": (GET + END, [200]),
    "pipelined, then half": ((GET + END) * 5 + GET, [200] * 5 + [408]),
    "a WebSocket that sends nothing": (GET + UPGRADE + END, [101]),
    "a WebSocket with half a frame": (GET + UPGRADE + END + b"\x81\xfe\x00", [101]),
    "a WebSocket with half a message": (GET + UPGRADE + END + b"\x01\x81\x00\x00\x00\x00a", [101]),
    "a WebSocket that is not answered": (GET.replace(b"/", b"/silent", 1) + UPGRADE + END, []),
    "rubbish": (b"\x00\xff" * 100, [400]),
    "a TLS hello": (TLS_HELLO, [400]),
}
"""What may come of a connection, and then nothing more; and the answers to it."""


@both
async def test_a_connection_on_which_nothing_more_comes_is_over_in_time(tls: bool) -> None:
    async with held(tls=tls) as server:
        found = await asyncio.gather(*(server.told(sent) for sent, _ in CUT.values()))
        answers = dict(zip(CUT, found, strict=True))
        assert {name: statuses(answer) for name, answer in answers.items()} == {
            name: wanted for name, (_, wanted) in CUT.items()
        }
        slow = struct.pack("!H", 1008) + b"request_timeout"
        assert answers["a WebSocket with half a message"].endswith(slow)
        assert answers["a WebSocket with half a frame"].endswith(slow)
        await server.empty()


async def test_a_tls_handshake_that_does_not_end_is_over_in_time() -> None:
    async with held(tls=True) as server:
        for sent in (b"", b"\x16", TLS_HELLO):
            reader, writer = await server.connect(plain=True)
            writer.write(sent)
            await ended(reader)
            writer.close()
        await server.empty()


@both
async def test_an_answer_or_a_stream_that_is_not_read_is_dropped(tls: bool) -> None:
    large = GET.replace(b"/", b"/large", 1)
    async with held(tls=tls) as server:
        clients = []
        endless = large.replace(b"large", b"endless")
        for sent in (large + END, large + b"Connection: close\r\n\r\n", (large + END) * 3, endless + END):
            reader, writer = await server.connect()
            clients.append(writer)
            writer.write(sent)
            await reader.readexactly(10)
        await server.empty()
        for writer in clients:
            writer.transport.abort()


@both
async def test_a_connection_that_the_server_closes_is_over_though_its_client_does_not_close(
    tls: bool,
) -> None:
    async with held(tls=tls) as server:
        clients = []
        for sent in (b"\x00", GET + b"Connection: close\r\n\r\n", GET + UPGRADE.replace(b"13", b"12") + END):
            reader, writer = await server.connect()
            clients.append(writer)
            writer.write(sent)
            await reader.readexactly(10)
            writer.transport.pause_reading()  # it does not see the end
        await server.empty()
        for writer in clients:
            writer.transport.abort()


REJECTED = {
    "chunked": UPGRADE + b"Transfer-Encoding: chunked\r\n",
    "with a body": UPGRADE + b"Content-Length: 5\r\n",
    "no key": UPGRADE.replace(b"Sec-WebSocket-Key", b"X"),
    "a wrong key": UPGRADE.replace(b"dGhl", b"====", 1),
    "a key of 9,000 bytes": UPGRADE.replace(b"dGhl", b"d" * 9000, 1),
    "two keys": UPGRADE + b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
    "a wrong version": UPGRADE.replace(b"13", b"12"),
    "a control character": UPGRADE.replace(b"dGhl", b"d\x01hl"),
    "a key in Latin-1": UPGRADE.replace(b"dGhl", b"d\xe9hl"),
}


@both
@pytest.mark.parametrize("name", REJECTED)
async def test_a_websocket_that_is_rejected_gets_an_answer_and_a_close(name: str, tls: bool) -> None:
    async with held(PATIENT, tls=tls) as server:
        (status,) = statuses(await server.told(GET + REJECTED[name] + END))
        assert 400 <= status < 500
        await server.empty()


@pytest.mark.parametrize(
    ("line", "status"),
    [(b"POST / HTTP/1.1\r\n", 405), (b"GET / HTTP/1.0\r\n", 505)],
    ids=["POST", "HTTP/1.0"],
)
async def test_a_websocket_by_another_method_or_version_is_rejected(line: bytes, status: int) -> None:
    async with held(PATIENT) as server:
        assert statuses(await server.told(line + HOST + UPGRADE + END)) == [status]


@pytest.mark.parametrize("upgrade", [b"", UPGRADE], ids=["HTTP", "WebSocket"])
async def test_large_cookies_are_served_up_to_the_limit_and_refused_beyond_it(upgrade: bytes) -> None:
    most = PATIENT.header_bytes
    async with held(PATIENT) as server:
        for size, status in (
            (9000, 101 if upgrade else 200),
            (most - 512, 101 if upgrade else 200),
            (most, 431),
        ):
            reader, writer = await server.connect()
            writer.write(GET + b"Cookie: " + b"c" * size + END + upgrade + END)
            assert statuses(await reader.readuntil(b"\r\n\r\n")) == [status], size
            writer.transport.abort()
        assert statuses(await server.told(GET + b"A: b\r\n" * 300 + upgrade + END)) == [431]
        assert statuses(await server.told(b"GET /" + b"a" * most)) == [431], "before its end"


AMBIGUOUS = {
    "length and chunks": b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
    "chunks and length": b"transfer-encoding: chunked\r\ncontent-length: 5\r\n",
    "one length twice": b"Content-Length: 5\r\nContent-Length: 5\r\n",
    "two lengths": b"Content-Length: 5\r\nContent-Length: 6\r\n",
    "a list of lengths": b"Content-Length: 5, 5\r\n",
    "a length with a sign": b"Content-Length: +5\r\n",
    "chunks twice": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
    "another coding": b"Transfer-Encoding: gzip, chunked\r\n",
    "an unknown coding": b"Transfer-Encoding: xchunked\r\n",
    "a folded line": b"X: a\r\n Content-Length: 5\r\n",
    "a folded length": b"Content-Length:\r\n 5\r\n",
    "a carriage return alone": b"X: a\rContent-Length: 5\r\n",
    "a line feed alone": b"X: a\nContent-Length: 5\r\n",
    "a zero byte": b"X: a\x00\r\n",
    "a blank before the colon": b"Content-Length : 5\r\n",
    "two hosts": b"Host: elsewhere\r\n",
}


@pytest.mark.parametrize("name", AMBIGUOUS)
async def test_a_head_that_can_be_read_in_two_ways_is_refused_and_ends_its_connection(name: str) -> None:
    """Also as the second request, behind one that is served. What follows it is no request."""
    smuggled = b"0\r\n\r\n" + GET + END
    async with held(PATIENT) as server:
        refused = POST + AMBIGUOUS[name] + END + smuggled
        assert statuses(await server.told(refused)) == [400]
        assert statuses(await server.told(GET + END + refused)) == [200, 400]
        assert statuses(await server.told(POST + b"Content-Length: 2\r\n\r\nab" + refused)) == [200, 400]
        assert statuses(await server.told(POST + b"Content-Length: 2\r\n\r\na", b"b" + refused)) == [200, 400]
        reader, writer = await server.connect()
        writer.write(POST.replace(b"/", b"/early", 1) + b"Content-Length: 2\r\n\r\na")
        assert statuses(await reader.readuntil(b"\r\n\r\n")) == [200]
        writer.write(b"b" + refused)
        assert statuses(await ended(reader)) == [400], "behind a body that came after its answer"
        writer.transport.abort()


async def test_chunks_in_http_1_0_are_refused() -> None:
    async with held(PATIENT) as server:
        sent = b"POST / HTTP/1.0\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        assert statuses(await server.told(sent)) == [400]


@pytest.mark.parametrize(
    "wrong", [b"zz\r\n", b"5\r\nabcdefg\r\n", b"1\r\nx\r\n" * 3000], ids=["size", "end", "tiny"]
)
async def test_a_chunk_that_is_wrong_ends_its_connection_with_an_answer(wrong: bytes) -> None:
    async with held(PATIENT) as server:
        assert statuses(await server.told(CHUNKED + wrong)) == [400]
        assert statuses(await server.told(CHUNKED, wrong)) == [400]


async def test_honest_chunks_of_any_size_are_a_body() -> None:
    async with held(PATIENT) as server:
        for size, count in ((1, 500), (700, 3000)):
            reader, writer = await server.connect()
            chunk = b"%x\r\n%s\r\n" % (size, b"x" * size)
            writer.write(CHUNKED + chunk * count + b"0\r\n\r\n")
            assert statuses(await reader.readuntil(b"\r\n\r\n")) == [200]
            assert len(await reader.readexactly(size * count)) == size * count
            writer.transport.abort()


async def test_frames_behind_a_handshake_are_read_and_garbage_there_closes() -> None:
    async with held(PATIENT) as server:
        reader, writer = await server.connect()
        writer.write(GET + UPGRADE + END + b"\x81\x82\x00\x00\x00\x00hi")
        assert (await reader.readuntil(b"\x81\x02hi")).startswith(b"HTTP/1.1 101 ")
        writer.transport.abort()
        told = await server.told(GET + UPGRADE + END + b"\xff" * 10)
        assert struct.pack("!H", 1002) in told


PIECE = b"x" * MEBIBYTE
UNFINISHED = {
    "a frame": b"\x81\xff" + struct.pack("!QI", MEBIBYTE + 1, 0) + PIECE,
    "a message": b"\x01\xff" + struct.pack("!QI", MEBIBYTE, 0) + PIECE,
    "fragments without text": b"\x01\x80\x00\x00\x00\x00" + b"\x00\x80\x00\x00\x00\x00" * 4000,
}


@pytest.mark.parametrize("name", UNFINISHED)
async def test_messages_that_do_not_end_have_little_memory_together(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that have waited longest are cut; one that sends whole messages is not."""
    most = 20 * len(UNFINISHED[name])
    if name == "fragments without text":
        most *= 10  # each costs more than it has
    monkeypatch.setitem(BOUNDS, (ConnectionStage.MESSAGE,), most)
    async with held(replace(PATIENT, frames=Rate(1e9, 1 << 30))) as server:

        async def opened() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await server.connect()
            writer.write(GET + UPGRADE + END)
            await reader.readuntil(b"\r\n\r\n")
            return reader, writer

        honest, says = await opened()
        clients = [await opened() for _ in range(30)]
        for _, writer in clients:
            writer.write(UNFINISHED[name])
            with suppress(ConnectionError):
                await writer.drain()
            says.write(b"\x81\x82\x00\x00\x00\x00hi")
            assert await honest.readexactly(4) == b"\x81\x02hi"
        while (left := len(server.open)) > 22:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert left > 8
        assert await ended(clients[0][0]) == b""
        for _, writer in (*clients, (honest, says)):
            writer.transport.abort()


@both
async def test_the_server_ends_beside_clients_that_hold_what_they_or_it_closed(tls: bool) -> None:
    """A WebSocket that its client has closed by a frame, and one that the server closes, over a connection that
    stays; a request without its body; a handshake of TLS."""
    slow = replace(PATIENT, close_seconds=0.3)
    closing = GET + UPGRADE + END + b"\x88\x82\x00\x00\x00\x00\x03\xe8"
    async with held(slow, tls=tls) as server:
        clients = [await server.connect(plain=True)]
        for sent in (closing, GET + UPGRADE + END, POST + b"Content-Length: 5\r\n\r\nab", GET, GET + END):
            reader, writer = await server.connect()
            clients.append((reader, writer))
            writer.write(sent)
            if sent in (closing, GET + UPGRADE + END, GET + END):
                await reader.readuntil(b"\r\n\r\n")
            writer.transport.pause_reading()
    for _, writer in clients:
        writer.transport.abort()


def drawn(rng: random.Random) -> list[bytes]:
    """The bytes of one connection, in pieces: requests of all kinds, whole, damaged, cut, glued."""
    data = b""
    for _ in range(rng.randint(1, 3)):
        line = rng.choice((b"GET", b"POST", b"BREW")) + b" / HTTP/1." + rng.choice((b"1", b"1", b"0")) + END
        fields = [HOST] * rng.choice((1, 1, 1, 0, 2))
        fields += rng.sample([UPGRADE, *REJECTED.values()], rng.choice((0, 0, 1)))
        fields += rng.sample(list(AMBIGUOUS.values()), rng.choice((0, 0, 1)))
        fields += [b"Cookie: %s\r\n" % (b"c" * rng.choice((0, 9000, 40_000)))] * rng.choice((0, 0, 1))
        body = rng.choice((b"", b"", b"Content-Length: 4\r\n", b"Transfer-Encoding: chunked\r\n"))
        fields.append(body)
        rng.shuffle(fields)
        behind = rng.choice((b"abcd", b"4\r\nabcd\r\n0\r\n\r\n", b"ab", b"4\r\nab", b"")) if body else b""
        data += line + b"".join(fields) + END + behind
    if rng.random() < 0.3:
        data = data[: rng.randrange(len(data) + 1)]
    if rng.random() < 0.2:
        at = rng.randrange(len(data) + 1)
        data = data[:at] + rng.randbytes(3) + data[at:]
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice((0, 1, 4))))
    return [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@both
async def test_whatever_comes_each_connection_is_answered_or_closed(tls: bool) -> None:
    rng = random.Random(7)
    async with held(tls=tls) as server:
        for _ in range(6):
            answers = await asyncio.gather(*(server.told(*drawn(rng)) for _ in range(50)))
            await server.empty()
            found = [status for answer in answers for status in statuses(answer)]
            assert {200, 400, 408} <= set(found) and 500 not in found
