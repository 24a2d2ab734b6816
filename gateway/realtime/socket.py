"""One client's socket: frames in to the live session, its feed out. Sessions may outlive it, and come to it.

Owns two tasks: one reads, one writes. What is said when is the conversation's to decide; how a turn runs is
the session's. A slow reader makes its own replies wait, and is dropped when it takes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from ...sdk.errors import FrameError
from ...sdk.frames import codec
from ...sdk.frames.client import ClientEvent, SessionAttach, SessionDetach, SessionResume
from ...sdk.frames.server import ErrorEvent, SessionDetached
from ...sessions.errors import SessionError, SessionUnknown, StorageUnavailable
from ...sessions.items import new_id
from ..errors import (
    Draining,
    SessionMoved,
    SessionRequired,
    SlowReader,
    TooManyInvalid,
    WireError,
    error_details,
    wire_error,
)
from ..net.rates import TokenBucket
from ..settings import Limits
from .channel import Channel, ChannelClosed
from .live_session import LiveSession
from .live_sessions import Registry
from .multiplex import Line, MultiplexedSession
from .outbox import Outbox

log = logging.getLogger(__name__)

_E = TypeVar("_E", bound=BaseException)


@dataclass(frozen=True, slots=True)
class Visitor:
    """Who a socket belongs to, and what it said of itself when it was opened.

    ``owner``: a digest of what it authorizes itself with, ``salt`` one of its tenant, ``key`` one of its key,
    where keys are asked for; ``address``: where it comes from. ``resumable``: it can come back, so its replies
    go on without it.
    ``resume``: it comes back, so it gets no session of its own.
    """

    owner: bytes = b""
    salt: bytes = b""
    key: bytes = b""
    address: str = ""
    resumable: bool = False
    resume: bool = False


class _Goodbye(Exception):
    """This side ends the connection."""

    def __init__(self, wire: WireError) -> None:
        self.wire = wire


class Realtime:
    """Runs one socket, until either side ends it."""

    def __init__(self, channel: Channel, registry: Registry, visitor: Visitor, limits: Limits) -> None:
        self.outbox = Outbox(limits)
        self._channel = channel
        self._registry = registry
        self.visitor = self._visitor = visitor
        self._limits = limits
        self._live: LiveSession | None = None
        self._line = self._new_line()
        self._guests: dict[str, MultiplexedSession] = {}
        self._shared = self._attaching = False
        self._invalid = TokenBucket(limits.invalid_events, time.monotonic)
        self._leaving: asyncio.Future[WireError] = asyncio.get_running_loop().create_future()

    def leave(self, why: Exception | None = None) -> None:
        """Say goodbye to the client: by default because the server goes."""
        self._part_with(wire_error(why or Draining()))

    def moved(self) -> None:
        """The session goes on on a newer socket, or as a guest of this one."""
        live, self._live = self._live, None
        if live is not None and self._guests and not self._attaching:
            self._tell_detached(live.id)
        elif not self._attaching:
            self._part_with(wire_error(SessionMoved()))

    async def run(self) -> None:
        """Until the client has left or was told goodbye. Raises ``SlowReader`` when it must be dropped."""
        dropped: SlowReader | None = None
        try:
            if not self._visitor.resume:
                await self._begin()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write())
                tasks.create_task(self._depart())
                await self._read()
        except* ChannelClosed:
            log.debug("a client left")
        except* _Goodbye as goodbye:
            await self._part(_first(goodbye).wire)
        except* SlowReader as slow:
            dropped = _first(slow)  # raised in here it would come out in a group, or not, by Python's version
        finally:
            self._let_go()
            for guest in list(self._guests.values()):
                self._dismiss(guest)
        if dropped is not None:
            raise dropped

    async def _begin(self) -> None:
        try:
            self._live = self._registry.open(self, self._visitor.owner, self._visitor.salt)
        except SessionError as error:
            await self._turn_away(error)
            raise _Goodbye(wire_error(error)) from None
        self._live.resumable = self._visitor.resumable
        self._line.session_id = self._live.id
        self._live.event_log.open_to(self._line)

    async def _turn_away(self, error: SessionError) -> None:
        """Say why this socket gets no session; nothing else is ever written to it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.close_seconds):
                await self._channel.send(_alone(error))

    def _let_go(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            self._registry.left(live, self)

    def _part_with(self, wire: WireError) -> None:
        if not self._leaving.done():
            self._leaving.set_result(wire)

    async def _depart(self) -> None:
        raise _Goodbye(await self._leaving)

    async def _part(self, wire: WireError) -> None:
        try:
            async with asyncio.timeout(self._limits.close_seconds):
                await self._channel.close(wire.close or 1000, wire.code)
        except TimeoutError:
            self._channel.drop()

    async def _write(self) -> None:
        while True:
            frames = await self.outbox.take()
            try:
                async with asyncio.timeout(self._limits.stall_seconds):
                    taken = await self._channel.send_some(frames)
            except TimeoutError:
                raise SlowReader(f"the client took nothing for {self._limits.stall_seconds:g} s") from None
            self.outbox.left(taken)

    async def _read(self) -> None:
        """Serve frames; one that is no event is refused, and harms no other. Too many end the socket."""
        while True:
            frame = await self._channel.receive()
            try:
                event = codec.decode_client(frame, self._limits.frame_bytes)
            except FrameError as error:
                if not self._invalid.spend():
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._limits.close_seconds):
                            await self.outbox.emptied()
                    raise _Goodbye(wire_error(TooManyInvalid())) from None
                self._refuse(error)
            else:
                await self._take(event)
            await self.outbox.room()

    async def _take(self, event: ClientEvent) -> None:
        if isinstance(event, SessionResume | SessionAttach):
            try:
                await (self._resume(event) if isinstance(event, SessionResume) else self._attach(event))
            except SessionError as error:
                self._refuse(error, event.event_id)
            except Exception as error:  # a defect in opening one session is no other's on this socket
                log.exception("%s failed", type(event).__name__)
                self._refuse(error, event.event_id)
        elif isinstance(event, SessionDetach):
            self._detach(event)
        elif (live := self._addressed(event)) is not None:
            await live.take(event)
        elif event.session_id is not None:
            unknown = SessionUnknown("This socket has no such session", param="session_id")
            self._refuse(unknown, event.event_id)
        else:
            self._refuse(SessionRequired("Send session.resume first"), event.event_id)

    # --- several sessions ---

    def _new_line(self, session_id: str = "") -> Line:
        return Line(self.outbox, lambda: self._shared, session_id)

    def _addressed(self, event: ClientEvent) -> LiveSession | None:
        """The session an event is for: the first, unless it says another."""
        session_id = event.session_id
        if session_id is None or (self._live is not None and session_id == self._live.id):
            return self._live
        guest = self._guests.get(session_id)
        return None if guest is None else guest.live

    async def _attach(self, event: SessionAttach) -> None:
        guest = MultiplexedSession(self._new_line(), self._lost)
        self._attaching = True
        try:
            live = await self._registry.resume(guest, event.session, self._visitor.owner)
        finally:
            self._attaching = False
        guest.live, guest.line.session_id = live, live.id
        self._guests[live.id] = guest
        self._shared = live.resumable = True
        try:
            await self._durable(live)
            if self._guests.get(live.id) is guest:
                live.resume(guest.line, event.last_event)
        except SessionError:
            self._dismiss(guest)
            raise

    def _detach(self, event: SessionDetach) -> None:
        live = self._addressed(event)
        if live is None:
            self._refuse(SessionUnknown("This socket has no such session"), event.event_id)
        elif live is self._live:
            self._let_go()
            self._tell_detached(live.id)
        else:
            self._dismiss(self._guests[live.id])
            self._tell_detached(live.id)

    def _dismiss(self, guest: MultiplexedSession) -> None:
        """A guest leaves; whoever has its handle can come back to it."""
        live = guest.live
        if live is not None and self._guests.pop(live.id, None) is not None:
            self._registry.left(live, guest)

    def _lost(self, guest: MultiplexedSession) -> None:
        """A guest goes on elsewhere."""
        live = guest.live
        if live is not None and self._guests.pop(live.id, None) is not None:
            self._tell_detached(live.id)

    def _tell_detached(self, session_id: str) -> None:
        told = SessionDetached(event_id=new_id("event"), session_id=session_id)
        self.outbox.post([codec.encode(told)])

    async def _resume(self, event: SessionResume) -> None:
        """Leave the session this socket had, if any, for the one that the handle opens."""
        live = await self._registry.resume(self, event.handle, self._visitor.owner)
        if live is not self._live:
            self._let_go()
            self._live = live
        live.resumable = True
        try:
            await self._durable(live)
            if self._live is live:  # nobody else resumed it meanwhile
                live.resume(self._line_again(live), event.last_event)
        except SessionError:
            self._let_go()
            raise

    def _line_again(self, live: LiveSession) -> Line:
        """A fresh line: the feed abandons the one it had."""
        self._line = self._new_line(live.id)
        return self._line

    async def _durable(self, live: LiveSession) -> None:
        """The new handle may be shown when the journal has it."""
        ticket = live.session.log.sync()
        if ticket is not None:
            await asyncio.wait([ticket], timeout=self._limits.close_seconds)
            if not ticket.done():
                raise live.session.log.fault or StorageUnavailable("The journal does not answer")

    def _refuse(self, error: Exception, event_id: str | None = None) -> None:
        """Tell of what was refused, in the session's order where there is a session."""
        if self._live is not None:
            self._live.refuse(error, event_id)
        else:
            self.outbox.post([_alone(error, event_id)])


def _alone(error: Exception, event_id: str | None = None) -> bytes:
    """An ``error`` event outside any session."""
    return codec.encode(ErrorEvent(event_id=new_id("event"), error=error_details(error, event_id)))


def _first(group: BaseExceptionGroup[_E]) -> _E:
    """The first exception of a group that holds no groups."""
    first = group.exceptions[0]
    assert not isinstance(first, BaseExceptionGroup)
    return first
