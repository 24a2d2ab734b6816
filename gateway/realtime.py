"""One client's connection: frames in to the conversation, its effects out to the session and the outbox.

Owns the tasks: one reads, one writes, one per running response. What is said when is the conversation's to
decide; how a turn runs is the session's. A slow reader makes its own replies wait, and is dropped when it
takes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import TypeVar

from ..sdk.errors import FrameError
from ..sdk.frames import codec
from ..sdk.frames.client import ClientEvent, ResponseCreate
from ..sdk.frames.server import ServerEvent
from ..sessions.anticipation import Arrival
from ..sessions.errors import SessionError
from ..sessions.events import EndReason
from ..sessions.response import Response
from ..sessions.session import Session
from .channel import Channel, ChannelClosed
from .conversation import CancelResponse, Conversation, CountArrival, Expect, Send, StartResponse
from .errors import INTERNAL, Draining, SlowReader, WireError, wire_error
from .outbox import Outbox
from .settings import Limits

log = logging.getLogger(__name__)

_E = TypeVar("_E", bound=BaseException)


class _Goodbye(Exception):
    """This side ends the connection."""

    def __init__(self, wire: WireError) -> None:
        self.wire = wire


class Realtime:
    """Runs one conversation over one channel, until either side ends it."""

    def __init__(
        self, channel: Channel, session: Session, conversation: Conversation, limits: Limits
    ) -> None:
        self.outbox = Outbox(limits)
        self._channel = channel
        self._session = session
        self._conversation = conversation
        self._limits = limits
        self._responses: dict[str, Response] = {}
        self._draining = False
        self._leaving = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def responses(self) -> int:
        """Responses that run."""
        return len(self._responses)

    def recovered(self, lost_seconds: float) -> None:
        """Tell the client that its session has another engine."""
        self._post([self._conversation.recovered(round(lost_seconds * 1000, 1))])

    async def drain(self, seconds: float) -> None:
        """Refuse new responses; wait until none runs and all that was said has left.

        After ``seconds`` what still runs is cut: it ends as incomplete, naming the reason.
        """
        self._draining = True
        self._post([self._conversation.going_away(seconds)])
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        for response in list(self._responses.values()):
            await response.cancel(EndReason.SERVER_LEAVING)
        await self._idle.wait()
        await self.outbox.emptied()

    def leave(self) -> None:
        """Say goodbye to the client: the server goes."""
        self._leaving.set()

    async def run(self) -> None:
        """Until the client has left or was told goodbye. Raises ``SlowReader`` when it must be dropped."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write())
                tasks.create_task(self._depart())
                self._post(self._conversation.greet())
                await self._read(tasks)
        except* ChannelClosed:
            log.debug("session %s: the client left", self._session.id)
        except* _Goodbye as goodbye:
            await self._part(_first(goodbye).wire)
        except* SlowReader as slow:
            raise _first(slow) from None

    async def _depart(self) -> None:
        await self._leaving.wait()
        raise _Goodbye(wire_error(Draining()))

    async def _part(self, wire: WireError) -> None:
        try:
            async with asyncio.timeout(self._limits.close_seconds):
                await self._channel.close(wire.close or 1000, wire.code)
        except TimeoutError:
            self._channel.drop()

    async def _write(self) -> None:
        while True:
            frame = await self.outbox.take()
            try:
                async with asyncio.timeout(self._limits.stall_seconds):
                    await self._channel.send(frame)
            except TimeoutError:
                raise SlowReader(f"the client took nothing for {self._limits.stall_seconds:g} s") from None
            self.outbox.left()

    async def _read(self, tasks: asyncio.TaskGroup) -> None:
        """Serve frames until one comes after which the socket must close."""
        while True:
            frame = await self._channel.receive()
            try:
                event = codec.decode_client(frame, self._limits.frame_bytes)
            except FrameError as error:
                self._post([self._conversation.refusal(error)])
                if (wire := wire_error(error)).close is not None:
                    await self.outbox.emptied()
                    raise _Goodbye(wire) from None
            else:
                await self._take(event, tasks)
            await self.outbox.room()

    async def _take(self, event: ClientEvent, tasks: asyncio.TaskGroup) -> None:
        if self._draining and isinstance(event, ResponseCreate):
            self._post([self._conversation.refusal(Draining("The server is going away"), event.event_id)])
            return
        for effect in self._conversation.receive(event):
            match effect:
                case Send():
                    self._post([effect.event])
                case StartResponse():
                    self._start(effect, tasks)
                case CancelResponse(response_id=response_id):
                    await self._responses[response_id].cancel()
                case Expect(message=message):
                    self._session.expect(message)
                case CountArrival():
                    await self._arrived(effect)

    async def _arrived(self, count: CountArrival) -> None:
        try:
            arrival = await self._session.arrival()
        except SessionError:  # the template will say so again at the next turn, which the client can mend
            arrival = Arrival(0, 0)
        self._post(self._conversation.committed(arrival, count))

    def _start(self, start: StartResponse, tasks: asyncio.TaskGroup) -> None:
        """What the response puts before the model is settled here, before any later frame is read."""
        try:
            response = self._session.respond(start.request)
        except SessionError as error:
            self._post(self._conversation.failed(start.response_id, error))
            return
        self._responses[start.response_id] = response
        self._idle.clear()
        tasks.create_task(self._follow(start.response_id, response))

    async def _follow(self, response_id: str, response: Response) -> None:
        """Tell what a response tells, as fast as the reader takes it."""
        try:
            async with response:
                async for event in response:
                    self._post(self._conversation.reply(response_id, event))
                    await self.outbox.room()
        except Exception as error:  # whatever it is, it ends this response and no more
            if wire_error(error) is INTERNAL:
                log.exception("response %s failed", response_id)
            self._post(self._conversation.failed(response_id, error))
        finally:
            del self._responses[response_id]
            if not self._responses:
                self._idle.set()

    def _post(self, events: Iterable[ServerEvent]) -> None:
        self.outbox.post(codec.encode(event) for event in events)


def _first(group: BaseExceptionGroup[_E]) -> _E:
    """The first exception of a group that holds no groups."""
    first = group.exceptions[0]
    assert not isinstance(first, BaseExceptionGroup)
    return first
