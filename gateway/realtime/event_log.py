"""The server events of one session, in order, and kept for a while for a client that was cut off.

An event's id is its place: its number, and the position in the replies that write the conversation. An
acknowledgement is held until the journal has what it acknowledges; events of a reply do not wait for it.

    event_<opening>-<number>-<reply>-<told>     the `told`th event of the session's `reply`th reply

The opening changes each time the session is opened from the journal. Replies are then told again, event for
event, so `reply` and `told` are enough to know what a client has read.
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
from ...sdk.frames.server import ResponseDone, ServerEvent
from ...sessions.errors import EventsExpired
from ..net.outbox import SessionOutbox
from ..settings import ClientLimits

Ticket: TypeAlias = asyncio.Future[None]
ANSWERS = "answers"
"""The lane of answers to client events."""
NEWS = "news"
"""The lane of events that answer nothing. Nothing is held in it."""
WRITER = "writer"
"""The lane of the replies that write the conversation."""

_EVENT_ID = re.compile(r"event_([0-9a-f]{8})-([0-9]{1,18})-([0-9]{1,18})-([0-9]{1,18})(-[0-9a-f]{4})?")
_NO_REPLY = (0, 0)


@dataclass(frozen=True, slots=True)
class EventPlace:
    """The place of an event, which its id names."""

    opening: str
    number: int
    reply: int
    told: int

    @classmethod
    def parse(cls, event_id: str) -> EventPlace | None:
        """The place that an event id names; None for an id that this server did not make."""
        found = _EVENT_ID.fullmatch(event_id)
        return None if found is None else cls(found[1], int(found[2]), int(found[3]), int(found[4]))

    def __str__(self) -> str:
        return f"event_{self.opening}-{self.number}-{self.reply}-{self.told}"


@dataclass(frozen=True, slots=True)
class _Pending:
    """An event that waits until its ``ticket`` is done and the earlier events of its lane have left.

    ``ticket``: done when the journal has what the event acknowledges; None: nothing to wait for. ``reply``,
    ``told``: in the writer's lane its reply and its number there, else 0. ``patient``: see `Outbox.post`.
    """

    event: ServerEvent
    ticket: Ticket | None
    reply: int
    told: int
    patient: bool


@dataclass(frozen=True, slots=True)
class _Sent:
    """An event that has left. ``done``: a reply's last event, which shows the current handle when sent."""

    number: int
    reply: int
    told: int
    frame: bytes
    done: ResponseDone | None = None


class EventLog:
    """The events of one session. ``replies``: the number of replies before this opening. ``handle`` returns the
    session's current handle.
    """

    def __init__(self, limits: ClientLimits, replies: int = 0, handle: Callable[[], str] = str) -> None:
        self._limits = limits
        self._handle = handle
        self._opening = secrets.token_hex(4)
        self._number = 0
        self._reply, self._told = replies, 0  # of the event queued last
        self._left = (replies, 0)  # of the event that left last
        self._read = _NO_REPLY  # what the client has read of a reply that is told again
        self._lanes: dict[str, deque[_Pending]] = {}
        self._log: deque[_Sent] = deque()
        self._log_bytes = 0
        self._unread = 0  # bytes of events that left while there was no socket
        self._outbox: SessionOutbox | None = None
        self._changed = asyncio.Event()

    @property
    def holding(self) -> bool:
        """Whether anything waits for the journal."""
        return any(self._lanes.values())

    @property
    def behind(self) -> bool:
        """Whether a reply that is told again has not reached the event that the client read last."""
        return (self._reply, self._told) < self._read

    def begin_reply(self) -> None:
        """Count what is posted to the writer's lane from now on as the next reply."""
        self._reply, self._told = self._reply + 1, 0
        self._forget_before(self._reply - 1)

    def post(
        self,
        events: Iterable[ServerEvent],
        lane: str = ANSWERS,
        ticket: Ticket | None = None,
        *,
        patient: bool = False,
    ) -> None:
        """Let events leave in the order of their lane, not before ``ticket`` is done. ``patient``: see
        `Outbox.post`.
        """
        waiting = self._lanes.setdefault(lane, deque())
        for event in events:
            if lane == WRITER:
                self._told += 1
                waiting.append(_Pending(event, ticket, self._reply, self._told, patient))
            else:
                waiting.append(_Pending(event, ticket, *_NO_REPLY, patient))
        if ticket is not None and not ticket.done():
            ticket.add_done_callback(lambda _: self._release(lane))
        self._release(lane)

    def open_to(self, outbox: SessionOutbox) -> None:
        """Send everything to ``outbox``, from the first event on."""
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
        """Send to ``outbox`` the greeting, the events after the event ``after``, and all from now on.

        Without ``after``: the whole of a reply that is ``running``. ``greeting`` gets its event id, which names
        the place before the events that are sent again, and whether ``after`` is of another opening. Raises
        ``EventsExpired``.
        """
        kept = self._since(after, running)
        self.detach()
        self._outbox = outbox
        known = None if after is None else EventPlace.parse(after)
        other = known is None or known.opening != self._opening
        greeted = greeting(f"{self._before(kept, known)}-{secrets.token_hex(2)}", other)
        frames = [self._shown(told.done) if told.done else told.frame for told in kept]
        outbox.post([codec.encode(greeted), *frames])
        self._unread = 0
        self._changed.set()

    def detach(self) -> None:
        """There is no socket: keep what is posted."""
        if self._outbox is not None:
            self._outbox.abandon()
            self._outbox = None

    async def room(self) -> None:
        """Wait until the socket takes more, or without a socket until more can be kept."""
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
        """Wait until nothing is held and the socket has all."""
        while self.holding:
            self._changed.clear()
            await self._changed.wait()
        if self._outbox is not None:
            await self._outbox.emptied()

    # --- inside ---------------------------------------------------------------------------------------------

    def _release(self, lane: str) -> None:
        waiting = self._lanes.get(lane, deque())
        while waiting and (waiting[0].ticket is None or waiting[0].ticket.done()):
            self._leave(waiting.popleft())
        if not waiting:
            self._lanes.pop(lane, None)
        self._changed.set()

    def _leave(self, held: _Pending) -> None:
        self._number += 1
        place = (held.reply, held.told)
        self._left = max(self._left, place)
        event_id = str(EventPlace(self._opening, self._number, *self._left))
        event = msgspec.structs.replace(held.event, event_id=event_id)
        done = event if isinstance(event, ResponseDone) else None
        frame = codec.encode(event) if done is None else self._shown(done)
        self._keep(_Sent(self._number, *place, frame, done))
        if self._outbox is None:
            self._unread += len(frame)
        elif not self._was_read(held, place):
            self._outbox.post([frame], patient=held.patient)

    def _was_read(self, held: _Pending, place: tuple[int, int]) -> bool:
        """Whether the client has read the event before. A reply that ends only now was not read to its end."""
        return _NO_REPLY < place <= self._read and not isinstance(held.event, ResponseDone)

    def _before(self, kept: list[_Sent], known: EventPlace | None) -> EventPlace:
        """The place before ``kept``, for a client that was at ``known``."""
        number = kept[0].number - 1 if kept else self._number
        if known is not None:
            return EventPlace(self._opening, number, known.reply, known.told)
        return EventPlace(self._opening, number, *((self._reply, 0) if kept else self._left))

    def _shown(self, done: ResponseDone) -> bytes:
        return codec.encode(msgspec.structs.replace(done, handle=self._handle() or UNSET))

    def _keep(self, told: _Sent) -> None:
        self._log.append(told)
        self._log_bytes += len(told.frame)
        while self._log_bytes > self._limits.log_bytes:
            self._log_bytes -= len(self._log.popleft().frame)

    def _forget_before(self, reply: int) -> None:
        """Forget earlier replies: a client that asks for a new one has read them."""
        first = next((told.number for told in self._log if told.reply >= reply), 0)
        while self._log and self._log[0].number < first:
            self._log_bytes -= len(self._log.popleft().frame)

    def _since(self, after: str | None, running: bool) -> list[_Sent]:
        if after is None:
            return [told for told in self._log if running and told.reply == self._reply]
        place = EventPlace.parse(after)
        if place is None:
            raise EventsExpired("`last_event` names no event of this session", param="last_event")
        if place.opening == self._opening:
            first = self._log[0].number if self._log else self._number + 1
            if not first - 1 <= place.number <= self._number:
                raise EventsExpired("What came after `last_event` is not kept any more", param="last_event")
            return [told for told in self._log if told.number > place.number]
        self._number = max(self._number, place.number)
        self._read = (place.reply, place.told)
        return [told for told in self._log if (told.reply, told.told) > self._read]
