"""A response that runs: one task reads the events of its turn, and any number of clients read the events of its
stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass

import msgspec

from ...sessions.turn.events import EndReason
from ..errors import INTERNAL, wire_error
from ..live.reply import ReplyFold
from ..live.session import report
from ..live.transcripts import QUEUED, AskedTurn
from .events import ResponseObject, ResponseStreamEvent
from .items import KeptItem
from .reply import ResponseReply, outcome

_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """An event of a stream, encoded. ``kind``: its type. ``data``: the event as JSON."""

    kind: str
    data: bytes

    @classmethod
    def of(cls, event: ResponseStreamEvent) -> LoggedEvent:
        """Encode an event of a stream."""
        return cls(event.type, _ENCODER.encode(event))


class RunningResponse:
    """A response from its first event to its last. `run` does the work; the client reads it by `events` or
    `ended`.

    ``reply`` makes the events. ``turn``: the turn, which has begun. ``stack``: closing it ends the turn.
    ``given``: the request's own input items. ``finish`` is called with this response when the turn is over; it
    stores the response, and only after it the last event is made. ``streamed``: keep the events, so that
    clients can read them. ``waits``: the turn waits when it is more than `QUEUED` events ahead of the client
    that asked for the response. ``over``: the last event has been made.
    """

    def __init__(
        self,
        reply: ResponseReply,
        turn: AskedTurn,
        stack: AsyncExitStack,
        given: list[KeptItem],
        finish: Callable[[RunningResponse], Awaitable[None]],
        *,
        streamed: bool,
        waits: bool,
    ) -> None:
        self.reply = reply
        self.given = given
        self.turn = turn
        self.error: Exception | None = None
        """Why the response failed; None if it did not."""
        self.over = False
        self._stack = stack
        self._finish = finish
        self._streamed = streamed
        self._waits = waits
        self._log: list[LoggedEvent] = []
        self._taken = 0
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def response(self) -> ResponseObject:
        """The response object as it is now."""
        return self.reply.response

    async def run(self) -> None:
        """Read the turn's events to the end and make the stream's events of them. However the turn ends, the
        stream gets a last event."""
        self._append(self.reply.begin())
        try:
            try:
                async for events in self.turn.told(self.reply):
                    self._append(events)
                    await self._wait_for_reader()
            except Exception as error:
                self.error = error
                if wire_error(error) is INTERNAL:  # a turn's own errors were logged
                    report(self.turn.live.id, self.response.id, error)
            await self._close()
        except BaseException:  # the server ends
            self._abort()
            await self._stack.aclose()
            raise

    async def _close(self) -> None:
        """Called when the turn is over: releases its session, stores the response by ``finish``, then makes the
        last event."""
        (told,) = self.turn.replies
        try:
            await self._stack.aclose()  # the next request may go on in this session as soon as it is told
        except Exception as error:
            self.error = self.error or error
        if self.error is None:
            self.error = outcome(told)[2]
        self._append(told.close(self.reply, complete=False))
        last = self.reply.end(told, self.error)
        try:
            await self._finish(self)
        except Exception as error:
            self.error = error
            report(self.turn.live.id, self.response.id, error)
            last = self.reply.end(ReplyFold(), error)
        self._append([last])
        self._end()

    def _abort(self) -> None:
        if not self.over:
            (told,) = self.turn.replies
            self._append([*told.close(self.reply, complete=False), self.reply.end(told)])
            self.error = self.error or outcome(told)[2]
            self._end()

    def _end(self) -> None:
        self.over = True
        self._ended.set()
        self._news.set()

    def _append(self, events: Iterable[ResponseStreamEvent]) -> None:
        before, made = len(self._log), list(events)
        self._log += map(LoggedEvent.of, made if self._streamed else ())
        if len(self._log) > before:
            self._news.set()

    async def _wait_for_reader(self) -> None:
        while self._waits and len(self._log) - self._taken > QUEUED:
            self._room.clear()
            await self._room.wait()

    # --- readers --------------------------------------------------------------------------------------------

    async def events(self, begin: int = 0, *, asker: bool = False) -> AsyncIterator[list[LoggedEvent]]:
        """The events from the one with the number ``begin`` to the last, in batches, as they come. ``asker``:
        the reader is the client that asked for the response, and the turn waits for it. For a response without
        kept events (``streamed`` is false), waits for the end and makes them again."""
        if not self._streamed:
            await self.ended()
            told = ResponseReply.retold(self.response, len(self.given), self.reply.cuts)
            yield [LoggedEvent.of(event) for event in told][begin:]
            return
        while True:
            if begin < len(self._log):
                batch, begin = self._log[begin:], len(self._log)
                yield batch
                if asker:
                    self._taken = begin
                    self._room.set()
            elif self.over:
                return
            else:
                if self._news.is_set() and not self.over:
                    self._news = asyncio.Event()
                await self._news.wait()

    async def ended(self) -> None:
        """Wait until the response is over and stored."""
        await self._ended.wait()

    async def cancel(self, reason: EndReason = EndReason.CLIENT_CANCELLED) -> None:
        """End the response as soon as possible, and wait for its end. What it said so far stays. ``reason``:
        why, for its last event."""
        self.forsake()
        await self.turn.cancel(reason)
        await self.ended()

    def forsake(self) -> None:
        """Called when the client that asked for the response reads no more: the turn does not wait for it from
        now on."""
        self._waits = False
        self._room.set()
