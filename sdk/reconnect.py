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

from .errors import ConnectionFailed, ConnectionLost, KeyRejected, ProtocolBroken, SessionLost
from .frames.client import SessionResume
from .frames.server import ErrorEvent, ServerEvent, SessionResumed
from .transport import Transport

FINAL_CODES = frozenset({1002, 1003, 1007, 1008, 1009, 1010, 4001})
"""Close codes after which the session is not resumed: it would end the same, or another client has it now."""
MAX_UNSURE = 1024
"""Client events that are kept to be sent again."""
_Result = TypeVar("_Result")

_GREETING: msgspec.json.Decoder[SessionResumed | ErrorEvent] = msgspec.json.Decoder(
    SessionResumed | ErrorEvent
)


@dataclass(frozen=True, slots=True)
class Patience:
    """Pauses before each try, in seconds: up to ``first``, then up to ``factor`` times the last bound. No
    bound is above ``longest``. No try begins later than ``total`` after the connection was lost."""

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

    async def retry(self, attempt: Callable[[], Awaitable[_Result]], *, pause: bool = False) -> _Result:
        """What ``attempt`` returns, once it succeeds; ``pause``: also before the first try. Raises
        `SessionLost` and `KeyRejected` at once, and the last `ConnectionFailed` or `ConnectionLost` when
        ``total`` is over."""
        give_up, pauses = time.monotonic() + self.total, self.pauses()
        while True:
            if pause:
                await anyio.sleep(next(pauses))
            try:
                return await attempt()
            except (SessionLost, KeyRejected):
                raise
            except (ConnectionFailed, ConnectionLost):
                if time.monotonic() > give_up:
                    raise
            pause = True


class _AnyEvent(msgspec.Struct):
    event_id: str | None = None


class Resumption:
    """How one session is resumed. ``dial`` gives a connection that expects `session.resume`."""

    def __init__(self, dial: Callable[[], Awaitable[Transport]], patience: Patience | None = None) -> None:
        self.handle: str | None = None
        self.last_event: str | None = None
        self.patience = patience or Patience()
        self._dial = dial
        self._unsure: OrderedDict[str, bytes] = OrderedDict()  # sent, and not known to have arrived
        self._forgotten: str | None = None  # the last of them that is no longer kept

    def another(self, handle: str) -> Resumption:
        """The same for another session of the same server."""
        resumption = Resumption(self._dial, self.patience)
        resumption.handle = handle
        return resumption

    def possible(self, lost: ConnectionLost) -> bool:
        """Whether the session may be resumed after this loss."""
        return self.handle is not None and lost.close_code not in FINAL_CODES

    # --- what is sent and received --------------------------------------------------------------------------

    def sent(self, event_id: str, frame: bytes) -> None:
        """Keep a client event that is sent."""
        self._unsure[event_id] = frame
        while len(self._unsure) > MAX_UNSURE:
            self._forgotten, _ = self._unsure.popitem(last=False)

    def read(self, frame: bytes, event: ServerEvent | None) -> None:
        """Note a server event that was received; None: its type is not known here."""
        event_id = (
            event.event_id if event is not None else msgspec.json.decode(frame, type=_AnyEvent).event_id
        )
        if event_id:
            self.last_event = event_id
        handle = getattr(event, "handle", None)
        if isinstance(handle, str):
            self.handle = handle

    def arrived(self, event_id: str) -> None:
        """The server has this client event and all before it: they are not sent again."""
        if event_id in self._unsure:
            self._forgotten = None
            for known in list(self._unsure):
                del self._unsure[known]
                if known == event_id:
                    return

    def again(self, resumed: SessionResumed, awaited: Mapping[str, bytes | None]) -> list[bytes]:
        """The frames to send again, in order.

        ``awaited``: ids of client events that wait for an answer, and their frames. They are sent again where
        the session comes from the journal, as its server answers them again.
        """
        self.arrived(resumed.last_client_event or "")
        again = awaited.items() if resumed.reopened else ()
        lost = [frame for event_id, frame in again if frame is not None and event_id not in self._unsure]
        return [*lost, *self._unsure.values()]

    def frame_of(self, event_id: str) -> bytes | None:
        """The frame of an event that was just sent; None where it is not kept."""
        return self._unsure.get(event_id)

    def since(self, sent: Container[bytes]) -> list[bytes]:
        """The frames, in order, that were kept after those in ``sent``."""
        return [frame for frame in self._unsure.values() if frame not in sent]

    # --- the new connection ---------------------------------------------------------------------------------

    async def connect(self) -> tuple[Transport, SessionResumed]:
        """One try: a new connection on which the session goes on. Raises ``ConnectionFailed`` or
        ``ConnectionLost`` where another try may help, else ``SessionLost``."""
        transport = await self._dial()
        try:
            resume = SessionResume(event_id="resume", handle=self.handle or "", last_event=self.last_event)
            await transport.send(msgspec.json.encode(resume))
            resumed = await self.greeted(transport)
            self._check(resumed)
            return transport, resumed
        except BaseException:
            await transport.aclose()
            raise

    async def greeted(self, transport: Transport) -> SessionResumed:
        """The answer to `session.resume` or `session.attach`. Raises ``SessionLost``, ``ProtocolBroken``."""
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
        """Raises ``SessionLost`` where the server lacks an event that is no longer kept."""
        last = resumed.last_client_event
        if self._forgotten is not None and last != self._forgotten and last not in self._unsure:
            raise SessionLost(
                "The server lacks events that were sent and are not kept here", code="events_expired"
            )
