"""Addresses, and a real WebSocket on loopback: frames both ways, and the error of each ending."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from holdfast.gateway.settings import DEFAULT_HOST, DEFAULT_PORT
from holdfast.sdk.client import connect
from holdfast.sdk.connection.reconnect import Patience
from holdfast.sdk.connection.transport import DEFAULT_URL, dial, realtime_url
from holdfast.sdk.errors import ConnectionFailed, ConnectionLost, KeyRejected, ModelUnknown, ServerUnavailable
from holdfast.sdk.frames import codec, server
from holdfast.sdk.frames.session import SessionResource


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


@asynccontextmanager
async def refusing(status: int, body: bytes) -> AsyncIterator[str]:
    """A server that answers every connection so; yields its address."""

    def answer(connection: ServerConnection, request: Request) -> Response:
        return Response(status, "Refused", Headers({"Content-Length": str(len(body))}), body)

    async def never(connection: ServerConnection) -> None:
        raise AssertionError("it was not refused")

    async with serve(never, "127.0.0.1", 0, process_request=answer) as listening:
        yield f"ws://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((401, KeyRejected), (403, KeyRejected), (404, ModelUnknown)),
        *((429, ServerUnavailable), (503, ServerUnavailable), (500, ConnectionFailed)),
    ],
)
async def test_a_refusal_has_its_kind_and_the_servers_words(
    status: int, kind: type[ConnectionFailed]
) -> None:
    told = {"error": {"type": "invalid_request_error", "code": "some_code", "message": "It is so."}}
    async with refusing(status, json.dumps(told).encode()) as url:
        with pytest.raises(ConnectionFailed, match=f"{status}: It is so.") as refused:
            await dial(url)
    assert type(refused.value) is kind
    assert (refused.value.status, refused.value.server_code) == (status, "some_code")
    assert ("api_key=" in refused.value.message) == (status == 401), "how this client is given its key"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("body", "words"),
    [
        *((b"", "Refused"), (b"busy", "busy"), (b"<html>" + b"x" * 9000, "Refused")),
        *((b"\xff[]", "\ufffd[]"), (b'{"error": "a bare text"}', "a bare text")),
        (b'{"error": {"message": ""}}', "Refused"),
    ],
)
async def test_a_proxys_answer_is_told_if_it_is_short(body: bytes, words: str) -> None:
    async with refusing(503, body) as url:
        with pytest.raises(ServerUnavailable) as refused:
            await dial(url)
    assert words in refused.value.message and len(refused.value.message) < 700


@pytest.mark.anyio
async def test_a_rejected_key_is_not_tried_again() -> None:
    tries = []

    async def rejected() -> None:
        tries.append(1)
        raise KeyRejected("no", 401)

    with pytest.raises(KeyRejected):
        await Patience(first=0.001, total=5.0).retry(rejected)
    assert tries == [1]


@pytest.mark.anyio
async def test_the_address_and_the_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def answer(connection: ServerConnection, request: Request) -> Response:
        seen.append(request.headers.get("Authorization"))
        return Response(401, "Refused", Headers(), b"")

    async def never(connection: ServerConnection) -> None:
        raise AssertionError("it was not refused")

    async with serve(never, "127.0.0.1", 0, process_request=answer) as listening:
        monkeypatch.setenv("HOLDFAST_URL", f"ws://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
        monkeypatch.setenv("HOLDFAST_API_KEY", "from the environment")
        for given in (None, "mine", ""):
            async with connect(api_key=given) as client:
                with pytest.raises(KeyRejected):
                    async with client.session():
                        pass
    assert seen == ["Bearer from the environment", "Bearer mine", None]


def test_without_an_address_the_server_of_this_machine_is_meant() -> None:
    assert f"ws://{DEFAULT_HOST}:{DEFAULT_PORT}" == DEFAULT_URL


@pytest.mark.anyio
async def test_a_close_is_not_held_up_by_frames_that_nobody_reads() -> None:
    """As after a reply that its reader has left: the server is still writing."""

    async def behave(connection: ServerConnection) -> None:
        with suppress(ConnectionClosed):
            while True:
                await connection.send("x" * 4000)

    async with serve(behave, "127.0.0.1", 0, compression=None) as listening:
        port = next(iter(listening.sockets)).getsockname()[1]
        transport = await dial(f"ws://127.0.0.1:{port}")
        await transport.receive()
        with anyio.fail_after(5):  # websockets waits 10 s for the answer to its close
            await transport.aclose()
