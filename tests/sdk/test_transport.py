"""Addresses, and a real WebSocket on loopback: frames both ways, and the error of each ending."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from websockets.asyncio.server import ServerConnection, serve

from holdfast.sdk.client import connect
from holdfast.sdk.errors import ConnectionFailed, ConnectionLost
from holdfast.sdk.frames import codec, server
from holdfast.sdk.frames.session import SessionResource
from holdfast.sdk.transport import dial, realtime_url


@pytest.mark.parametrize(
    ("url", "model", "address"),
    [
        ("ws://127.0.0.1:8421", None, "ws://127.0.0.1:8421/v1/realtime"),
        ("127.0.0.1:8421", "pocket", "ws://127.0.0.1:8421/v1/realtime?model=pocket"),
        ("https://host/v1/", "a b", "wss://host/v1/realtime?model=a+b"),
        ("wss://host/deep/realtime?x=1&model=old", "new", "wss://host/deep/realtime?x=1&model=new"),
        ("https://host/holdfast/", None, "wss://host/holdfast/v1/realtime"),
        ("https://host/holdfast/v1", None, "wss://host/holdfast/v1/realtime"),
        ("https://host/holdfast/v1/realtime/", None, "wss://host/holdfast/v1/realtime"),
        ("ws://[::1]:9/?model=kept", None, "ws://[::1]:9/v1/realtime?model=kept"),
    ],
)
def test_addresses(url: str, model: str | None, address: str) -> None:
    assert realtime_url(url, model) == address


@pytest.mark.parametrize("url", ["", "ftp://host", "ws://", "ws://host:99999", "ws://host:x", "ws://[::1"])
def test_invalid_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConnectionFailed):
        realtime_url(url)


@asynccontextmanager
async def greeting(code: int = 1000, reason: str = "") -> AsyncIterator[tuple[str, list[ServerConnection]]]:
    """A server that greets, echoes one frame and closes."""
    seen: list[ServerConnection] = []

    async def behave(connection: ServerConnection) -> None:
        seen.append(connection)
        hello = server.SessionCreated(event_id="e", session=SessionResource(id="s", model="m"))
        await connection.send(codec.encode(hello).decode())
        await connection.send(await connection.recv())
        await connection.close(code, reason)

    async with serve(behave, "127.0.0.1", 0) as listening:
        port = next(iter(listening.sockets)).getsockname()[1]
        yield f"ws://127.0.0.1:{port}", seen


@pytest.mark.anyio
async def test_frames_travel_as_text_and_the_close_code_is_raised() -> None:
    async with greeting(4001, "taken over") as (url, seen):
        transport = await dial(url, "pocket", "secret")
        assert b"session.created" in await transport.receive()
        await transport.send("é".encode())
        assert (await transport.receive()).decode() == "é"
        with pytest.raises(ConnectionLost) as caught:
            await transport.receive()
        assert (caught.value.close_code, "taken over" in caught.value.message) == (4001, True)
        with pytest.raises(ConnectionLost):
            await transport.send(b"x")
        await transport.aclose()
        request = seen[0].request
        assert request is not None
        assert request.path == "/v1/realtime?model=pocket"
        assert request.headers["Authorization"] == "Bearer secret"


@pytest.mark.anyio
async def test_no_server_listens() -> None:
    async with greeting() as (url, _):
        pass
    with pytest.raises(ConnectionFailed) as caught:
        await dial(url)
    assert url in caught.value.message


@pytest.mark.anyio
async def test_a_session_over_a_socket() -> None:
    async with greeting() as (url, _), connect(url) as client, client.session() as chat:
        assert chat.session.model == "m"
