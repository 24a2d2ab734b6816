"""Coming back to a session on a new connection: what the server must be told, and what not twice.

Keeps the newest handle, the last event that was read and the client events the server may not have yet; finds
the way back with growing, jittered pauses. Knows nothing of turns.
"""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping
from dataclasses import dataclass

import anyio
import msgspec

from .errors import ConnectionFailed, ConnectionLost, ProtocolBroken, SessionLost
from .frames import codec
from .frames.client import SessionResume
from .frames.server import ErrorEvent, ServerEvent, SessionResumed
from .transport import Transport

FINAL_CODES = frozenset({1002, 1003, 1007, 1008, 1009, 1010, 4001})
"""Closes after which coming back would end the same, or take the session from who has it now."""
MAX_UNSURE = 1024


@dataclass(frozen=True, slots=True)
class Patience:
    """Pauses before each try, in seconds: up to ``first``, then up to ``factor`` times the last.

    No try begins later than ``total`` after the connection was lost.
    """

    first: float = 0.05
    factor: float = 2.0
    longest: float = 2.0
    total: float = 60.0

    def pauses(self) -> Iterator[float]:
        """Each a random part of its bound, so that a server's clients do not come back all at once."""
        bound = self.first
        while True:
            yield random.uniform(0, bound)
            bound = min(self.longest, bound * self.factor)


class _AnyEvent(msgspec.Struct):
    event_id: str | None = None


class Return:
    """The way back to one session. ``dial`` gives a connection that expects `session.resume`."""

    def __init__(self, dial: Callable[[], Awaitable[Transport]], patience: Patience | None = None) -> None:
        self.handle: str | None = None
        self.last_event: str | None = None
        self.patience = patience or Patience()
        self._dial = dial
        self._unsure: OrderedDict[str, bytes] = OrderedDict()  # sent, and not known to have arrived
        self._forgotten: str | None = None  # the last one of them that is not kept any more

    def another(self, handle: str) -> Return:
        """The way to another session of the same server."""
        back = Return(self._dial, self.patience)
        back.handle = handle
        return back

    def possible(self, lost: ConnectionLost) -> bool:
        """Whether it makes sense to come back after this end."""
        return self.handle is not None and lost.close_code not in FINAL_CODES

    # --- what goes and comes --------------------------------------------------------------------------------

    def sent(self, event_id: str, frame: bytes) -> None:
        """A client event is on its way."""
        self._unsure[event_id] = frame
        while len(self._unsure) > MAX_UNSURE:
            self._forgotten, _ = self._unsure.popitem(last=False)

    def read(self, frame: bytes, event: ServerEvent | None) -> None:
        """A server event was read, of whatever type."""
        event_id = (
            event.event_id if event is not None else msgspec.json.decode(frame, type=_AnyEvent).event_id
        )
        if event_id:
            self.last_event = event_id
        handle = getattr(event, "handle", None)
        if isinstance(handle, str):
            self.handle = handle

    def arrived(self, event_id: str) -> None:
        """The server has this client event and all before it."""
        if event_id in self._unsure:
            self._forgotten = None
            for known in list(self._unsure):
                del self._unsure[known]
                if known == event_id:
                    return

    # --- the way --------------------------------------------------------------------------------------------

    async def connect(self) -> tuple[Transport, SessionResumed]:
        """One try: a new connection on which the session goes on.

        Raises ``ConnectionFailed`` or ``ConnectionLost`` where another try may help, else ``SessionLost``.
        """
        transport = await self._dial()
        try:
            resumed = await self._resume(transport)
            self._check(resumed)
            return transport, resumed
        except BaseException:
            await transport.aclose()
            raise

    async def persist(self) -> tuple[Transport, SessionResumed]:
        """As `connect`, tried again for as long as `patience` has it."""
        give_up = deadline(self.patience)
        for pause in self.patience.pauses():
            try:
                return await self.connect()
            except SessionLost:
                raise
            except (ConnectionFailed, ConnectionLost):
                if time.monotonic() > give_up:
                    raise
            await anyio.sleep(pause)
        raise AssertionError("pauses have no end")

    def _check(self, resumed: SessionResumed) -> None:
        """Raises ``SessionLost`` where the server lacks what is not kept to be sent again: more than
        `MAX_UNSURE` events were on their way."""
        last = resumed.last_client_event
        if self._forgotten is not None and last != self._forgotten and last not in self._unsure:
            raise SessionLost(
                "The server has not got all that was sent, some of which is not kept", code="events_expired"
            )

    async def _resume(self, transport: Transport) -> SessionResumed:
        resume = SessionResume(event_id="resume", handle=self.handle or "", last_event=self.last_event)
        await transport.send(codec.encode(resume))
        return await self.greeted(transport)

    async def greeted(self, transport: Transport) -> SessionResumed:
        """The answer to `session.resume` or `session.attach`. Raises ``SessionLost``."""
        event = codec.decode_server(await transport.receive())
        if isinstance(event, ErrorEvent):
            if event.error.code == "storage_unavailable":
                raise ConnectionFailed(event.error.message)
            raise SessionLost(event.error.message, code=event.error.code)
        if not isinstance(event, SessionResumed):
            raise ProtocolBroken("The server did not answer session.resume")
        self.handle = event.handle
        self.last_event = self.last_event or event.event_id  # what follows may be lost with the connection
        return event

    def again(self, resumed: SessionResumed, awaited: Mapping[str, bytes | None]) -> list[bytes]:
        """The frames that the server must be sent again, in order.

        ``awaited``: events whose answers somebody waits for, and their frames; a session from the journal
        answers them again.
        """
        self.arrived(resumed.last_client_event or "")
        again = awaited.items() if resumed.reopened else ()
        lost = [frame for event_id, frame in again if frame is not None and event_id not in self._unsure]
        return [*lost, *self._unsure.values()]

    def frame_of(self, event_id: str) -> bytes | None:
        """An event that was just sent; None where it is not kept."""
        return self._unsure.get(event_id)

    def since(self, sent: Container[bytes]) -> list[bytes]:
        """The frames that were given since, in order."""
        return [frame for frame in self._unsure.values() if frame not in sent]


def deadline(patience: Patience) -> float:
    """When to give up, by ``time.monotonic()``."""
    return time.monotonic() + patience.total
