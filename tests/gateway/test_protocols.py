"""The deadline for request heads, and the listening socket's bounds."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import uvicorn

from holdfast.gateway.protocols import http_protocol, listen
from holdfast.gateway.settings import Limits

pytestmark = pytest.mark.anyio
HASTY = replace(Limits(), header_seconds=0.05)
PATIENT = replace(Limits(), header_seconds=60.0)
REQUEST = b"GET / HTTP/1.1\r\nHost: here\r\n"


async def greet(scope: dict, receive: object, send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


@asynccontextmanager
async def connected(limits: Limits) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A raw connection to a server with this protocol."""
    config = uvicorn.Config(greet, http=http_protocol(limits), ws="none", lifespan="off", log_config=None)
    config.load()
    server = uvicorn.Server(config)
    loop = asyncio.get_running_loop()

    def protocol() -> asyncio.Protocol:
        return http_protocol(limits)(config, server.server_state, {})

    with listen("127.0.0.1", 0, limits) as sock:
        listening = await loop.create_server(protocol, sock=sock)
        async with listening:
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            try:
                yield reader, writer
            finally:
                writer.close()
                await asyncio.gather(writer.wait_closed(), return_exceptions=True)


@pytest.mark.parametrize("sent", [b"", REQUEST], ids=["silent", "half a head"])
async def test_a_head_that_does_not_come_ends_the_connection(sent: bytes) -> None:
    async with connected(HASTY) as (reader, writer):
        writer.write(sent)
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)


async def test_a_head_that_comes_in_pieces_is_served() -> None:
    async with connected(PATIENT) as (reader, writer):
        for piece in (REQUEST[:9], REQUEST[9:], b"\r\n"):
            writer.write(piece)
            await writer.drain()
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")


async def test_the_deadline_holds_for_a_second_request_too() -> None:
    async with connected(HASTY) as (reader, writer):
        writer.write(REQUEST + b"\r\n")
        await reader.readuntil(b"hi")
        writer.write(REQUEST)
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)


async def test_connections_inherit_the_bounds_of_the_listening_socket() -> None:
    limits = replace(Limits(), send_buffer_bytes=32768, stall_seconds=7.0)
    with listen("127.0.0.1", 0, limits) as sock:
        client = socket.create_connection(sock.getsockname())
        accepted, _ = sock.accept()
        with client, accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * 32768
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000


async def test_a_taken_port_is_an_os_error_that_says_so() -> None:
    with listen("127.0.0.1", 0, Limits()) as sock, pytest.raises(OSError) as taken:
        listen("127.0.0.1", sock.getsockname()[1], Limits())
    assert taken.value.errno == errno.EADDRINUSE


def test_an_accepted_socket_sends_small_frames_at_once() -> None:
    with listen("127.0.0.1", 0, Limits()) as server, socket.create_connection(server.getsockname()[:2]):
        accepted, _ = server.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
