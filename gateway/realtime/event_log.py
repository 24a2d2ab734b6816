"""What a session tells its client, in order, kept for a while: so that a socket may be cut and another go on.

Every event gets a place: its number, and how far the replies that write the conversation had come with it.
An acknowledgement is held until the journal has what it acknowledges; what is told of a reply meanwhile does
not wait for it. Knows nothing of sockets, nor of what an event means.

    event_<opening>-<number>-<reply>-<told>     the `told`th event of the session's `reply`th reply

The opening is a new one each time a session is opened from the journal; replies are told again then, event
for event, so reply and told are enough to know what a client has read.
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
from ..net.outbox import FrameSink
from ..settings import Limits

Ticket: TypeAlias = asyncio.Future[None]
ANSWERS = "answers"
"""The lane of what answers client events."""
NEWS = "news"
"""The lane of what nobody asked for, and nothing is held in."""
WRITER = "writer"
"""The lane of the replies that write the conversation."""

_EVENT_ID = re.compile(r"event_([0-9a-f]{8})-([0-9]{1,18})-([0-9]{1,18})-([0-9]{1,18})(-[0-9a-f]{4})?")
_NOWHERE = (0, 0)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an event stands."""

    opening: str
    number: int
    reply: int
    told: int

    @classmethod
    def parse(cls, event_id: str) -> Place | None:
        """The place an event id names; None for one that is not ours."""
        found = _EVENT_ID.fullmatch(event_id)
        return None if found is None else cls(found[1], int(found[2]), int(found[3]), int(found[4]))

    def __str__(self) -> str:
        return f"event_{self.opening}-{self.number}-{self.reply}-{self.told}"


@dataclass(frozen=True, slots=True)
class _Held:
    """An event that waits for its ticket, or for those before it. ``reply`` and ``told`` if of the writer."""

    event: ServerEvent
    ticket: Ticket | None
    reply: int
    told: int
    patient: bool


@dataclass(frozen=True, slots=True)
class _Told:
    """An event that has left."""

    number: int
    reply: int
    told: int
    frame: bytes
    done: ResponseDone | None = None  # it shows the current handle whenever it is told


class EventLog:
    """The events of one session. ``replies``: how many replies there were before this opening.

    ``handle`` gives the session's current one.
    """

    def __init__(self, limits: Limits, replies: int = 0, handle: Callable[[], str] = str) -> None:
        self._limits = limits
        self._handle = handle
        self._opening = secrets.token_hex(4)
        self._number = 0
        self._reply, self._told = replies, 0  # of the event queued last
        self._left = (replies, 0)  # of the event that left last
        self._read = _NOWHERE  # what the client has read of replies that are told again
        self._lanes: dict[str, deque[_Held]] = {}
        self._log: deque[_Told] = deque()
        self._log_bytes = 0
        self._unread = 0  # bytes told while nobody was there
        self._outbox: FrameSink | None = None
        self._changed = asyncio.Event()

    @property
    def holding(self) -> bool:
        """Whether anything waits for the journal."""
        return any(self._lanes.values())

    @property
    def behind(self) -> bool:
        """Whether a reply that is told again has not come to where the client was."""
        return (self._reply, self._told) < self._read

    def begin_reply(self) -> None:
        """What is posted to the writer's lane from now on is of the next reply."""
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
        """Let events leave in order of their lane, with ``ticket`` not before it is done; ``patient``: perhaps
        with what follows, see `Outbox.post`.
        """
        waiting = self._lanes.setdefault(lane, deque())
        for event in events:
            if lane == WRITER:
                self._told += 1
                waiting.append(_Held(event, ticket, self._reply, self._told, patient))
            else:
                waiting.append(_Held(event, ticket, *_NOWHERE, patient))
        if ticket is not None and not ticket.done():
            ticket.add_done_callback(lambda _: self._release(lane))
        self._release(lane)

    def open_to(self, outbox: FrameSink) -> None:
        """Tell ``outbox`` all, from the beginning on."""
        self._outbox = outbox
        outbox.post([told.frame for told in self._log])

    def attach(
        self,
        outbox: FrameSink,
        greeting: Callable[[str, bool], ServerEvent],
        after: str | None,
        *,
        running: bool = False,
    ) -> None:
        """Tell ``outbox`` the greeting, what was told after the event ``after``, and all from now on.

        Without ``after``: the whole of a reply that is ``running``. The greeting is made of its event id, which
        stands for the place before what is told again, and of whether ``after`` is of another opening. Raises
        ``EventsExpired``.
        """
        kept = self._since(after, running)
        self.detach()
        self._outbox = outbox
        known = None if after is None else Place.parse(after)
        other = known is None or known.opening != self._opening
        greeted = greeting(f"{self._before(kept, known)}-{secrets.token_hex(2)}", other)
        frames = [self._shown(told.done) if told.done else told.frame for told in kept]
        outbox.post([codec.encode(greeted), *frames])
        self._unread = 0
        self._changed.set()

    def detach(self) -> None:
        """Nobody is there; what is told is kept."""
        if self._outbox is not None:
            self._outbox.abandon()
            self._outbox = None

    async def room(self) -> None:
        """Wait until the reader can take more, or while nobody is there until more can be kept."""
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
        """Wait until nothing is held, and the reader has all."""
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

    def _leave(self, held: _Held) -> None:
        self._number += 1
        place = (held.reply, held.told)
        self._left = max(self._left, place)
        event_id = str(Place(self._opening, self._number, *self._left))
        event = msgspec.structs.replace(held.event, event_id=event_id)
        done = event if isinstance(event, ResponseDone) else None
        frame = codec.encode(event) if done is None else self._shown(done)
        self._keep(_Told(self._number, *place, frame, done))
        if self._outbox is None:
            self._unread += len(frame)
        elif not self._was_read(held, place):
            self._outbox.post([frame], patient=held.patient)

    def _was_read(self, held: _Held, place: tuple[int, int]) -> bool:
        """A reply's end is acknowledged, hence in the journal: one that ends now was read by nobody."""
        return _NOWHERE < place <= self._read and not isinstance(held.event, ResponseDone)

    def _before(self, kept: list[_Told], known: Place | None) -> Place:
        """The place of a client that has yet to read ``kept``, and was at ``known`` before."""
        number = kept[0].number - 1 if kept else self._number
        if known is not None:
            return Place(self._opening, number, known.reply, known.told)
        return Place(self._opening, number, *((self._reply, 0) if kept else self._left))

    def _shown(self, done: ResponseDone) -> bytes:
        return codec.encode(msgspec.structs.replace(done, handle=self._handle() or UNSET))

    def _keep(self, told: _Told) -> None:
        self._log.append(told)
        self._log_bytes += len(told.frame)
        while self._log_bytes > self._limits.log_bytes:
            self._log_bytes -= len(self._log.popleft().frame)

    def _forget_before(self, reply: int) -> None:
        """Who asks for a reply has read the one before the last: nobody comes back to it."""
        first = next((told.number for told in self._log if told.reply >= reply), 0)
        while self._log and self._log[0].number < first:
            self._log_bytes -= len(self._log.popleft().frame)

    def _since(self, after: str | None, running: bool) -> list[_Told]:
        if after is None:
            return [told for told in self._log if running and told.reply == self._reply]
        place = Place.parse(after)
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
