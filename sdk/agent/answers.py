"""What the tools of a step answer, on its way to the server: in the order of the calls, whoever answers first.

    call 1 has answered ─item─▶ call 2 streams ─append, append, …, commit─▶ call 3 ─with the next response

A call that streams has the session's one buffer as soon as the response is over and all calls before it have
answered; what it wrote until then goes first. So the prompt is the same as if all had answered at once.
Knows nothing of responses.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass

import anyio

from ..connection import Connection
from ..errors import ConnectionLost, SDKError
from ..frames.client import ClientEvent, ItemCreate, TextAppend, TextClear, TextCommit, TextReplace
from ..params import Sent
from ..turn import output_of
from .calls import Call, Calls

FRAME_SECONDS, FRAME_SHARE = 0.02, 1 / 16
"""Pieces that come within this time, or this share of the time since the first, go in one frame: little of an
output is left to send at its end, and a long one takes few frames, each of which costs a rendering there."""
LAST_SECONDS = 1.0
"""What is half sent at the end may be taken back for so long."""


@dataclass(frozen=True, slots=True)
class Answered:
    """Calls that have answered: ``outputs`` still to be sent, in order, behind what was ``sent``."""

    calls: int
    outputs: list[ItemCreate]
    sent: Sent


class Answers:
    """One run's; ``calls`` are what it takes from."""

    def __init__(self, connection: Connection, calls: Calls) -> None:
        self._connection = connection
        self._calls = calls
        self._task: asyncio.Task[None] | None = None
        self._sent = Sent()
        self._filling = False  # whether the buffer holds an output that is no item yet
        self._finishing = anyio.Lock()
        self._displaced = False  # a message is being typed: nothing of this step streams any more

    def begin(self) -> None:
        """The response is over and has made all its calls: what streams may go."""
        if self._task is None and self._calls.running:
            self._task = asyncio.ensure_future(self._go())
            self._task.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def take(self) -> Answered:
        """What has come of the calls, once none of them runs. Raises what sending raises."""
        if self._task is not None:
            await asyncio.wait([self._task])
            task, self._task = self._task, None
            if task.cancelled():  # by `aclose`, not who waits here
                raise ConnectionLost("The chat was closed while its tools ran")
            task.result()
        calls, sent, self._sent = self._calls.take(), self._sent, Sent()
        self._displaced = False
        return Answered(len(calls), [_item_of(call) for call in calls if not call.sent], sent)

    async def settle(self) -> None:
        """Let no tool go on, and send what is owed."""
        self._calls.cancel()
        for output in (await self.take()).outputs:
            await self._connection.send(output)

    async def aclose(self) -> None:
        """Let no tool go on, and leave nothing half sent."""
        self._calls.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            if self._filling:
                with suppress(SDKError), anyio.move_on_after(LAST_SECONDS):
                    await self._connection.send(TextClear())
        await self._calls.over()

    async def _go(self) -> None:
        """Until all have answered; what then is left goes with the next response."""
        await asyncio.sleep(0)  # what was called just now begins, and may have written something
        while self._calls.running:
            self._calls.stirred.clear()
            ready = self._ready()
            if ready is None:
                await self._calls.stirred.wait()
                continue
            if not self._connection.buffer.lend(self, self._give_way):
                self._displaced = True
                continue
            *before, streaming = ready
            for call in before:
                await self._send(_item_of(call))
                call.sent = True
            await self._connection.fresh()
            if not self._displaced:
                await self._stream(streaming)
            self._connection.buffer.release(self)

    def _ready(self) -> list[Call] | None:
        """The next call that still streams and those before it, if these have answered."""
        unsent = self._calls.unsent()
        for at, call in enumerate(unsent):
            if call.output is None:
                may_stream = call.streams and not self._displaced
                return unsent[: at + 1] if may_stream else None
        return None

    async def _give_way(self) -> None:
        """A message is typed: what is in the buffer is taken back, and goes whole when its tool has ended."""
        self._displaced = True
        async with self._finishing:
            if self._filling:
                self._filling = False
                await self._send(TextClear())

    async def _stream(self, call: Call) -> None:
        """Fill the buffer with what it answers, as that comes, and commit it at its end."""
        self._filling = True
        pieces, texts, began = 0, list[str](), time.perf_counter()
        while call.output is None and self._filling:
            call.news.clear()
            text, pieces = call.context.written_since(pieces)
            if text or not texts:
                await self._send(TextAppend(text=text, call_id=call.id))
                texts.append(text)
            with anyio.move_on_after(max(FRAME_SECONDS, FRAME_SHARE * (time.perf_counter() - began))):
                await call.over.wait()
            await call.news.wait()
        async with self._finishing:
            if self._filling:
                await self._finish(call, "".join(texts))

    async def _finish(self, call: Call, sent: str) -> None:
        """Bring the buffer from what was `sent` to what the call has answered, and make it an item."""
        self._filling, call.sent = False, True
        output = call.output or ""
        if not output.startswith(sent):  # it was too long: what came of it does not count
            await self._send(TextReplace(start=0, text=output))
        elif rest := output[len(sent) :]:
            await self._send(TextAppend(text=rest, call_id=call.id))
        self._sent.commits[call.id] = await self._send(TextCommit(call_id=call.id))

    async def _send(self, event: ClientEvent) -> str:
        event_id = await self._connection.send(event)
        self._sent.events.append(event_id)
        if isinstance(event, ItemCreate) and event.item.id:
            self._sent.items.append(event.item.id)
        return event_id


def _item_of(call: Call) -> ItemCreate:
    return output_of(call.item, call.output or "")
