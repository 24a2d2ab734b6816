"""A closed session leaves nothing behind but its entry, whatever protocol it spoke and however it ended: the
server frees it without the garbage collector, which would stop all sockets for as long as it looks."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from types import FrameType, FunctionType, MethodType
from urllib.parse import urlsplit

import pytest
from websockets.asyncio.client import connect as dial
from websockets.sync.client import connect as socket_of

from holdfast.gateway.server import Serving
from holdfast.gateway.settings import ClientLimits, GatewaySettings
from holdfast.runtime.settings import EngineSettings
from holdfast.sdk import connect
from holdfast.tests.threaded import serving

from .wires import LONG, Json, Wire, get, wire

pytestmark = pytest.mark.anyio

Act = Callable[[str], Awaitable[None]]
OURS = tuple(f"holdfast.{room}." for room in ("gateway", "sessions", "runtime", "kvstore"))
CHAT, COMPLETIONS, MESSAGES, RESPONSES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
)
HELLO = "My name is Marisol. What is my name?"
ASKED: Json = {"model": "pocket", "messages": [{"role": "user", "content": HELLO}], "max_tokens": 12}
LASTS: Json = {"max_tokens": 400, "min_tokens": 400}
"""A reply that still runs when its client leaves."""
TOO_LONG: Json = {**ASKED, "messages": [{"role": "user", "content": "Hello! " * 5000}]}


@pytest.fixture(scope="module")
async def server(pocket: EngineSettings) -> AsyncIterator[Serving]:
    """One that closes a session soon after its client has left."""
    limits = replace(ClientLimits(), resume_seconds=0.3)
    async with serving(GatewaySettings(port=0, limits=limits), pocket) as running:
        await chat(running.url)  # what is made once is made
        yield running


# --- clients ------------------------------------------------------------------------------------------------


async def post(url: str, path: str, body: Json, until: bytes | None = None) -> bytes:
    """The whole answer. ``until``: the client closes its socket as soon as it has got this; empty: as soon as
    it has sent its request."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: {len(data)}\r\n"
        writer.write(f"{head}Connection: close\r\n\r\n".encode() + data)
        await writer.drain()
        return await (reader.read() if until is None else reader.readuntil(until) if until else nothing())
    finally:
        writer.transport.abort()


async def nothing() -> bytes:
    return b""


@asynccontextmanager
async def dialled(url: str, path: str) -> AsyncIterator[Wire]:
    async with dial(url.replace("http", "ws", 1) + path, compression=None, proxy=None) as socket:
        yield Wire(socket)


async def chat(url: str) -> None:
    assert b"[DONE]" in await post(url, CHAT, {**ASKED, "stream": True})
    assert b" 200 " in await post(url, CHAT, {**ASKED, "n": 2})


async def chat_left_by_its_client(url: str) -> None:
    await post(url, CHAT, {**ASKED, **LASTS, "stream": True}, b'"delta"')
    await post(url, CHAT, {**ASKED, **LASTS}, b"")


async def chat_refused(url: str) -> None:
    for stream in (False, True):
        assert b" 400 " in await post(url, CHAT, {**TOO_LONG, "stream": stream})
    assert b" 400 " in await post(url, CHAT, {**ASKED, "max_tokens": -1})
    assert b" 404 " in await post(url, CHAT, {**ASKED, "model": "none"})


async def completions(url: str) -> None:
    asked = {"prompt": "Once upon a time", "max_tokens": 8}
    assert b"[DONE]" in await post(url, COMPLETIONS, {**asked, "stream": True})
    assert b" 200 " in await post(url, COMPLETIONS, {**asked, "prompt": ["One", "Two"]})
    await post(url, COMPLETIONS, {**asked, **LASTS, "stream": True}, b'"text"')
    assert b" 400 " in await post(url, COMPLETIONS, {**asked, "prompt": "Hello! " * 5000})


async def messages(url: str) -> None:
    assert b"message_stop" in await post(url, MESSAGES, {**ASKED, "stream": True})
    assert b" 200 " in await post(url, MESSAGES, ASKED)
    for stream in (False, True):
        await post(url, MESSAGES, {**ASKED, "max_tokens": 400, "stream": stream}, b"delta" if stream else b"")
        assert b" 400 " in await post(url, MESSAGES, {**TOO_LONG, "stream": stream})


async def responses(url: str) -> None:
    asked = {"input": HELLO, "max_output_tokens": 12}
    answer = await post(url, RESPONSES, asked)
    first = json.loads(answer.partition(b"\r\n\r\n")[2])["id"]
    again = {**asked, "previous_response_id": first, "stream": True}
    assert b"response.completed" in await post(url, RESPONSES, again)
    assert b" 400 " in await post(url, RESPONSES, {**asked, "previous_response_id": "resp_none"})
    await post(url, RESPONSES, {"input": HELLO, **LONG, "stream": True}, b"output_text.delta")
    await post(url, RESPONSES, {"input": HELLO, **LONG}, b"")
    assert b" 400 " in await post(url, RESPONSES, {**asked, "input": "Hello! " * 5000})


async def responses_socket(url: str) -> None:
    asked = {"type": "response.create", "input": HELLO}
    async with dialled(url, RESPONSES) as one:
        await one.send({**asked, "max_output_tokens": 12})
        first = (await one.until("response.completed"))[-1]["response"]["id"]
        await one.send({**asked, "max_output_tokens": 12, "previous_response_id": first})
        await one.until("response.completed")
        await one.send({"type": "response.none"})
        await one.until("error")
        await one.send({**asked, **LONG, "previous_response_id": first})
        begun = (await one.until("response.output_text.delta"))[0]
        await one.send({"type": "response.cancel", "response_id": begun["response"]["id"]})
        await one.until("response.incomplete")
    async with dialled(url, RESPONSES) as one:
        await one.send({**asked, **LONG})
        await one.until("response.output_text.delta")
        one.socket.transport.abort()


async def realtime(url: str) -> None:
    async with connect(url) as client, client.session(max_output_tokens=12) as one:
        assert await one.say(HELLO).text()
        assert await one.say(HELLO).text()


async def realtime_forked(url: str) -> None:
    async with connect(url) as client, client.session(max_output_tokens=12) as one:
        await one.say(HELLO).text()
        left, right = await one.fork(2)
        await left.say(HELLO).text()
        await one.prune(right)
        await one.lease(ttl=5, returns_in=1)
        await one.stage()
        await one.blocks()
        await one.rewind(0)


async def realtime_cancelled(url: str) -> None:
    async with wire(url) as one:
        await one.ask(HELLO, **LONG)
        await one.until("response.output_text.delta")
        await one.send({"type": "response.cancel"})
        await one.until("response.done")
        await one.send({"type": "input_text_buffer.append", "text": HELLO})
        await one.send({"type": "input_text_buffer.commit"})
        await one.until("input_text_buffer.committed")
        assert (await one.say(HELLO, max_output_tokens=8))["status"] == "incomplete"
        await one.ask("Hello! " * 5000)
        await one.until("error")


async def realtime_wrong(url: str) -> None:
    async with wire(url) as one:
        for frame in ("{", {"type": "none"}, {"type": "session.resume", "handle": "none"}):
            await one.send(frame)
            await one.until("error")


async def realtime_that_dies(url: str) -> None:
    async with wire(url) as one:
        await one.ask(HELLO, **LONG)
        await one.until("response.output_text.delta")
        one.socket.transport.abort()


async def realtime_resumed(url: str) -> None:
    async with dialled(url, "/v1/realtime?resumable=true") as one:
        handle = (await one.until("conversation.created"))[0]["handle"]
        await one.ask(HELLO, **LONG)
        last = (await one.until("response.output_text.delta"))[-1]
        async with dialled(url, "/v1/realtime?resume=true") as other:
            await other.send({"type": "session.resume", "handle": handle, "last_event": last["event_id"]})
            await other.until("response.done")


ACTS: tuple[Act, ...] = (
    chat,
    chat_left_by_its_client,
    chat_refused,
    completions,
    messages,
    responses,
    responses_socket,
    realtime,
    realtime_forked,
    realtime_cancelled,
    realtime_wrong,
    realtime_that_dies,
    realtime_resumed,
)


# --- what is left -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
async def test_a_closed_session_is_freed_without_the_garbage_collector(server: Serving, act: Act) -> None:
    before = asyncio.all_tasks()
    with no_collector():
        await act(server.url)
        while list(server.service.sessions()):  # noqa: ASYNC110 - a timer of the server closes them
            await asyncio.sleep(0.01)
        while left := asyncio.all_tasks() - before:
            await asyncio.wait(left)
        assert garbage() == []


async def test_its_connection_is_freed_too(server: Serving) -> None:
    def talk() -> None:  # with clients that have no transports of their own
        with socket_of(server.url.replace("http", "ws", 1) + "/v1/realtime", proxy=None) as socket:
            socket.recv()

    before = asyncio.all_tasks()
    with no_collector():
        await get(server.url, "/health")
        await asyncio.to_thread(talk)
        while left := asyncio.all_tasks() - before:
            await asyncio.wait(left)
        assert garbage("asyncio.") == []


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def garbage(*rooms: str) -> list[str]:
    """What of these rooms, the server's by default, only the garbage collector frees: the names of its objects
    and functions."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return sorted({name for name in map(name_of, gc.garbage) if name.startswith(rooms or OURS)})
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def name_of(found: object) -> str:
    """The full name of an object's class, or of a function, a method or a frame's function."""
    kind = type(found)  # `isinstance` would ask the object itself, which may be a proxy of one that is gone
    if kind is MethodType:
        found, kind = found.__func__, type(found.__func__)  # type: ignore[attr-defined]
    if kind is FunctionType:
        return f"{found.__module__}.{found.__qualname__}"  # type: ignore[attr-defined]
    if kind is FrameType:
        return f"{found.f_globals['__name__']}.{found.f_code.co_qualname}"  # type: ignore[attr-defined]
    return f"{kind.__module__}.{kind.__qualname__}"
