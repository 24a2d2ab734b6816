"""The subprotocol `holdfast.msgpack` over a real socket: the same objects, in binary frames."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import websockets
from websockets.typing import Subprotocol

from holdfast.gateway.server import serving
from holdfast.gateway.settings import GatewaySettings
from holdfast.runtime.settings import EngineSettings
from holdfast.sdk.client import connect
from holdfast.sdk.connection.transport import WebSocketTransport, dial
from holdfast.sdk.frames import codec, packed

pytestmark = pytest.mark.anyio

ITEM = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "My name is Marisol."}]}
ASK = {"type": "response.create", "items": [ITEM], "response": {"temperature": 0, "events": "brief"}}
PACKED, JSON = Subprotocol(packed.PACKED), Subprotocol("realtime")


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def url() -> AsyncIterator[str]:
    async with serving(GatewaySettings(port=0), EngineSettings(model="pocket")) as server:
        yield server.url.replace("http", "ws", 1)


class Wire:
    """A client without the SDK."""

    def __init__(self, socket: websockets.ClientConnection, *, binary: bool) -> None:
        self.socket = socket
        self.binary = binary

    async def send(self, event: Any) -> None:
        await self.socket.send(msgspec.msgpack.encode(event) if self.binary else json.dumps(event))

    async def next(self) -> Any:
        frame = await self.socket.recv()
        assert isinstance(frame, bytes) is self.binary, "one form on one socket"
        return msgspec.msgpack.decode(frame) if isinstance(frame, bytes) else json.loads(frame)

    async def until(self, kind: str) -> list[Any]:
        events = [await self.next()]
        while events[-1]["type"] != kind:
            events.append(await self.next())
        return events


async def test_the_same_events_come_in_both_forms(url: str) -> None:
    told = {}
    for offered, chosen in (
        ([PACKED], PACKED),
        ([JSON, PACKED], PACKED),
        ([JSON], JSON),
        (None, None),
    ):
        async with websockets.connect(f"{url}/v1/realtime", subprotocols=offered) as socket:
            assert socket.subprotocol == chosen
            wire = Wire(socket, binary=chosen == PACKED)
            await wire.until("conversation.created")
            await wire.send(ASK)
            events = await wire.until("response.done")
            told[str(offered)] = [(event["type"], event.get("delta")) for event in events]
            assert "Marisol" in "".join(event.get("delta", "") for event in events)
            assert events[-1]["response"]["usage"]["output_tokens"] > 3
    assert len(told) == 4 and len({str(events) for events in told.values()}) == 1


async def test_the_sdk_asks_for_it_and_works_as_in_json(url: str) -> None:
    async with connect(url, msgpack=True) as client, client.session() as chat:
        said = await chat.say("My name is Marisol.").text()
        assert "Marisol" in said
        async with client.resume(chat.handle) as other:
            assert "Marisol" in await other.say("What is my name?").text()
    transport = await dial(url, msgpack=True)
    assert isinstance(transport, WebSocketTransport) and transport._connection.subprotocol == PACKED
    greeting = json.loads(await transport.receive())
    assert greeting["type"] == "session.created", "a transport's frames are JSON"
    await transport.aclose()


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x81\xa4type",
        b"{}",
        msgspec.msgpack.encode({"type": "session.update", "session": {"instructions": b"raw"}}),
        msgspec.msgpack.encode({"type": "response.create", "response": {"temperature": float("nan")}}),
        msgspec.msgpack.encode({"type": "response.cancel", 1: 2}),
        msgspec.msgpack.encode({"type": "response.cancel", "response_id": msgspec.msgpack.Ext(1, b"x")}),
        b"\x91" * 30_000,
    ],
    ids=["empty", "no code", "cut", "JSON", "binary", "nan", "number as key", "extension", "deep"],
)
async def test_what_is_no_event_in_messagepack_is_answered_by_an_error(url: str, frame: bytes) -> None:
    async with websockets.connect(f"{url}/v1/realtime", subprotocols=[PACKED]) as socket:
        wire = Wire(socket, binary=True)
        await wire.until("conversation.created")
        await socket.send(frame)
        error = (await wire.until("error"))[-1]["error"]
        assert error["code"] == "invalid_json" and error["message"].startswith("The frame ")
        await wire.send({"type": "session.update", "session": {"instructions": 7}, "event_id": "mine"})
        error = (await wire.until("error"))[-1]["error"]
        assert (error["param"], error["event_id"]) == ("session.instructions", "mine")
        await wire.send(ASK)
        assert (await wire.until("response.done"))[-1]["response"]["status"] == "completed"


async def test_a_frame_that_is_too_large_is_refused_in_either_form(url: str) -> None:
    big, grows = "x" * codec.MAX_FRAME_BYTES, "\x01" * (codec.MAX_FRAME_BYTES // 2)
    async with websockets.connect(f"{url}/v1/realtime", subprotocols=[PACKED], max_size=None) as socket:
        wire = Wire(socket, binary=True)
        await wire.until("conversation.created")
        for text in (big, grows):
            await wire.send({"type": "input_text_buffer.append", "role": "user", "text": text})
            error = (await wire.until("error"))[-1]["error"]
            assert "bytes" in error["message"]
