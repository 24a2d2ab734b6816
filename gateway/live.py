"""A session while it is in memory: its conversation, its running responses, what it tells. Outlives sockets.

Whoever holds a socket gives it client events and reads its feed; it runs the responses itself, so they go on
while nobody is there. Knows nothing of channels or handles' owners.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from dataclasses import replace

import msgspec

from ..sdk.frames import client, server
from ..sdk.frames.session import SessionResource
from ..sessions.anticipation import Arrival
from ..sessions.book import Reopened
from ..sessions.errors import SessionError, StorageUnavailable
from ..sessions.events import EndReason, ReplyDone, ReplyStarted
from ..sessions.items import derived_id, new_id
from ..sessions.journal.records import Begun, Configured, Heard, Typed
from ..sessions.journal.replay import Past, error_of
from ..sessions.response import Response
from ..sessions.session import Session
from ..sessions.textbuffer import TextBuffer
from .conversation import (
    CancelResponse,
    Conversation,
    CountArrival,
    Effect,
    Expect,
    KeepingEvent,
    MoveKV,
    Send,
    StartResponse,
)
from .errors import INTERNAL, Draining, wire_error
from .feed import NEWS, WRITER, Feed
from .outbox import Outbox
from .settings import Limits
from .translate import preamble_of

log = logging.getLogger(__name__)

CHANGES = (
    client.SessionUpdate,
    client.ItemCreate,
    client.ItemDelete,
    client.TextCommit,
    client.ResponseCreate,
)
"""Client events whose effects must be kept."""
HELD = (server.ItemDone, server.ResponseDone)
"""Of a reply's events, those that acknowledge."""


class Birth(msgspec.Struct, frozen=True, kw_only=True):
    """What the gateway keeps of a session from birth."""

    session: SessionResource
    conversation: str


def _typed(before: TextBuffer, after: TextBuffer) -> Typed:
    """What has to be written down for the text that is on its way now."""
    start = _shared(before.text, after.text)
    return Typed(start=start, text=after.text[start:], role=after.role, item=after.id)


def _shared(one: str, other: str) -> int:
    """How many characters both begin with, by halving: no loop over characters."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


class _Ids:
    """Names what client events make. An event sent again makes the same again, ids and all."""

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self._event_id: str | None = None
        self._made = 0

    def of(self, event_id: str | None) -> None:
        """What is named from now on comes from this event; None: its id is not to be relied on."""
        self._event_id, self._made = event_id, 0

    def __call__(self, prefix: str) -> str:
        if self._event_id is None:
            return new_id(prefix)
        self._made += 1
        return derived_id(prefix, self._session_id, self._event_id, str(self._made))


class LiveSession:
    """One session. Make it with ``begin`` or ``again``.

    ``resumable``: its client can come back, so replies go on without it.
    """

    def __init__(
        self, session: Session, birth: Birth, limits: Limits, vocab_size: int, replies: int = 0
    ) -> None:
        self._ids = _Ids(session.id)
        self.session = session
        self.conversation = Conversation(
            msgspec.structs.replace(birth.session, id=session.id),
            session.history,
            ids=self._ids,
            parallel_responses=limits.parallel_responses,
            vocab_size=vocab_size,
            conversation_id=birth.conversation,
        )
        self.feed = Feed(limits, replies, lambda: session.handles.current)
        self.resumable = False
        self.reopened = False
        self._from_journal = False
        self.heard: deque[str] = deque(maxlen=limits.client_events)
        self._responses: dict[str, Response] = {}
        self._waiting_cancels: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    @classmethod
    def begin(cls, session: Session, birth: Birth, limits: Limits, vocab_size: int) -> LiveSession:
        """A new session's; its greeting is the first it tells."""
        made = cls(session, birth, limits, vocab_size)
        handle = session.handles.current
        made.feed.post(made.conversation.greet(handle), ticket=session.log.sync())
        return made

    @classmethod
    def again(cls, reopened: Reopened, limits: Limits, vocab_size: int) -> LiveSession:
        """A session from the journal; what was interrupted goes on."""
        session, replayed = reopened.session, reopened.replayed
        birth = msgspec.msgpack.decode(reopened.record.config, type=Birth)
        last = replayed.last
        made = cls(session, birth, limits, vocab_size, replayed.responses - (last is not None))
        made.heard.extend(replayed.heard)
        made._from_journal = True
        if replayed.config is not None:
            made.conversation.configure(msgspec.msgpack.decode(replayed.config, type=SessionResource))
        if last is not None:
            made._bring_back(last, replayed.after_reply)
        for orphan in replayed.orphans.values():
            made._lose(orphan)
        made.conversation.typed = replayed.typed
        session.expect(replayed.typed.message())
        return made

    @property
    def id(self) -> str:
        """The session's."""
        return self.session.id

    @property
    def responses(self) -> int:
        """Responses that run."""
        return len(self._responses)

    # --- sockets --------------------------------------------------------------------------------------------

    def resume(self, outbox: Outbox, after: str | None) -> None:
        """Tell this socket from now on, and first what came after the event ``after``.

        Raises ``EventsExpired``.
        """
        writing = any(response.writes for response in self._responses.values())
        self.feed.attach(outbox, self._resumed, after, running=writing)

    def _resumed(self, event_id: str, other_opening: bool) -> server.SessionResumed:
        """The answer to a client that comes back. What answers were on their way then may be lost."""
        self.reopened = self._from_journal and other_opening
        return server.SessionResumed(
            event_id=event_id,
            session=self.conversation.session,
            handle=self.session.handles.current,
            last_client_event=self.heard[-1] if self.heard else None,
            reopened=self.reopened,
            running=list(self._responses),
        )

    # --- client events --------------------------------------------------------------------------------------

    async def take(self, event: client.ClientEvent) -> None:
        """Serve one client event; one that was served before is only answered again where that is due."""
        if self.resumable and event.event_id is not None and event.event_id in self.heard:
            self._answer_again(event)
            return
        refusal = self._refusal(event)
        if refusal is not None:
            self.feed.post([self.conversation.refusal(refusal, event.event_id)])
            return
        for effect in self._serve(event):
            match effect:
                case CancelResponse(response_id=response_id):
                    await self._cancel(response_id)
                case CountArrival():
                    await self._arrived(effect)
                case MoveKV(event=moved):
                    self._beside(self._move(moved))

    def refuse(self, error: Exception, event_id: str | None = None) -> None:
        """Tell of a frame that was no event, or of an event out of place."""
        self.feed.post([self.conversation.refusal(error, event_id)])

    def _refusal(self, event: client.ClientEvent) -> Exception | None:
        if self._draining and isinstance(event, client.ResponseCreate):
            return Draining("The server is going away")
        return self.session.log.fault if isinstance(event, CHANGES) else None

    def _serve(self, event: client.ClientEvent) -> list[Effect]:
        """All that the event changes reaches the journal in one commit: no await in here.

        Gives back the effects that have to be awaited.
        """
        conversation, journal = self.conversation, self.session.log
        before, typed = conversation.session, replace(conversation.typed)
        if event.event_id is not None:
            self.heard.append(event.event_id)
            journal.append(Heard(event=event.event_id))
        self._ids.of(event.event_id if self.resumable else None)
        answers: list[server.ServerEvent] = []
        rest: list[Effect] = []
        for effect in conversation.receive(event):
            match effect:
                case Send():
                    answers.append(effect.event)
                case StartResponse():
                    self._start(effect)
                case Expect(message=message):
                    self.session.expect(message)
                case CancelResponse() | CountArrival() | MoveKV():
                    rest.append(effect)
        if conversation.typed != typed:
            journal.append(_typed(typed, conversation.typed))
        if conversation.session is not before:
            config = msgspec.msgpack.encode(conversation.session)
            journal.append(Configured(preamble=preamble_of(conversation.session), config=config))
        if answers:
            self.feed.post(answers, ticket=journal.sync() if isinstance(event, CHANGES) else None)
        return rest

    async def _arrived(self, count: CountArrival) -> None:
        try:
            arrival = await self.session.arrival()
        except SessionError:  # the template will say so again at the next turn, which the client can mend
            arrival = Arrival(0, 0)
        self.feed.post(self.conversation.committed(arrival, count), ticket=self.session.log.sync())

    async def _move(self, event: KeepingEvent) -> None:
        """Beside all that is said meanwhile; the answer is of the engine that there is now."""
        keeping = self.session.keeping
        try:
            match event:
                case client.SessionLease(priority=priority, ttl=ttl, returns_in=returns_in):
                    answer = self.conversation.kept(event, await keeping.lease(priority, ttl, returns_in))
                case client.SessionStage():
                    answer = self.conversation.kept(event, await keeping.stage())
                case client.SessionSettle(tier=tier):
                    answer = self.conversation.kept(event, await keeping.settle(disk=tier == "disk"))
        except Exception as error:  # whatever it is, it ends this event and no more
            if wire_error(error) is INTERNAL:
                log.exception("%s failed", event.type)
            answer = self.conversation.refusal(error, event.event_id)
        self.feed.post([answer], NEWS)

    def _beside(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _answer_again(self, event: client.ClientEvent) -> None:
        """The acknowledgement of an event that was served may have been lost with the server it was on."""
        if self.reopened and isinstance(event, KeepingEvent):
            self._beside(self._move(event))  # what it did ended with that server
        elif self.reopened:
            self._ids.of(event.event_id)
            self.feed.post(self.conversation.answered(event), ticket=self.session.log.sync())

    async def _cancel(self, response_id: str) -> None:
        """A reply that is told again is cut where its client was, not before."""
        if self.feed.behind:
            self._waiting_cancels.add(response_id)
        elif response_id in self._responses:
            await self._responses[response_id].cancel()

    # --- responses ------------------------------------------------------------------------------------------

    def _start(self, start: StartResponse) -> None:
        """What the response puts before the model is settled here, before any later event is served."""
        lane = start.response_id if start.request.out_of_band else WRITER
        if lane == WRITER:
            self.feed.begin_reply()
        try:
            note = self.conversation.note(start.response_id)
            response = self.session.respond(start.request, start.response_id, note)
        except SessionError as error:
            self.feed.post(self.conversation.failed(start.response_id, error), lane)
            return
        self._run(response, lane)

    def _run(self, response: Response, lane: str) -> None:
        self._responses[response.id] = response
        self._idle.clear()
        task = asyncio.create_task(self._follow(response, lane), name=response.id)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, response: Response, lane: str) -> None:
        """Tell what a response tells, as fast as the reader takes it."""
        try:
            async with response:
                async for event in response:
                    self._tell(self.conversation.reply(response.id, event), lane)
                    if response.id in self._waiting_cancels and not self.feed.behind:
                        self._waiting_cancels.discard(response.id)
                        await response.cancel()
                    if not isinstance(event, ReplyDone):
                        await self.feed.room()
        except Exception as error:  # whatever it is, it ends this response and no more
            if wire_error(error) is INTERNAL:
                log.exception("response %s failed", response.id)
            self._tell(self.conversation.failed(response.id, error), lane)
        finally:
            self._waiting_cancels.discard(response.id)
            del self._responses[response.id]
            if not self._responses:
                self._idle.set()

    def _tell(self, events: Iterable[server.ServerEvent], lane: str) -> None:
        for event in events:
            ticket = self.session.log.sync() if isinstance(event, HELD) else None
            self.feed.post([event], lane, ticket)

    def _bring_back(self, past: Past, after_reply: set[str]) -> None:
        """The last response as the journal has it: told again to its end, or going on."""
        self.conversation.revive(past.id, past.request, past.note, after_reply)
        self.feed.begin_reply()
        if past.ended is None:
            self._run(self.session.go_on(past), WRITER)
            return
        for event in self.session.retold(past):
            self.feed.post(self.conversation.reply(past.id, event), WRITER)
        if not past.ended.began:
            self.feed.post(self.conversation.failed(past.id, error_of(past.ended.error)), WRITER)

    def _lose(self, orphan: Begun) -> None:
        """A response out of band is not gone on with: its end is told."""
        self.conversation.revive(orphan.response, None, orphan.note)
        events = self.conversation.reply(orphan.response, ReplyStarted(0))
        events += self.conversation.failed(orphan.response, error_of(None))
        self.feed.post(events, orphan.response)

    # --- leaving --------------------------------------------------------------------------------------------

    def alarm(self, fault: StorageUnavailable) -> None:
        """The journal cannot write: who waits for an acknowledgement is told so."""
        if self.feed.holding:
            self.feed.post([self.conversation.refusal(fault)], NEWS)

    def recovered(self, lost_seconds: float) -> None:
        """Tell that the session has another engine."""
        self.feed.post([self.conversation.recovered(round(lost_seconds * 1000, 1))], NEWS)

    async def drain(self, seconds: float) -> None:
        """Refuse new responses; wait until none runs and all that was said has left.

        What still runs after ``seconds`` is kept for the next server where it can be resumed there; else it is
        cut: it ends as incomplete, naming the reason.
        """
        self._draining = True
        self.feed.post([self.conversation.going_away(seconds, self.session.handles.current or None)], NEWS)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.idle()
        if not (self.resumable and self.session.log.durable):
            for response in list(self._responses.values()):
                await response.cancel(EndReason.SERVER_LEAVING)
            await self.idle()
        await self.feed.settled()

    async def idle(self) -> None:
        """Wait until no response runs."""
        await self._idle.wait()

    async def aclose(self) -> None:
        """End what still runs here. The session itself is closed by its book."""
        self.feed.detach()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
