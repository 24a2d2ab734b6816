"""Resuming a session on a new connection: the handshake, what is sent again, and for how long it is tried.

A `Resumption` keeps the newest handle, the last server event that was received, and the client events that the
server may not have.
"""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import anyio
import msgspec

from ..errors import (
    DELETED,
    ConnectionFailed,
    ConnectionFault,
    ConnectionLost,
    KeyRejected,
    ProtocolBroken,
    SessionLost,
)
from ..frames.client import SessionResume
from ..frames.server import ErrorEvent, ServerEvent, SessionResumed
from .transport import Transport

FINAL_CODES = frozenset({1002, 1003, 1007, 1008, 1009, 1010, 4001, DELETED})
"""WebSocket close codes after which the session is not resumed: a new connection would end in the same way, or
another client has the session now, or it was deleted."""
GOING_AWAY = "server_going_away"
"""The code of the error with which a server that ends refuses new turns."""
MAX_UNSURE = 1024
"""At most so many client events are kept to be sent again; beyond that the oldest are dropped."""
_Result = TypeVar("_Result")

_GREETING: msgspec.json.Decoder[SessionResumed | ErrorEvent] = msgspec.json.Decoder(
    SessionResumed | ErrorEvent
)


@dataclass(frozen=True, slots=True)
class Retry:
    """A lost connection is about to be tried again. ``fault``: why, with address and handle; ``number``: which
    try this is, from 1; ``pause``: seconds until it begins; ``left``: seconds after which no other follows."""

    fault: ConnectionFault
    number: int
    pause: float
    left: float


@dataclass(frozen=True, slots=True)
class Patience:
    """How long, and with what pauses, a connection is tried again; all in seconds. Each pause is a random part
    of a bound: ``first`` before the first try, then ``factor`` times the bound before, but never above
    ``longest``. If a try fails when ``total`` has passed, no other follows.

    ``tell`` is called on the event loop with a `Retry` before each try, and with None when the connection is
    back. What it raises ends the retries, and reaches the reader."""

    first: float = 0.05
    factor: float = 2.0
    longest: float = 2.0
    total: float = 60.0
    tell: Callable[[Retry | None], object] = lambda retry: None

    def pauses(self) -> Iterator[float]:
        """The pauses before each try, in seconds, without end. They are random, so that the clients of a
        restarted server do not all come back at once."""
        bound = self.first
        while True:
            yield random.uniform(0, bound)
            bound = min(self.longest, bound * self.factor)

    async def retry(
        self, attempt: Callable[[], Awaitable[_Result]], fault: ConnectionFault | None = None
    ) -> _Result:
        """Call ``attempt``, with pauses, until it succeeds, and return what it returns. ``fault``: what went
        wrong before; then there is a pause before the first try too. Raises `SessionLost` and `KeyRejected` at
        once, any other `ConnectionFailed` or `ConnectionLost` only when ``total`` is over."""
        give_up, pauses = time.monotonic() + self.total, self.pauses()
        number = 0
        while True:
            number += 1
            if fault is not None:
                pause = next(pauses)
                self.tell(Retry(fault, number, pause, max(0.0, give_up - time.monotonic())))
                await anyio.sleep(pause)
            try:
                result = await attempt()
            except (SessionLost, KeyRejected):
                raise
            except (ConnectionFailed, ConnectionLost) as failed:
                if time.monotonic() > give_up:
                    raise
                fault = failed.with_traceback(None)  # which would hold this frame, and it the error
            else:
                if fault is not None:
                    self.tell(None)
                return result


class _AnyEvent(msgspec.Struct):
    event_id: str | None = None


class Resumption:
    """What one session is resumed with on a new connection: its newest handle, and what was sent and received.
    ``dial`` opens a connection on which the server expects `session.resume`. ``address``: the server's, as
    errors show it; None: not known."""

    def __init__(
        self,
        dial: Callable[[], Awaitable[Transport]],
        patience: Patience | None = None,
        address: str | None = None,
        handle: str | None = None,
    ) -> None:
        self.address = address
        self.handle = handle
        self.last_event: str | None = None
        self.patience = patience or Patience()
        self._dial = dial
        self._unsure: OrderedDict[str, bytes] = OrderedDict()  # sent, and not known to have arrived
        self._forgotten: str | None = None  # the last of them that is no longer kept

    def another(self, handle: str) -> Resumption:
        """A new resumption for the session that `handle` opens, at the same server and with the same
        patience."""
        return Resumption(self._dial, self.patience, self.address, handle)

    def possible(self, lost: ConnectionLost) -> bool:
        """Whether to try to resume the session after this loss: there is a handle, and the close code is not a
        final one."""
        return self.handle is not None and lost.close_code not in FINAL_CODES

    # --- what is sent and received --------------------------------------------------------------------------

    def sent(self, event_id: str, frame: bytes) -> None:
        """Keep the frame of a client event that is being sent, until the server is known to have it."""
        self._unsure[event_id] = frame
        while len(self._unsure) > MAX_UNSURE:
            self._forgotten, _ = self._unsure.popitem(last=False)

    def read(self, frame: bytes, event: ServerEvent | None) -> None:
        """Remember a server event that was received: its id, after which the server goes on when the session is
        resumed, and its handle if it has one. ``event`` None: its type is not known here, and only the id is
        read, from ``frame``."""
        event_id = (
            event.event_id if event is not None else msgspec.json.decode(frame, type=_AnyEvent).event_id
        )
        if event_id:
            self.last_event = event_id
        handle = getattr(event, "handle", None)
        if isinstance(handle, str):
            self.handle = handle

    def postpones(self, event: ServerEvent | None) -> bool:
        """Whether the server refused a client event because it is going away, and this session can be resumed.
        Then that event is kept, and is sent again to the next server, behind those that this one has served."""
        if self.handle is None or not isinstance(event, ErrorEvent) or event.error.code != GOING_AWAY:
            return False
        refused = event.error.event_id
        if refused is None or refused not in self._unsure:
            return False
        self._unsure.move_to_end(refused)
        return True

    def arrived(self, event_id: str) -> None:
        """Called when the server is known to have this client event and all that were sent before it: forgets
        them, as they need not be sent again. An id that is not kept changes nothing."""
        if event_id in self._unsure:
            self._forgotten = None
            for known in list(self._unsure):
                del self._unsure[known]
                if known == event_id:
                    return

    def again(self, resumed: SessionResumed, awaited: Mapping[str, bytes | None]) -> list[bytes]:
        """The frames to send again, in order, after the server has answered `session.resume` by ``resumed``.

        ``awaited``: the frames of client events that wait for an answer, by event id. If the server has read
        the session from its journal, those are sent again although it has them: their answers may be lost, and
        it answers them again.
        """
        self.arrived(resumed.last_client_event or "")
        again = awaited.items() if resumed.reopened else ()
        lost = [frame for event_id, frame in again if frame is not None and event_id not in self._unsure]
        return [*lost, *self._unsure.values()]

    def frame_of(self, event_id: str) -> bytes | None:
        """The frame of a client event that was just sent; None if it is not kept any more."""
        return self._unsure.get(event_id)

    def since(self, sent: Container[bytes]) -> list[bytes]:
        """The kept frames that are not in ``sent``, in order. ``sent``: those that were sent again on the new
        connection; while that went on, the client sent these others, so they are to be sent again, too."""
        return [frame for frame in self._unsure.values() if frame not in sent]

    # --- the new connection ---------------------------------------------------------------------------------

    async def connect(self) -> tuple[Transport, SessionResumed]:
        """Open a new connection and resume the session on it, in one try. Returns the new transport and the
        server's answer; after an error that transport is closed. Raises ``ConnectionFailed`` or
        ``ConnectionLost`` if another try may help, else ``SessionLost`` or ``ProtocolBroken``; they name the
        server and the handle."""
        transport: Transport | None = None
        try:
            transport = await self._dial()
            resume = SessionResume(event_id="resume", handle=self.handle or "", last_event=self.last_event)
            await transport.send(msgspec.json.encode(resume))
            resumed = await self.greeted(transport)
            self._check(resumed)
            return transport, resumed
        except BaseException as error:
            if transport is not None:
                await transport.aclose()
            if isinstance(error, ConnectionFault):
                error.of(self.address, self.handle)
            raise

    async def greeted(self, transport: Transport) -> SessionResumed:
        """Wait for the first frame on ``transport``, the answer to `session.resume` or `session.attach`, and
        keep its handle. Raises ``SessionLost`` if it is a refusal, ``ConnectionFailed`` if the server's journal
        cannot write now, ``ProtocolBroken`` if it is another frame, ``ConnectionLost``."""
        try:
            event = _GREETING.decode(await transport.receive())
        except msgspec.MsgspecError as error:
            raise ProtocolBroken(f"The server did not answer session.resume: {error}") from None
        if isinstance(event, ErrorEvent):
            if event.error.code == "storage_unavailable":
                raise ConnectionFailed(event.error.message)
            raise SessionLost(event.error.message, code=event.error.code)
        self.handle = event.handle
        self.last_event = self.last_event or event.event_id  # what follows may be lost with the connection
        return event

    def _check(self, resumed: SessionResumed) -> None:
        """Raises ``SessionLost`` if the server lacks a client event that is no longer kept here, so it cannot
        be sent again."""
        last = resumed.last_client_event
        if self._forgotten is not None and last != self._forgotten and last not in self._unsure:
            raise SessionLost(
                "The server lacks some events, which are not kept here any more", code="events_expired"
            )
