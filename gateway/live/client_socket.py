"""One client's WebSocket, of any protocol, from its beginning to its end.

Two tasks serve it: one reads frames and serves them in order, one writes what is in the outbox. A client that
takes nothing for ``stall_seconds`` is dropped; one that sends too many frames that are no events is sent
away."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from contextlib import suppress

from ...sdk.errors import FrameError
from ..access.auth import ClientIdentity
from ..errors import Draining, SlowReader, TooManyInvalid, WireError, wire_error
from ..net.channel import Channel, ChannelClosed
from ..net.cycles import TaskGroup
from ..net.outbox import Outbox
from ..net.rates import TokenBucket
from ..settings import ClientLimits

log = logging.getLogger(__name__)


class SocketEnd(Exception):
    """Raised to end a socket from the server's side. ``wire``: has the code and the reason of the close
    frame."""

    def __init__(self, wire: WireError) -> None:
        self.wire = wire


class ClientSocket(ABC):
    """Serves one ``client`` on one WebSocket. ``channel``: the connection. ``outbox``: what waits to be
    sent."""

    def __init__(
        self, channel: Channel, client: ClientIdentity, limits: ClientLimits, outbox: Outbox
    ) -> None:
        self.outbox = outbox
        self.client = client
        self._channel = channel
        self._limits = limits
        self._invalid = TokenBucket(limits.invalid_events, time.monotonic)
        self._tasks: TaskGroup | None = None  # while the connection is served
        self._parting: WireError | None = None

    def leave(self, why: Exception | None = None) -> None:
        """Begin to close the connection, with the wire code of ``why`` as the reason; None: the server goes
        away. Returns at once, and `run` ends."""
        if self._parting is not None:
            return
        self._parting = wire_error(why or Draining())
        if self._tasks is not None:
            departing = self._depart(self._parting)
            try:
                self._tasks.create_task(departing)
            except RuntimeError:  # the tasks end already
                departing.close()

    async def run(self) -> None:
        """Serve the client until it has left or the server ends the connection.

        Raises ``SlowReader`` if the client takes nothing for too long: the caller drops the connection.
        """
        slow: list[
            SlowReader
        ] = []  # raised in here it would come out in a group, or not, by Python's version
        try:
            await self.begin()
            async with TaskGroup() as tasks:
                tasks.create_task(self._write())
                self._tasks = tasks
                if self._parting is not None:
                    raise SocketEnd(self._parting)
                await self._read()
        except* ChannelClosed:
            log.debug("a client left")
        except* SocketEnd as end:
            await self._part(next(one.wire for one in end.exceptions if isinstance(one, SocketEnd)))
        except* SlowReader as dropped:
            slow += [one for one in dropped.exceptions if isinstance(one, SlowReader)]
        finally:
            self._tasks = None
            self.end()
        if slow:
            raise slow[0]

    @abstractmethod
    async def begin(self) -> None:
        """Called before the first frame is read. May raise `SocketEnd`."""

    @abstractmethod
    def end(self) -> None:
        """Called when the connection is over."""

    @abstractmethod
    async def serve(self, frame: bytes | str) -> None:
        """Serve one frame. Raises a `FrameError` for one that is no event."""

    @abstractmethod
    def refuse_frame(self, frame: bytes | str, error: FrameError) -> None:
        """Tell the client that a frame is no event."""

    async def _read(self) -> None:
        while True:
            frame: bytes | str = b""
            try:
                frame = await self._channel.receive()  # it may be no MessagePack
                await self.serve(frame)
            except FrameError as error:
                self.refuse_frame(frame, error)
                if not self._invalid.spend():
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._limits.close_seconds):
                            await self.outbox.emptied()
                    raise SocketEnd(wire_error(TooManyInvalid())) from None
            await self.outbox.room()

    async def _write(self) -> None:
        while True:
            frames = await self.outbox.take()
            try:
                async with asyncio.timeout(self._limits.stall_seconds):
                    taken = await self._channel.send_some(frames)
            except TimeoutError:
                raise SlowReader(f"the client took nothing for {self._limits.stall_seconds:g} s") from None
            self.outbox.left(taken)

    async def _depart(self, wire: WireError) -> None:
        raise SocketEnd(wire)

    async def _part(self, wire: WireError) -> None:
        try:
            async with asyncio.timeout(self._limits.close_seconds):
                await self._channel.close(wire.close or 1000, wire.code)
        except TimeoutError:
            self._channel.drop()
