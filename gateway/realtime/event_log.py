"""The server events of one session: their order, their ids, and a copy of the latest ones for a client that
lost its connection.

There is one queue: events leave in the order in which they are posted, which is the order in which the session
changed. To leave is to get an id and to be sent, or only kept if there is no socket. An event that acknowledges
something has a *ticket*, a future: it does not leave, and nothing behind it does, until the journal has what it
acknowledges. Most events of a reply have none. An event's id says how far the session's events had left:

    event_<opening>-<number>-<reply>-<told>

The *opening* is a random word, new each time the session is opened from the journal. The number is the event's
own. `reply` and `told` name the latest event of a reply in the conversation that had left: event number `told`
of reply number `reply`. After a new opening the events of the last reply are made again from the journal, one
for one as before. So `reply` and `told` are enough to know what a client has read.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
from msgspec import UNSET

from ...sdk.frames import codec
from ...sdk.frames.server import (
    ArgumentsDelta,
    OutputItemDone,
    ReasoningDelta,
    ResponseDone,
    ServerEvent,
    TextDelta,
)
from ...sessions.errors import EventsExpired
from ..net.flag import Flag
from ..net.outbox import SessionOutbox
from ..settings import ClientLimits

Ticket: TypeAlias = asyncio.Future[None]
_EVENT_ID = re.compile(r"event_([0-9a-f]{8})-([0-9]{1,18})-([0-9]{1,18})-([0-9]{1,18})(-[0-9a-f]{4})?")
UNSENT = ""
"""The `event_id` of an event that has not been sent: the event log gives it its own when it sends it."""
_NO_REPLY = (0, 0)
_ALONE = (TextDelta, ArgumentsDelta, ReasoningDelta, OutputItemDone, ResponseDone)
"""Types of events that mostly come one at a time, so they are written without a wait for others to be written
with them: the deltas, and the last events of a reply in brief."""


_ENCODER = msgspec.json.Encoder()
_TAIL = b'"","event_id":""}'


class DeltaFrames:
    """Encodes the `response.output_text.delta` events of one message fast: all but the text and the event's id
    is encoded once. ``delta``: such an event with an empty
    text and event id and no log probabilities."""

    __slots__ = ("_head",)

    def __init__(self, delta: TextDelta) -> None:
        frame = codec.encode(delta)
        assert frame.endswith(b'"delta":' + _TAIL), "text and id are the last fields"
        self._head = frame.removesuffix(_TAIL)

    def frame(self, event_id: str, text: str) -> bytes:
        """The encoded event with this id and text: the same bytes as `codec.encode` makes. JSON must need no
        escape in ``event_id``."""
        return b'%b%b,"event_id":"%b"}' % (self._head, _ENCODER.encode(text), event_id.encode())


@dataclass(frozen=True, slots=True)
class EventPosition:
    """How far a session's events have been sent; the id of an event is this as text. ``opening``: a random word
    for this stay of the session in memory. ``number``: the event's own number, from 1.

    ``reply``, ``told``: the latest event of a reply in the conversation that has been sent, this one included:
    the number of the reply in the session, and the event's number in that reply, both from 1. Before a reply's
    first event, ``told`` is 0.
    """

    opening: str
    number: int
    reply: int
    told: int

    @classmethod
    def parse(cls, event_id: str) -> EventPosition | None:
        """Read an event's id. None if it does not have the form of this server's ids."""
        found = _EVENT_ID.fullmatch(event_id)
        return None if found is None else cls(found[1], int(found[2]), int(found[3]), int(found[4]))

    def __str__(self) -> str:
        return _event_id(self.opening, self.number, self.reply, self.told)


def _event_id(opening: str, number: int, reply: int, told: int) -> str:
    return f"event_{opening}-{number}-{reply}-{told}"


class _Pending(msgspec.Struct, frozen=True):
    """An event in the queue. ``ticket``: done when the journal has what it acknowledges; None: nothing to wait
    for. ``reply``, ``told``: the number of the reply that it is part of, and its number in it; 0 for an event
    that is not of a reply in the conversation. ``patient``: it may wait a little in the socket's outbox."""

    event: ServerEvent
    ticket: Ticket | None
    reply: int
    told: int
    patient: bool

    @property
    def durable(self) -> bool:
        """Whether the journal has what the event acknowledges. It stays false if the journal was closed without
        it."""
        ticket = self.ticket
        return ticket is None or (ticket.done() and not ticket.cancelled() and ticket.exception() is None)


class _Sent(msgspec.Struct, frozen=True, gc=False):
    """An event that has been sent, or would have been if there were a socket; it is kept so that it can be sent
    again. ``number``: its number in the session. ``reply``, ``told``: the number of the reply that it is part
    of and its number in it; 0 if it is not of a reply in the conversation. ``frame``: its bytes. ``done``: the
    event itself if it is a `response.done`, which is encoded again each time, because it shows the handle that
    is current then; else None."""

    number: int
    reply: int
    told: int
    frame: bytes
    done: ResponseDone | None = None


class EventLog:
    """The server events of one session. It numbers them, sends them to the session's socket in order, holds
    back what the journal does not have yet, and keeps the latest for a client that lost its connection.

    ``limits``: how many bytes are kept. ``replies``: the number of replies that the session has had, without
    the last one if that one's events are posted again from the journal; the next reply gets the next number.
    ``handle`` returns the session's current handle, which `response.done` shows.
    """

    def __init__(self, limits: ClientLimits, replies: int = 0, handle: Callable[[], str] = str) -> None:
        self._limits = limits
        self._handle = handle
        self._opening = secrets.token_hex(4)
        self._number = 0
        self._reply, self._told = replies, 0  # position of the event that was queued last
        self._left = (replies, 0)  # position of the event that left last
        self._read = _NO_REPLY  # what the client has read of a reply that is told again
        self._waiting: deque[_Pending] = deque()
        self._log: deque[_Sent] = deque()
        self._log_bytes = 0
        self._unread = 0  # bytes of events that left while there was no socket
        self._outbox: SessionOutbox | None = None
        self._changed = Flag()

    @property
    def holding(self) -> bool:
        """Whether events wait for the journal."""
        return bool(self._waiting)

    @property
    def behind(self) -> bool:
        """Whether the events of a reply are being posted again from the journal, and have not yet come to the
        last one that the client read before the session was opened."""
        return (self._reply, self._told) < self._read

    def begin_reply(self) -> None:
        """Called when the next reply begins: events that are posted as a reply's from now on belong to it. Kept
        events that were sent before the first event of the previous reply are dropped."""
        self._reply, self._told = self._reply + 1, 0
        self._forget_before(self._reply - 1)

    def post(
        self,
        events: Iterable[ServerEvent],
        ticket: Ticket | None = None,
        *,
        of_reply: bool = False,
        patient: bool = False,
    ) -> None:
        """Put events behind those that were posted before, without waiting. Each is sent when these are sent
        and ``ticket`` is done: it gets its id, is kept, and goes to the socket if there is one.

        ``ticket``: done when the journal has what the events acknowledge; None: nothing to wait for.
        ``of_reply``: they belong to the reply that writes the conversation. ``patient``: they may wait a little
        in the socket's outbox, to be written with later ones.
        """
        for event in events:
            self._told += of_reply
            position = (self._reply, self._told) if of_reply else _NO_REPLY
            self._waiting.append(_Pending(event, ticket, *position, patient))
        if ticket is not None and not ticket.done():
            ticket.add_done_callback(lambda _: self._release())
        self._release()

    def post_ahead(self, event: ServerEvent) -> None:
        """Send an event at once, before those that wait for the journal: news of the server, which tells
        nothing of what the session does."""
        self._leave(_Pending(event, None, *_NO_REPLY, patient=False))
        self._changed.set()

    def post_text(self, frames: DeltaFrames, text: str, *, of_reply: bool) -> bool:
        """Send more text of a reply's message to the socket within the call, as `post` would send it.

        Returns False, and does nothing, if other events wait, if the socket is gone or can take no more, or if
        the reply is sent again from the journal and the client has read this event before. Then use `post`.
        ``frames``: encodes the events of that message. ``of_reply``: as in `post`.
        """
        outbox = self._outbox
        if outbox is None or not outbox.free or self._waiting:
            return False
        position = _NO_REPLY
        if of_reply:
            position = (self._reply, self._told + 1)
            if position <= self._read:
                return False
            self._told += 1
            if position > self._left:
                self._left = position
        self._number += 1
        frame = frames.frame(_event_id(self._opening, self._number, *self._left), text)
        self._keep(_Sent(self._number, *position, frame))
        outbox.post_now(frame)
        return True

    def open_to(self, outbox: SessionOutbox) -> None:
        """Use ``outbox``, a socket's, from now on, and send to it the events that were made so far. For a new
        session."""
        self._outbox = outbox
        outbox.post([told.frame for told in self._log])

    def attach(
        self,
        outbox: SessionOutbox,
        greeting: Callable[[str, bool], ServerEvent],
        after: str | None,
        *,
        running: bool = False,
    ) -> None:
        """Use ``outbox``, of a client that has come back, from now on, instead of the one before. Send a
        greeting, then the kept events behind the event with the id ``after``, and then each new event. If
        ``after`` is None, the client has read nothing: of the kept events it gets only those of the last reply,
        and only if that is ``running``.

        ``greeting`` makes the greeting. Its arguments: the greeting's id, which names the position before the
        events that follow; and whether ``after`` is None or from before the session was last opened from the
        journal. Raises ``EventsExpired`` if the events behind ``after`` are not kept any more; then nothing has
        changed.
        """
        kept = self._since(after, running)
        self.detach()
        self._outbox = outbox
        known = None if after is None else EventPosition.parse(after)
        other = known is None or known.opening != self._opening
        greeted = greeting(f"{self._before(kept, known)}-{secrets.token_hex(2)}", other)
        frames = [self._shown(told.done) if told.done else told.frame for told in kept]
        outbox.post([codec.encode(greeted), *frames])
        self._unread = 0
        self._changed.set()

    def detach(self) -> None:
        """Called when the socket is gone: nothing more is sent to it. Later events are kept for the next
        socket."""
        if self._outbox is not None:
            self._outbox.abandon()
            self._outbox = None

    async def room(self) -> None:
        """Wait until the caller may make more events. With a socket: until that can take more. Without one:
        until less than half of the bytes that may be kept have come since it went, or there is a new socket."""
        while True:
            self._changed.clear()
            outbox = self._outbox
            if outbox is not None:
                await outbox.room()
                if outbox is self._outbox:
                    return
            elif self._unread < self._limits.log_bytes // 2:
                return
            else:
                await self._changed.wait()

    async def flushed(self) -> None:
        """Wait until no posted event is held back any more, and the socket, if there is one, has written
        all."""
        while self.holding:
            self._changed.clear()
            await self._changed.wait()
        if self._outbox is not None:
            await self._outbox.emptied()

    # --- inside ---------------------------------------------------------------------------------------------

    def _release(self) -> None:
        """Send the waiting events up to the first that the journal does not have."""
        while self._waiting and self._waiting[0].durable:
            self._leave(self._waiting.popleft())
        self._changed.set()

    def _leave(self, held: _Pending) -> None:
        self._number += 1
        position = (held.reply, held.told)
        self._left = max(self._left, position)
        event_id = _event_id(self._opening, self._number, *self._left)
        event = msgspec.structs.replace(held.event, event_id=event_id)
        done = event if isinstance(event, ResponseDone) else None
        frame = codec.encode(event) if done is None else self._shown(done)
        self._keep(_Sent(self._number, *position, frame, done))
        if self._outbox is None:
            self._unread += len(frame)
        elif not self._was_read(held, position):
            if isinstance(event, _ALONE):
                self._outbox.post_now(frame)
            else:
                self._outbox.post([frame], patient=held.patient)

    def _was_read(self, held: _Pending, position: tuple[int, int]) -> bool:
        """Whether the client has read this event already, before the session was opened from the journal, so
        that it is not sent again. ``position``: the number of the event's reply and its number in it.
        `response.done` counts as not read: an interrupted reply ends only now."""
        return _NO_REPLY < position <= self._read and not isinstance(held.event, ResponseDone)

    def _before(self, kept: list[_Sent], known: EventPosition | None) -> EventPosition:
        """The position just before the events ``kept``, which are sent again, for the greeting's id. ``known``:
        the position of the event that the client read last; None if it named none."""
        number = kept[0].number - 1 if kept else self._number
        if known is not None:
            return EventPosition(self._opening, number, known.reply, known.told)
        return EventPosition(self._opening, number, *((self._reply, 0) if kept else self._left))

    def _shown(self, done: ResponseDone) -> bytes:
        return codec.encode(msgspec.structs.replace(done, handle=self._handle() or UNSET))

    def _keep(self, told: _Sent) -> None:
        self._log.append(told)
        self._log_bytes += len(told.frame)
        while self._log_bytes > self._limits.log_bytes:
            self._log_bytes -= len(self._log.popleft().frame)

    def _forget_before(self, reply: int) -> None:
        """Drop the kept events that were sent before the first event of reply number ``reply``. A client that
        asks for a new reply has read them."""
        first = next((told.number for told in self._log if told.reply >= reply), 0)
        while self._log and self._log[0].number < first:
            self._log_bytes -= len(self._log.popleft().frame)

    def _since(self, after: str | None, running: bool) -> list[_Sent]:
        if after is None:
            return [told for told in self._log if running and told.reply == self._reply]
        position = EventPosition.parse(after)
        if position is None:
            raise EventsExpired("`last_event` names no event of this session", param="last_event")
        if position.opening == self._opening:
            first = self._log[0].number if self._log else self._number + 1
            if not first - 1 <= position.number <= self._number:
                raise EventsExpired("What came after `last_event` is not kept any more", param="last_event")
            return [told for told in self._log if told.number > position.number]
        self._number = max(self._number, position.number)
        self._read = (position.reply, position.told)
        return [told for told in self._log if (told.reply, told.told) > self._read]
