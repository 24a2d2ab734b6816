"""A session while it is in memory: its conversation, its running responses, what it tells. Outlives sockets.

Whoever holds a socket gives it client events and reads its feed; it runs the responses itself, so they go on
while nobody is there. Knows nothing of channels or handles' owners.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import TypeAlias

import msgspec

from ...runtime.errors import RuntimeFault
from ...sdk.errors import FrameError
from ...sdk.frames import client, server
from ...sdk.frames.session import SessionResource
from ...sdk.frames.verbs import Fork, ResponseSteer, SessionFork, SessionForked, SessionName, SessionPrune
from ...sessions.errors import SessionError, SessionUnknown, ShareFull, StorageUnavailable
from ...sessions.items import new_id
from ...sessions.journal.records import Begun, Configured, EventReceived
from ...sessions.journal.replay import Past, error_of
from ...sessions.registry import Reopened
from ...sessions.session import Session
from ...sessions.text.eager_prefill import PrefilledInput
from ...sessions.turn.events import EndReason, ReplyDone, ReplyStarted
from ...sessions.turn.response import TurnResponse
from ..errors import INTERNAL, Draining, GatewayError, wire_error
from ..settings import Limits
from .conversation import Conversation
from .edits import VERBS, Verbs
from .effects import CancelResponse, CountArrival, Effect, Expect, KeepingEvent, MoveKV, Send, StartResponse
from .event_ids import EventNames, typed_since
from .event_log import NEWS, WRITER, EventLog
from .outbox import Sink
from .placement import Moves
from .translate import preamble_of
from .tree_events import TREE_VERBS, TreeEvents

log = logging.getLogger(__name__)

CHANGES = (
    client.SessionUpdate,
    client.ItemCreate,
    client.ItemDelete,
    client.TextCommit,
    client.ResponseCreate,
    *VERBS,
    SessionFork,
    ResponseSteer,
    SessionName,
    SessionPrune,
)
"""Client events whose effects must be kept."""
HELD = (server.ItemDone, server.ResponseDone)
"""Of a reply's events, those that acknowledge."""


Forker: TypeAlias = Callable[["LiveSession", int, str | None], Awaitable[list["LiveSession"]]]
"""Makes sessions that go on from one: so many, from an item on."""


async def _no_forks(live: LiveSession, children: int, at: str | None) -> list[LiveSession]:
    raise SessionUnknown("Nobody keeps this session")


class Birth(msgspec.Struct, frozen=True, kw_only=True):
    """What the gateway keeps of a session from birth."""

    session: SessionResource
    conversation: str


class LiveSession:
    """One session. Make it with ``begin`` or ``again``.

    ``resumable``: its client can come back, so replies go on without it.
    """

    def __init__(
        self, session: Session, birth: Birth, limits: Limits, vocab_size: int, replies: int = 0
    ) -> None:
        self._ids = EventNames(session.id)
        self._birth = birth
        self.session = session
        self.conversation = Conversation(
            msgspec.structs.replace(birth.session, id=session.id),
            session.history,
            ids=self._ids,
            parallel_responses=limits.parallel_responses,
            vocab_size=vocab_size,
            conversation_id=birth.conversation,
            admit=session.check_turns,
            most_characters=session.most_characters,
        )
        self.event_log = EventLog(limits, replies, lambda: session.handles.current)
        self._verbs = Verbs(session, self.conversation, self._acknowledge)
        self.relatives = TreeEvents(session.id, self.conversation, self._acknowledge)
        self._moves = Moves(session, self.conversation, self.event_log, limits.moves)
        self.forker: Forker = _no_forks
        self.resumable = False
        self.reopened = False
        self._from_journal = False
        self.heard: deque[str] = deque(maxlen=limits.client_events)
        self._responses: dict[str, TurnResponse] = {}
        self._waiting_cancels: dict[str, EndReason] = {}
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._beside_tasks: set[asyncio.Task[None]] = set()
        self._turnstile = asyncio.Lock()  # client events, in the order in which they came
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    @classmethod
    def begin(cls, session: Session, birth: Birth, limits: Limits, vocab_size: int) -> LiveSession:
        """A new session's; its greeting is the first it tells."""
        made = cls(session, birth, limits, vocab_size)
        handle = session.handles.current
        made.event_log.post(made.conversation.greet(handle), ticket=session.log.sync())
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
            config = msgspec.msgpack.decode(replayed.config, type=SessionResource)
            made.conversation.configure(msgspec.structs.replace(config, id=session.id))
        if last is not None:
            made._bring_back(last, replayed.after_reply)
        for orphan in replayed.orphans.values():
            made._lose(orphan)
        made.conversation.incoming.buffer = replayed.typed
        session.expect(replayed.typed.item())
        return made

    @property
    def id(self) -> str:
        """The session's."""
        return self.session.id

    @property
    def responses(self) -> int:
        """Responses that run."""
        return len(self._responses)

    @property
    def at_rest(self) -> bool:
        """Whether no response runs, and no event is being served."""
        return not self._responses and not self._beside_tasks

    # --- sockets --------------------------------------------------------------------------------------------

    def resume(self, outbox: Sink, after: str | None) -> None:
        """Tell this socket from now on, and first what came after the event ``after``.

        Raises ``EventsExpired``.
        """
        writing = any(response.writes for response in self._responses.values())
        self.event_log.attach(outbox, self._resumed, after, running=writing)

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
        """Serve one client event, after those before it; a socket that goes meanwhile cuts nothing short."""
        await asyncio.shield(self._beside(self._take(event)))

    async def _take(self, event: client.ClientEvent) -> None:
        async with self._turnstile:
            try:
                await self._take_next(event)
            except Exception as error:  # whatever it is, it ends this event and no more
                if wire_error(error) is INTERNAL:
                    log.exception("%s failed", type(event).__name__)
                self.refuse(error, event.event_id)

    async def _take_next(self, event: client.ClientEvent) -> None:
        """One that was served before is only answered again where that is due."""
        if self.resumable and event.event_id is not None and event.event_id in self.heard:
            await self._answer_again(event)
            return
        refusal = self._refusal(event)
        if refusal is not None:
            self.event_log.post([self.conversation.refusal(refusal, event.event_id)])
            return
        if isinstance(event, VERBS):
            self._hear(event)
            await self._verbs.serve(event)
            return
        if isinstance(event, (SessionFork, *TREE_VERBS)):
            self._hear(event)
            await (self._fork(event) if isinstance(event, SessionFork) else self.relatives.serve(event))
            return
        if isinstance(event, ResponseSteer) and not await self._steered(event):
            return
        await self._ended(self.conversation.ending(event))
        for effect in self._serve(event):
            match effect:
                case CancelResponse(response_id=response_id):
                    await self._cancel(response_id)
                case CountArrival():
                    await self._arrived(effect)
                case MoveKV(event=moved):
                    self._moves.begin(moved)

    def refuse(self, error: Exception, event_id: str | None = None) -> None:
        """Tell of a frame that was no event, or of an event out of place."""
        self.event_log.post([self.conversation.refusal(error, event_id)])

    def _refusal(self, event: client.ClientEvent) -> Exception | None:
        if self._draining and isinstance(event, client.ResponseCreate | ResponseSteer):
            return Draining("The server is going away")
        if not isinstance(event, CHANGES):
            return None
        fault = self.session.log.fault
        makes_room = isinstance(event, SessionPrune) and isinstance(fault, ShareFull)
        return None if makes_room else fault

    def _serve(self, event: client.ClientEvent) -> list[Effect]:
        """All that the event changes reaches the journal in one commit: no await in here.

        Gives back the effects that have to be awaited.
        """
        conversation, journal = self.conversation, self.session.log
        before, typed = conversation.session, replace(conversation.incoming.buffer)
        self._hear(event)
        answers: list[server.ServerEvent] = []
        rest: list[Effect] = []
        effects = conversation.receive(event)
        try:
            for effect in effects:
                match effect:
                    case Send():
                        answers.append(effect.event)
                    case StartResponse():
                        self._start(effect)
                    case Expect(item=item):
                        self.session.expect(item)
                    case CancelResponse() | CountArrival() | MoveKV():
                        rest.append(effect)
        except BaseException:
            for effect in effects:  # a response that was not started has nobody who ends it
                if isinstance(effect, StartResponse) and effect.response_id not in self._responses:
                    conversation.forget(effect.response_id)
            raise
        if conversation.incoming.buffer != typed:
            journal.append(typed_since(typed, conversation.incoming.buffer))
        if conversation.session is not before:
            config = msgspec.msgpack.encode(conversation.session)
            journal.append(Configured(preamble=preamble_of(conversation.session), config=config))
        if answers:
            self.event_log.post(answers, ticket=journal.sync() if isinstance(event, CHANGES) else None)
        return rest

    def _hear(self, event: client.ClientEvent) -> None:
        if event.event_id is not None:
            self.heard.append(event.event_id)
            self.session.log.append(EventReceived(event=event.event_id))
        self._ids.of(event.event_id if self.resumable else None)

    def _acknowledge(self, events: Iterable[server.ServerEvent]) -> None:
        """Let events leave when all so far is in the journal."""
        self.event_log.post(events, ticket=self.session.log.sync())

    def birth_of_child(self) -> Birth:
        """What is kept of a session that is forked from this one, from birth."""
        return Birth(session=self._birth.session, conversation=new_id("conv"))

    async def _fork(self, event: SessionFork) -> None:
        try:
            children = await self.forker(self, event.children, event.at)
        except SessionError as error:
            self.event_log.post([self.conversation.refusal(error, event.event_id)])
            return
        forks = [Fork(id=child.id, handle=child.session.handles.current) for child in children]
        self._acknowledge([SessionForked(event_id=self.conversation.event_id(), sessions=forks)])

    async def _arrived(self, count: CountArrival) -> None:
        try:
            arrival = await self.session.prefilled_input()
        except (SessionError, RuntimeFault):  # the next turn says so again; the item is there all the same
            arrival = PrefilledInput(0, 0)
        self.event_log.post(
            self.conversation.incoming.committed(arrival, count), ticket=self.session.log.sync()
        )

    def _beside(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Work of the session's own: it ends with the session, not with a socket."""
        task = asyncio.create_task(work)
        self._beside_tasks.add(task)
        task.add_done_callback(self._beside_tasks.discard)
        return task

    async def _answer_again(self, event: client.ClientEvent) -> None:
        """The acknowledgement of an event that was served may have been lost with the server it was on."""
        if self.reopened and isinstance(event, KeepingEvent):
            self._moves.begin(event)  # what it did ended with that server
        elif self.reopened and isinstance(event, SessionFork):
            await self._fork(event)  # nobody has the handles of those it made
        elif self.reopened and isinstance(event, TREE_VERBS):
            await self.relatives.answer_again(event)
        elif self.reopened and isinstance(event, VERBS):
            self._verbs.answer_again(event)
        elif self.reopened:
            self._ids.of(event.event_id)
            self.event_log.post(self.conversation.answered(event), ticket=self.session.log.sync())

    async def _cancel(self, response_id: str, reason: EndReason = EndReason.CLIENT_CANCELLED) -> None:
        """A reply that is told again is cut where its client was, not before."""
        if self.event_log.behind:
            self._waiting_cancels[response_id] = reason
        elif response_id in self._responses:
            await self._responses[response_id].cancel(reason)

    async def _steered(self, event: ResponseSteer) -> bool:
        """End what runs in order, so that the event can be served; False where it never can be."""
        try:
            response_id = self.conversation.check_steer(event)
        except (SessionError, FrameError, GatewayError) as error:
            self.event_log.post([self.conversation.refusal(error, event.event_id)])
            return False
        self.event_log.post([self.conversation.accept_steer(response_id)])
        if response_id is not None:
            await self._cancel(response_id, EndReason.STEERED)
        await self._ended(response_id)
        return True

    async def _ended(self, response_id: str | None) -> None:
        if (follower := self._followers.get(response_id or "")) is not None:
            await asyncio.wait([follower])

    # --- responses ------------------------------------------------------------------------------------------

    def _start(self, start: StartResponse) -> None:
        """What the response puts before the model is settled here, before any later event is served."""
        try:
            note = self.conversation.note(start.response_id)
            brief = self.conversation.brief(start.response_id)
            response = self.session.respond(start.request, start.response_id, note, whole_calls=brief)
        except Exception as error:  # the journal knows no such reply, so none may be counted
            self._report(start.response_id, error)
            self.event_log.post(self.conversation.failed(start.response_id, error))
            return
        lane = start.response_id if start.request.out_of_band else WRITER
        try:
            if lane == WRITER:
                self.event_log.begin_reply()
            self._run(response, lane)
        except BaseException as error:
            response.refuse(error)
            raise

    def _run(self, response: TurnResponse, lane: str) -> None:
        """Let a task read the response, and end it whatever becomes of the task."""
        task = asyncio.create_task(self._follow(response, lane), name=response.id)
        self._responses[response.id] = response
        self._idle.clear()
        self._followers[response.id] = task
        task.add_done_callback(lambda _: self._unfollowed(response))

    def _unfollowed(self, response: TurnResponse) -> None:
        """Its task is over; one that was cancelled before it began has not read anything."""
        self._followers.pop(response.id, None)
        self._waiting_cancels.pop(response.id, None)
        self._responses.pop(response.id, None)
        if not self._responses:
            self._idle.set()

    async def _follow(self, response: TurnResponse, lane: str) -> None:
        """Tell what a response tells, as fast as the reader takes it."""
        try:
            async with response:
                async for event in response:
                    self._tell(self.conversation.reply(response.id, event), lane)
                    if response.id in self._waiting_cancels and not self.event_log.behind:
                        await response.cancel(self._waiting_cancels.pop(response.id))
                    if not isinstance(event, ReplyDone):
                        await self.event_log.room()
        except Exception as error:  # whatever it is, it ends this response and no more
            self._report(response.id, error)
            if response.id in self.conversation.running:
                self._tell(self.conversation.failed(response.id, error), lane)
            self._verbs.ended(response.id)
        else:
            self._verbs.ended(response.id)
        finally:
            self._unfollowed(response)

    def _report(self, response_id: str, error: Exception) -> None:
        """Log what is a defect of this server, and no answer to a client."""
        if wire_error(error) is INTERNAL:
            log.error("response %s failed", response_id, exc_info=error)

    def _tell(self, events: Iterable[server.ServerEvent], lane: str) -> None:
        for event in events:
            ticket = self.session.log.sync() if isinstance(event, HELD) else None
            # Told in brief, a reply's beginning need not be written by itself.
            patient = isinstance(event, server.ResponseCreated) and self.conversation.brief(event.response.id)
            self.event_log.post([event], lane, ticket, patient=patient)

    def _bring_back(self, past: Past, after_reply: set[str]) -> None:
        """The last response as the journal has it: told again to its end, or going on."""
        self.conversation.revive(past.id, past.request, past.note, after_reply)
        self.event_log.begin_reply()
        if past.ended is None:
            try:
                response = self.session.go_on(past)
            except Exception as error:  # as where its grammar cannot be written any more
                self._report(past.id, error)
                self.event_log.post(self.conversation.failed(past.id, error), WRITER)
            else:
                self._run(response, WRITER)
            return
        for event in self.session.retold(past):
            self.event_log.post(self.conversation.reply(past.id, event), WRITER)
        if not past.ended.began:
            self.event_log.post(self.conversation.failed(past.id, error_of(past.ended.error)), WRITER)

    def _lose(self, orphan: Begun) -> None:
        """A response out of band is not gone on with: its end is told."""
        self.conversation.revive(orphan.response, None, orphan.note)
        events = self.conversation.reply(orphan.response, ReplyStarted(0))
        events += self.conversation.failed(orphan.response, error_of(None))
        self.event_log.post(events, orphan.response)

    # --- leaving --------------------------------------------------------------------------------------------

    def alarm(self, fault: StorageUnavailable) -> None:
        """The journal cannot write: who waits for an acknowledgement is told so."""
        if self.event_log.holding:
            self.event_log.post([self.conversation.refusal(fault)], NEWS)

    def recovered(self, lost_seconds: float) -> None:
        """Tell that the session has another engine."""
        self.event_log.post([self.conversation.recovered(round(lost_seconds * 1000, 1))], NEWS)

    async def drain(self, seconds: float) -> None:
        """Refuse new responses; wait until none runs and all that was said has left.

        What still runs after ``seconds`` is kept for the next server where it can be resumed there; else it is
        cut: it ends as incomplete, naming the reason.
        """
        self._draining = True
        self.event_log.post(
            [self.conversation.going_away(seconds, self.session.handles.current or None)], NEWS
        )
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.idle()
        if not (self.resumable and self.session.log.durable):
            for response in list(self._responses.values()):
                await response.cancel(EndReason.SERVER_LEAVING)
            await self.idle()
        await self.event_log.settled()

    async def idle(self) -> None:
        """Wait until no response runs."""
        await self._idle.wait()

    async def aclose(self) -> None:
        """End what still runs here. The session itself is closed by its book."""
        self.event_log.detach()
        tasks = [*self._followers.values(), *self._beside_tasks, *self._moves.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
