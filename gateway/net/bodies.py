"""Bodies of HTTP requests and answers: limited reads, JSON, and streams of server-sent events.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from ...sdk.errors import FrameMalformed, FrameTooLarge
from ...sdk.frames.codec import has_more_values
from ...sessions.errors import PromptTooLong
from ..errors import EncodingRefused, TooManyBodies
from ..settings import ClientLimits

T = TypeVar("T")

_ENCODER = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"
"""The last event of a stream of Chat Completions or Completions."""
PING = b": ping\n\n"
"""A comment of a stream, which clients leave out."""


@dataclass(frozen=True, slots=True)
class BodyBound:
    """How large the body of a request may be, by what fits into the model's context: so many bytes (``size``),
    and ``token_bytes`` more for each token of it; so many ``values`` (numbers, texts, lists and objects of
    JSON), and ``token_values`` more. Far more than any prompt that fits, and so little that it is decoded in
    the time of a few tokens."""

    size: int = 1 << 20
    token_bytes: int = 64
    values: int = 1 << 15
    token_values: int = 4

    def most_bytes(self, context: int) -> int:
        """The most bytes with a context of so many tokens."""
        return self.size + context * self.token_bytes

    def check_size(self, size: int, context: int, limits: ClientLimits) -> None:
        """Raise ``FrameTooLarge`` for a body of so many bytes that is larger than any may be, ``PromptTooLong``
        for one that is too large for the context."""
        if size > limits.body_bytes:
            raise FrameTooLarge(f"The body has more than {limits.body_bytes} bytes: send less in one request")
        if size > self.most_bytes(context):
            tokens = size // self.token_bytes
            raise PromptTooLong.of(f"its {size} bytes are those of at least {tokens} tokens", context, tokens)

    def check(self, data: bytes, context: int) -> None:
        """Raise ``FrameTooLarge`` if ``data`` holds too many values."""
        most = self.values + context * self.token_values
        if has_more_values(data, most):
            raise FrameTooLarge(f"The body has more than {most} values: send less in one request")


CONVERSATION = BodyBound()
"""A conversation, with tools and schemas."""
TEXT = BodyBound(size=1 << 16)
"""One text."""
PROMPTS = BodyBound(values=1 << 17)
"""Several prompts, as texts or token ids."""
EXPORT = BodyBound(size=32 << 20, values=1 << 21)
"""A session that was exported: all of it, which may be far more than the context holds."""
IDS = BodyBound(size=1 << 16, token_bytes=16, token_values=2)
"""Token ids."""


class BodyMemory:
    """The memory for bodies that are read and decoded. ``most``: bytes for each tenant. A tenant that has no
    room left waits, the oldest request first, and its bytes stay with their sender."""

    def __init__(self, most: int = 16 << 20) -> None:
        self.most = most
        self._used = Counter[bytes]()
        self._waiting: dict[bytes, deque[tuple[int, asyncio.Future[None]]]] = {}

    @asynccontextmanager
    async def held(self, salt: bytes, size: int, seconds: float) -> AsyncIterator[None]:
        """Take ``size`` bytes, at most `most`, of the tenant's room for the block. Raises ``TooManyBodies`` if
        there is none within so many ``seconds``."""
        size = min(size, self.most)
        if salt in self._waiting or self._used[salt] + size > self.most:
            await self._wait(salt, size, seconds)
        else:
            self._used[salt] += size
        try:
            yield
        finally:
            self._give_back(salt, size)

    async def _wait(self, salt: bytes, size: int, seconds: float) -> None:
        granted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(salt, deque()).append((size, granted))
        try:
            async with asyncio.timeout(seconds):
                await granted
        except BaseException as error:
            self._give_back(salt, 0 if granted.cancelled() else size)  # it may come in the same moment
            if isinstance(error, TimeoutError):
                told = f"Other requests of this tenant have {self.most} bytes of bodies in work"
                raise TooManyBodies(f"{told}: send fewer at once") from None
            raise

    def _give_back(self, salt: bytes, size: int) -> None:
        """Give back room, and give it to those that wait, in their order, as far as it reaches."""
        self._used[salt] -= size
        waiting = self._waiting.get(salt, deque())
        while waiting and (waiting[0][1].done() or self._used[salt] + waiting[0][0] <= self.most):
            wanted, granted = waiting.popleft()
            if not granted.done():  # it waits still
                self._used[salt] += wanted
                granted.set_result(None)
        if not waiting:
            self._waiting.pop(salt, None)
        if not self._used[salt]:
            del self._used[salt]


def told_bytes(request: Request) -> int | None:
    """The size of a request's body, if its head tells it: not that of a compressed one."""
    told = request.headers.get("content-length", "")
    return int(told) if told.isdecimal() and "content-encoding" not in request.headers else None


async def read_body(request: Request, check_size: Callable[[int], None]) -> bytes:
    """Read the whole body of a request. ``check_size``: raises for a body of so many bytes that is too large,
    before it is read if its head tells its size. A compressed body is decompressed as it comes. Raises
    ``EncodingRefused``, and Starlette's ``ClientDisconnect`` if the client leaves, or does not send it in
    time."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in _ENCODINGS:
        raise EncodingRefused(
            f"The body's encoding {encoding[:32]!r} is not served: send it plain or as gzip"
        )
    plain = None if encoding == "identity" else zlib.decompressobj(_ENCODINGS[encoding])
    check_size(told_bytes(request) or 0)
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        for part in (piece,) if plain is None else _decompressed(plain, piece):
            size += len(part)
            check_size(size)
            pieces.append(part)
            if plain is not None:
                await asyncio.sleep(0)  # a small piece may become much: others run meanwhile
    if plain is not None and not plain.eof:
        raise FrameMalformed("The compressed body is cut off")
    return b"".join(pieces)


_ENCODINGS = {"identity": 0, "gzip": 31, "x-gzip": 31, "deflate": 15}
"""The encodings of bodies, with zlib's number for each."""
_PART = 1 << 16
"""So many bytes of a compressed body are decompressed at once: its size is checked before there are more."""


def _decompressed(plain: Any, piece: bytes) -> Iterator[bytes]:
    try:
        while piece and not plain.eof:
            yield plain.decompress(piece, _PART)
            piece = plain.unconsumed_tail
    except zlib.error as error:
        raise FrameMalformed(f"The body cannot be decompressed: {error}") from None


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


def json_answer(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An HTTP answer with ``body``, a struct or anything else that msgspec encodes, as JSON."""
    return Response(_ENCODER.encode(body), status, headers, "application/json")


def sent_event(body: object, name: str | None = None) -> bytes:
    """One server-sent event, encoded, with ``body`` as JSON in its ``data`` line. ``name``: its ``event`` line;
    None: it has none."""
    data = b"data: " + _ENCODER.encode(body) + b"\n\n"
    return data if name is None else b"event: " + name.encode() + b"\n" + data


class EventStream(StreamingResponse):
    """An HTTP answer that streams events, by default server-sent ones. Each item of ``events`` is one or more
    whole events, encoded.

    If the client leaves, or is dropped because it reads too slowly, ``events`` is cancelled where it waits.
    ``ended`` is called when nothing more is sent, also if nothing ever was. ``ping`` is sent whenever nothing
    else was for ``quiet`` seconds, so that neither the client nor a proxy takes the connection for dead.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        quiet: float,
        headers: dict[str, str] | None = None,
        ended: Callable[[], object] = lambda: None,
        ping: bytes = PING,
        media_type: str = "text/event-stream",
    ) -> None:
        unbuffered = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, 200, {**unbuffered, **(headers or {})}, media_type)
        self._ended = ended
        self._quiet, self._ping = quiet, ping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer to its end, or until the client leaves."""
        try:
            with suppress(ClientDisconnect):
                await while_connected(Request(scope, receive), self.stream_response(send))
        finally:
            self._ended()

    async def stream_response(self, send: Send) -> None:
        """Send the answer, and pings where it is quiet."""
        clock = asyncio.get_running_loop().time
        last: float | None = None  # when the last part was sent; None: one is on its way

        async def noted(message: Message) -> None:
            nonlocal last
            last = None
            await send(message)
            last = clock()

        async def ping() -> None:
            while True:
                since = 0.0 if last is None else clock() - last
                await asyncio.sleep(self._quiet - since)
                if last is not None and clock() - last >= self._quiet:
                    await noted({"type": "http.response.body", "body": self._ping, "more_body": True})

        pinging = asyncio.ensure_future(ping())
        try:
            await super().stream_response(noted)
        finally:
            pinging.cancel()
