"""Bodies of HTTP requests and answers: limited reads, JSON, and streams of server-sent events.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ...sdk.errors import FrameMalformed, FrameTooLarge
from ...sdk.frames.codec import decode_body
from ..errors import SlowReader
from ..settings import ClientLimits

T = TypeVar("T")

_ENCODER = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"
"""The last event of a stream of Chat Completions or Completions."""


async def read_body(request: Request, limits: ClientLimits) -> bytes:
    """Read the whole body of a request. Raises ``FrameTooLarge`` if it has more than ``limits.body_bytes``,
    before it is read if the Content-Length header says so; ``FrameMalformed`` if it does not end within
    ``limits.body_seconds``; Starlette's ``ClientDisconnect`` if the client leaves."""
    told = request.headers.get("content-length", "")
    if told.isdecimal() and int(told) > limits.body_bytes:
        raise _too_large(limits)
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for piece in request.stream():
                size += len(piece)
                if size > limits.body_bytes:
                    raise _too_large(limits)
                pieces.append(piece)
    except TimeoutError:
        raise FrameMalformed(f"The body did not end within {limits.body_seconds:g} s") from None
    return b"".join(pieces)


async def read_json(
    request: Request,
    limits: ClientLimits,
    decoder: msgspec.json.Decoder[T],
    unserved: Callable[[str, Any], bool] = lambda path, value: False,
) -> T:
    """Read a request's JSON body as the decoder's type. ``unserved(path, value)``: whether the protocol's
    standard has this field with this value, which the server does not serve; then the error says so. Raises
    what `read_body` raises, and a `FrameError` that names the wrong field."""
    return decode_body(await read_body(request, limits), decoder, unserved)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` and return its result. Only the answer to this request needs it: if the client leaves first,
    the work is cancelled. The request's body must have been read. Raises ``ClientDisconnect``, and what the
    work raises."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait((working, leaving))


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _too_large(limits: ClientLimits) -> FrameTooLarge:
    return FrameTooLarge(f"The body has more than {limits.body_bytes} bytes")


def json_answer(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An HTTP answer with ``body``, a struct or anything else that msgspec encodes, as JSON."""
    return Response(_ENCODER.encode(body), status, headers, "application/json")


def sent_event(body: object, name: str | None = None) -> bytes:
    """One server-sent event, encoded, with ``body`` as JSON in its ``data`` line. ``name``: its ``event`` line;
    None: it has none."""
    data = b"data: " + _ENCODER.encode(body) + b"\n\n"
    return data if name is None else b"event: " + name.encode() + b"\n" + data


class EventStream(StreamingResponse):
    """An HTTP answer that streams server-sent events. Each item of ``events`` is one or more whole events,
    encoded.

    If the client leaves, ``events`` is cancelled where it waits. A client that takes nothing for
    ``limits.stall_seconds`` is dropped. ``ended`` is called when nothing more is sent, also if nothing ever
    was.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        limits: ClientLimits,
        headers: dict[str, str] | None = None,
        ended: Callable[[], object] = lambda: None,
    ) -> None:
        unbuffered = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, 200, {**unbuffered, **(headers or {})}, "text/event-stream")
        self._stall_seconds = limits.stall_seconds
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer to its end, or until the client leaves."""
        try:
            with suppress(ClientDisconnect):
                await while_connected(Request(scope, receive), self.stream_response(send))
        finally:
            self._ended()

    async def stream_response(self, send: Send) -> None:
        """Send the answer's head, then each item of the stream. Raises ``SlowReader`` if the client takes
        nothing for too long."""

        async def send_in_time(message: Any) -> None:
            try:
                async with asyncio.timeout(self._stall_seconds):
                    await send(message)
            except TimeoutError:
                raise SlowReader(f"the client took nothing for {self._stall_seconds:g} s") from None

        await super().stream_response(send_in_time)
