"""Events over one transport: sent with ids of their own, read by one reader at a time.

Keeps count of the responses that run, so that those nobody reads can be ended. Knows nothing of turns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec
from anyio import BusyResourceError, ResourceGuard

from .errors import ChatBusy, FrameError, ProtocolBroken, ServerError
from .frames import codec
from .frames.client import ClientEvent, ResponseCancel, ResponseCreate
from .frames.server import ErrorDetails, ErrorEvent, ResponseCreated, ResponseDone, ServerEvent
from .transport import Transport


class Exchange:
    """Sends client events and receives server events."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._numbers = itertools.count(1)
        self._cancels: set[str] = set()
        self._asked: list[str] = []  # ids of `response.create`s not answered yet, in order
        self._running: set[str] = set()  # ids of responses without their `response.done`
        self._reading = ResourceGuard("reading from")

    @property
    def busy(self) -> bool:
        """Whether a response runs or has been asked for."""
        return bool(self._asked or self._running)

    def runs(self, response_id: str) -> bool:
        """Whether this response's end has not been read yet."""
        return response_id in self._running

    def awaits(self, event_id: str) -> bool:
        """Whether this `response.create` has not been answered yet."""
        return event_id in self._asked

    async def send(self, event: ClientEvent) -> str:
        """Send one event, with an id if it has none; returns its id. Raises `ConnectionLost`."""
        event_id = event.event_id or f"client_{next(self._numbers)}"
        if isinstance(event, ResponseCancel):
            self._cancels.add(event_id)
        elif isinstance(event, ResponseCreate):
            self._asked.append(event_id)
        await self._transport.send(codec.encode(msgspec.structs.replace(event, event_id=event_id)))
        return event_id

    async def receive(self) -> ServerEvent:
        """The next event that this version knows.

        Errors about a cancel are passed over: it came too late and harmed nothing. Raises `ConnectionLost`,
        `ProtocolBroken`, and `ChatBusy` while another task reads.
        """
        try:
            with self._reading:
                while True:
                    event = self._decoded(await self._transport.receive())
                    if event is not None and self._take_in(event):
                        return event
        except BusyResourceError:
            raise ChatBusy("Another task reads this chat's events") from None

    async def answer(self, event_id: str, wanted: Callable[[ServerEvent], bool]) -> ServerEvent:
        """The first event that is `wanted`. Raises `ServerError` when the event sent was refused."""
        while True:
            event = await self.receive()
            if isinstance(event, ErrorEvent):
                if event.error.event_id in (event_id, None):
                    raise server_error(event.error)
            elif wanted(event):
                return event

    async def quiet(self) -> None:
        """Cancel what runs and read on until nothing does, dropping what still comes."""
        if self._asked:
            await self.send(ResponseCancel())
        for response_id in list(self._running):
            await self.send(ResponseCancel(response_id=response_id))
        while self.busy:
            await self.receive()

    async def aclose(self) -> None:
        """End the connection."""
        await self._transport.aclose()

    def _take_in(self, event: ServerEvent) -> bool:
        """Note what the event says of responses; whether it is for the reader."""
        match event:
            case ErrorEvent(error=error) if error.event_id in self._cancels:
                self._cancels.discard(error.event_id or "")
                return False
            case ErrorEvent(error=error) if error.event_id in self._asked:
                self._asked.remove(error.event_id or "")
            case ResponseCreated(response=response):
                del self._asked[:1]
                self._running.add(response.id)
            case ResponseDone(response=response):
                self._running.discard(response.id)
        return True

    @staticmethod
    def _decoded(frame: bytes) -> ServerEvent | None:
        try:
            return codec.decode_server(frame)
        except FrameError as error:
            raise ProtocolBroken(f"The server sent a frame this client cannot read: {error}") from error


def server_error(details: ErrorDetails) -> ServerError:
    """The exception for an error event."""
    return ServerError(
        details.message,
        code=details.code,
        kind=details.type,
        param=details.param,
        event_id=details.event_id,
    )
