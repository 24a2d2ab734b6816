"""Runs requests of faces without sessions: one that sends the whole conversation, and gets one answer.

A face is the code of a protocol: its frames, its routes, and two translations: of a body into an `Ask`, and of
replies into an `Answer`. All else is here: whole or streamed, signs of life, a client that leaves, durability,
headers, errors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack
from typing import ClassVar, TypeVar

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from .access.auth import TurnCaller
from .clients import headers_of
from .live.reply import ReplyFold, Telling
from .live.session import log_refusal
from .live.transcripts import Ask, AskedTurn, Transcripts
from .net.bodies import PING, EventStream, json_answer, while_connected
from .service import Service

T = TypeVar("T")


class Answer(Telling[T], ABC):
    """The answer to one request, in the frames of its protocol. As a `Telling` it makes the events of a stream.
    ``id``: of the answer. ``streamed``: the client wants a stream. ``headers``: of the HTTP answer.
    ``unserved``: the tools that were left out of the request."""

    PING: ClassVar[bytes] = PING
    """Sent while a stream is quiet."""
    STREAM: ClassVar[str] = "text/event-stream"
    """The media type of a stream."""

    def __init__(
        self,
        answer_id: str,
        *,
        streamed: bool,
        headers: dict[str, str] | None = None,
        unserved: Sequence[str] = (),
    ) -> None:
        self.id = answer_id
        self.streamed = streamed
        self.headers = ({"x-request-id": answer_id} if headers is None else headers) | headers_of(unserved)
        self.unserved: Sequence[str] | UnsetType = unserved or UNSET

    def over(self, reply: ReplyFold) -> Iterable[T]:
        """The reply has ended: `finished`, unless it failed, which ends the stream with `failed`."""
        return self.finished(reply) if reply.error is None else ()

    def finished(self, reply: ReplyFold) -> Iterable[T]:
        """The reply has ended well."""
        return ()

    @abstractmethod
    def encode(self, event: T) -> bytes:
        """An event as it is sent."""

    def last(self, replies: Sequence[ReplyFold]) -> bytes:
        """What is sent behind the last event."""
        return b""

    @abstractmethod
    def failed(self, error: Exception) -> bytes:
        """What ends a stream that failed."""

    @abstractmethod
    def whole(self, replies: Sequence[ReplyFold]) -> object:
        """The body of an answer that does not stream, after all replies have ended well."""


async def answered(
    service: Service,
    request: Request,
    client: TurnCaller,
    transcripts: Transcripts,
    ask: Ask,
    answer: Answer[T],
) -> Response:
    """Run the turn of a request, and return the HTTP answer. A client that leaves ends its replies. Raises what
    `Transcripts.turn` raises, and the error of a reply that failed."""
    async with AsyncExitStack() as stack:
        turn = await stack.enter_async_context(transcripts.turn(client, ask, answer.id))
        if not answer.streamed:
            await while_connected(request, turn.whole())
            check(turn.replies)
            return json_answer(answer.whole(turn.replies), headers=answer.headers)
        kept = stack.pop_all()
        events = _events(kept, turn, answer)
        quiet = service.settings.limits.quiet_seconds

        def ended() -> None:  # the turn is open still if the client left before the first event
            service.spawn(kept.aclose())

        return EventStream(events, quiet, answer.headers, ended, answer.PING, answer.STREAM)
    raise AssertionError("the block above returns")


def check(replies: Sequence[ReplyFold]) -> None:
    """Raise the error of the first reply that failed, if one did."""
    for error in [reply.error for reply in replies if reply.done is not None]:
        if error is not None:
            raise error


async def _events(stack: AsyncExitStack, turn: AskedTurn, answer: Answer[T]) -> AsyncIterator[bytes]:
    """The events of a stream, encoded, some at a time. ``stack``: closing it, at the end, ends the turn."""
    async with stack:
        try:
            async for events in turn.told(answer):
                if events:
                    yield b"".join(map(answer.encode, events))
                check(turn.replies)
        except Exception as error:
            log_refusal(turn.live.id, error)
            yield answer.failed(error)
            return
        yield answer.last(turn.replies)
