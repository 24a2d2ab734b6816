"""The Realtime face: it puts a live session on the wire as a conversation of events.

Client events come in through `RealtimeSession.take`; server events go out through its event log, to whichever
socket the session is on. Each change is acknowledged when the journal has it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

import msgspec

from ...runtime.errors import RuntimeFault
from ...runtime.link.client import EngineLink
from ...sdk.frames import client, server
from ...sdk.frames.client import ResponseSteer, SessionFork, SessionName, SessionPrune
from ...sdk.frames.server import SteerAccepted
from ...sdk.frames.session import SessionResource
from ...sessions.errors import HandleUnknown, SessionError, ShareFull, StorageUnavailable
from ...sessions.items import derived_id, new_id
from ...sessions.journal.records import Begun, Configured, EventReceived, Typed
from ...sessions.journal.replay import Past, error_of
from ...sessions.registry import Reopened
from ...sessions.session import Session
from ...sessions.text.eager_prefill import PrefilledInput
from ...sessions.text.text_buffer import TextBuffer
from ...sessions.turn.events import EndReason, ReplyDone, ReplyEvent, ReplyStarted
from ...sessions.turn.response import TurnResponse
from ..errors import INTERNAL, Draining, wire_error
from ..live_session import LiveSession, report
from ..live_sessions import LiveSessions, SessionConnection
from ..net.outbox import SessionOutbox
from ..settings import ClientLimits
from .conversation import Conversation
from .effects import CancelResponse, Effect, PrefillText, Send, StartResponse, TellCommitted
from .event_log import NEWS, WRITER, EventLog
from .translate import preamble_of
from .verbs import EDITS, VERBS, SessionVerbs

log = logging.getLogger(__name__)

CHANGES = (
    client.SessionUpdate,
    client.ItemCreate,
    client.ItemDelete,
    client.TextCommit,
    client.ResponseCreate,
    *EDITS,
    SessionFork,
    ResponseSteer,
    SessionName,
    SessionPrune,
)
"""Client events that change what the journal keeps: refused while it cannot write, acknowledged when it has."""
ACKNOWLEDGING = (server.ItemDone, server.ResponseDone)
"""Events of a reply that wait for the journal."""


class RealtimeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the journal keeps of a new session: its first configuration, and its conversation's id."""

    session: SessionResource
    conversation: str


class RealtimeFace:
    """Opens sessions that speak Realtime. ``model`` is the name of the served model."""

    def __init__(self, sessions: LiveSessions, link: EngineLink, model: str, limits: ClientLimits) -> None:
        self.sessions = sessions
        self.limits = limits
        self._link = link
        self._model = model

    def open(self, connection: SessionConnection, owner: bytes, salt: bytes = b"") -> RealtimeSession:
        """A new session on this connection. Raises what `LiveSessions.open` does."""
        return self.side_of(self.sessions.open(self, connection, owner, salt))

    async def resume(self, connection: SessionConnection, handle: str, owner: bytes) -> RealtimeSession:
        """The session that ``handle`` opens. Raises what `LiveSessions.resume` does."""
        return self.side_of(await self.sessions.resume(self, connection, handle, owner))

    @staticmethod
    def side_of(live: LiveSession) -> RealtimeSession:
        """This face's side of a session. Raises ``HandleUnknown`` where another face opened it."""
        if not isinstance(live.face, RealtimeSession):
            raise HandleUnknown("No session can be resumed with this handle", param="handle")
        return live.face

    # --- as `Face` ------------------------------------------------------------------------------------------

    def config(self) -> bytes:
        """What the journal keeps of a new session: the model's defaults."""
        defaults = msgspec.structs.asdict(self._link.hello.defaults)
        resource = SessionResource(id="", model=self._model, **defaults)
        return msgspec.msgpack.encode(RealtimeConfig(session=resource, conversation=new_id("conv")))

    def begin(self, session: Session, config: bytes) -> LiveSession:
        """Bring a new session to life. It greets its client first."""
        made = RealtimeSession(self, session, msgspec.msgpack.decode(config, type=RealtimeConfig))
        made.greet()
        return made.live

    def reopen(self, reopened: Reopened) -> LiveSession:
        """Bring a session from the journal to life. A turn that was interrupted goes on."""
        config = msgspec.msgpack.decode(reopened.record.config, type=RealtimeConfig)
        replayed = reopened.replayed
        replies = replayed.responses - (replayed.last is not None)
        made = RealtimeSession(self, reopened.session, config, replies)
        made.restore(reopened)
        return made.live


class RealtimeSession:
    """One session on the wire. Make it with `RealtimeFace`. ``replies``: those before it was opened again."""

    def __init__(
        self, face: RealtimeFace, session: Session, config: RealtimeConfig, replies: int = 0
    ) -> None:
        limits = face.limits
        self.live = LiveSession(session, self)
        self.session = session
        self._face = face
        self._config = config
        self._ids = EventDerivedIds(session.id)
        self.conversation = Conversation(
            msgspec.structs.replace(config.session, id=session.id),
            session.history,
            ids=self._ids,
            parallel_responses=limits.parallel_responses,
            bounds=session.bounds,
            conversation_id=config.conversation,
            admit=session.check_turns,
            most_characters=session.most_characters,
        )
        self.event_log = EventLog(limits, replies, lambda: session.handles.current)
        self._verbs = SessionVerbs(self.live, face.sessions, self.conversation, self.event_log, limits.moves)
        self._client_events: deque[str] = deque(maxlen=limits.client_events)
        self._waiting_cancels: dict[str, EndReason] = {}
        self._from_journal = False
        self._reopened = False  # the client was on the server before this one

    def greet(self) -> None:
        """Post the first events of a new session."""
        ticket = self.session.log.sync()
        self.event_log.post(self.conversation.greet(self.session.handles.current), ticket=ticket)

    def restore(self, reopened: Reopened) -> None:
        """Take up what the journal has of the session: its configuration, its last response, its text."""
        replayed = reopened.replayed
        self._client_events.extend(replayed.heard)
        self._from_journal = True
        if replayed.config is not None:
            resource = msgspec.msgpack.decode(replayed.config, type=SessionResource)
            self.conversation.configure(msgspec.structs.replace(resource, id=self.session.id))
        if replayed.last is not None:
            self._bring_back(replayed.last, replayed.after_reply)
        for orphan in replayed.orphans.values():
            self._end_out_of_band(orphan)
        self.conversation.incoming.buffer = replayed.typed
        self.session.expect(replayed.typed.item())

    # --- sockets --------------------------------------------------------------------------------------------

    def resume(self, sink: SessionOutbox, after: str | None) -> None:
        """Send events to this socket from now on, and first those after the event ``after``.

        Raises ``EventsExpired``.
        """
        writing = any(response.writes for response in self.live.running)
        self.event_log.attach(sink, self._resumed, after, running=writing)

    def _resumed(self, event_id: str, other_opening: bool) -> server.SessionResumed:
        """The answer to a client that comes back. Answers that were on their way before may be lost."""
        self._reopened = self._from_journal and other_opening
        return server.SessionResumed(
            event_id=event_id,
            session=self.conversation.session,
            handle=self.session.handles.current,
            last_client_event=self._client_events[-1] if self._client_events else None,
            reopened=self._reopened,
            running=[response.id for response in self.live.running],
        )

    # --- client events --------------------------------------------------------------------------------------

    async def take(self, event: client.ClientEvent) -> None:
        """Serve one client event after those before it. It is served whole though the socket goes."""
        await self.live.in_order(lambda: self._take(event))

    async def _take(self, event: client.ClientEvent) -> None:
        try:
            await self._serve(event)
        except Exception as error:  # it ends this event and nothing else
            if wire_error(error) is INTERNAL:
                log.exception("%s failed", type(event).__name__)
            self.refuse(error, event.event_id)

    async def _serve(self, event: client.ClientEvent) -> None:
        """The one way in: answer an event again, refuse it, give it to the verbs, or to the conversation."""
        if self.live.resumable and event.event_id is not None and event.event_id in self._client_events:
            await self._answer_again(event)
        elif (refusal := self._refusal(event)) is not None:
            self.refuse(refusal, event.event_id)
        elif isinstance(event, VERBS):
            self._note(event)
            await self._verbs.serve(event)
        else:
            if isinstance(event, ResponseSteer):
                await self._make_way(event)
            await self.live.wait_ended(self.conversation.ending(event))
            for effect in self._change(event):
                match effect:
                    case CancelResponse(response_id=response_id):
                        await self._cancel(response_id)
                    case TellCommitted():
                        await self._tell_committed(effect)

    def refuse(self, error: Exception, event_id: str | None = None) -> None:
        """Tell the client that an event, or a frame that is no event, was refused."""
        self.event_log.post([self.conversation.refusal(error, event_id)])

    def _refusal(self, event: client.ClientEvent) -> Exception | None:
        """Why an event cannot be served now."""
        if self.live.draining and isinstance(event, client.ResponseCreate | ResponseSteer):
            return Draining("The server is going away")
        if not isinstance(event, CHANGES):
            return None
        fault = self.session.log.fault
        makes_room = isinstance(event, SessionPrune) and isinstance(fault, ShareFull)
        return None if makes_room else fault

    def _change(self, event: client.ClientEvent) -> list[Effect]:
        """Apply an event to the conversation. There is no await in here, so that all it changes reaches the
        journal in one commit. Returns the effects that need an await.
        """
        conversation, journal = self.conversation, self.session.log
        before, typed = conversation.session, replace(conversation.incoming.buffer)
        self._note(event)
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
                    case PrefillText(item=item):
                        self.session.expect(item)
                    case CancelResponse() | TellCommitted():
                        rest.append(effect)
        except BaseException:
            for effect in effects:  # nothing else ends a response that was not started
                if isinstance(effect, StartResponse) and not self.live.is_running(effect.response_id):
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

    def _note(self, event: client.ClientEvent) -> None:
        """Remember the event's id, so that the event is not served twice; name after it what it makes."""
        if event.event_id is not None:
            self._client_events.append(event.event_id)
            self.session.log.append(EventReceived(event=event.event_id))
        self._ids.derive_from(event.event_id if self.live.resumable else None)

    async def _answer_again(self, event: client.ClientEvent) -> None:
        """Acknowledge an event that the server before this one has served; that answer may be lost."""
        if not self._reopened:
            return
        if isinstance(event, VERBS):
            await self._verbs.answer_again(event)
        else:
            self._ids.derive_from(event.event_id)
            self.event_log.post(self.conversation.answered(event), ticket=self.session.log.sync())

    async def _tell_committed(self, effect: TellCommitted) -> None:
        try:
            arrival = await self.session.prefilled_input()
        except (SessionError, RuntimeFault):  # the next turn raises it again; the item stands
            arrival = PrefilledInput(0, 0)
        events = self.conversation.incoming.committed(arrival, effect)
        self.event_log.post(events, ticket=self.session.log.sync())

    async def _make_way(self, event: ResponseSteer) -> None:
        """End the response that runs, so that the steering one can start. Raises where it is refused."""
        response_id = self.conversation.check_steer(event)
        accepted = SteerAccepted(event_id=self.conversation.event_id(), response_id=response_id)
        self.event_log.post([accepted])
        if response_id is not None:
            await self._cancel(response_id, EndReason.STEERED)
        await self.live.wait_ended(response_id)

    async def _cancel(self, response_id: str, reason: EndReason = EndReason.CLIENT_CANCELLED) -> None:
        """Cut a response. One that is told again is cut when it reaches the event that its client read last."""
        if self.event_log.behind:
            self._waiting_cancels[response_id] = reason
        else:
            await self.live.cancel(response_id, reason)

    # --- responses ------------------------------------------------------------------------------------------

    def _start(self, start: StartResponse) -> None:
        """Begin a turn. What it puts before the model is decided here, before any later event is served."""
        try:
            note = self.conversation.note(start.response_id)
            brief = self.conversation.brief(start.response_id)
            response = self.session.respond(start.request, start.response_id, note, whole_calls=brief)
        except Exception as error:  # the journal knows no such reply, so it is not counted
            report(start.response_id, error)
            self.event_log.post(self.conversation.failed(start.response_id, error))
            return
        try:
            if response.writes:
                self.event_log.begin_reply()
            self.live.run(response)
        except BaseException as error:
            response.refuse(error)
            raise

    def _bring_back(self, past: Past, after_reply: set[str]) -> None:
        """Tell the last response again: to its end, or as far as it came, and let it go on."""
        self.conversation.revive(past.id, past.request, past.note, after_reply)
        self.event_log.begin_reply()
        if past.ended is None:
            try:
                response = self.session.go_on(past)
            except Exception as error:  # for example where its grammar is refused now
                report(past.id, error)
                self.event_log.post(self.conversation.failed(past.id, error), WRITER)
            else:
                self.live.run(response)
            return
        for event in self.session.retold(past):
            self.event_log.post(self.conversation.reply(past.id, event), WRITER)
        if not past.ended.began:
            self.event_log.post(self.conversation.failed(past.id, error_of(past.ended.error)), WRITER)

    def _end_out_of_band(self, orphan: Begun) -> None:
        """A response out of band does not go on after a restart: tell its end."""
        self.conversation.revive(orphan.response, None, orphan.note)
        events = self.conversation.reply(orphan.response, ReplyStarted(0))
        events += self.conversation.failed(orphan.response, error_of(None))
        self.event_log.post(events, orphan.response)

    # --- as `SessionFace` -----------------------------------------------------------------------------------

    async def tell(self, response: TurnResponse, event: ReplyEvent) -> None:
        """Post one event of a running turn; wait until the client can take more."""
        self._post_reply(self.conversation.reply(response.id, event), _lane(response))
        if response.id in self._waiting_cancels and not self.event_log.behind:
            await response.cancel(self._waiting_cancels.pop(response.id))
        if not isinstance(event, ReplyDone):
            await self.event_log.room()

    def ended(self, response: TurnResponse, error: Exception | None) -> None:
        """A turn is over: tell its failure, and answer the verbs that waited for its end."""
        self._waiting_cancels.pop(response.id, None)
        if error is not None and response.id in self.conversation.running:
            self._post_reply(self.conversation.failed(response.id, error), _lane(response))
        self._verbs.ended(response.id)

    def _post_reply(self, events: Iterable[server.ServerEvent], lane: str) -> None:
        for event in events:
            ticket = self.session.log.sync() if isinstance(event, ACKNOWLEDGING) else None
            # In brief, the beginning of a reply may wait for what follows.
            patient = isinstance(event, server.ResponseCreated) and self.conversation.brief(event.response.id)
            self.event_log.post([event], lane, ticket, patient=patient)

    def detach(self) -> None:
        """No socket: events are kept for the next one."""
        self.event_log.detach()

    def alarm(self, fault: StorageUnavailable) -> None:
        """The journal cannot write: say so to a client that waits for an acknowledgement."""
        if self.event_log.holding:
            self.event_log.post([self.conversation.refusal(fault)], NEWS)

    def recovered(self, lost_seconds: float) -> None:
        """Tell the client that the session has another engine."""
        lost_ms = round(lost_seconds * 1000, 1)
        told = server.SessionRecovered(event_id=self.conversation.event_id(), lost_ms=lost_ms)
        self.event_log.post([told], NEWS)

    def going_away(self, seconds: float) -> None:
        """Tell the client how long the server waits, and the handle to come back with."""
        handle = self.session.handles.current or None
        event_id = self.conversation.event_id()
        told = server.ServerGoingAway(event_id=event_id, seconds=seconds, handle=handle)
        self.event_log.post([told], NEWS)

    async def flushed(self) -> None:
        """Wait until the client has all that was told."""
        await self.event_log.flushed()

    def child_config(self) -> bytes:
        """What the journal keeps of a fork: the first configuration of this session."""
        config = RealtimeConfig(session=self._config.session, conversation=new_id("conv"))
        return msgspec.msgpack.encode(config)

    def fork(self, session: Session, config: bytes) -> LiveSession:
        """Bring a fork to life, with this session's present configuration."""
        live = self._face.begin(session, config)
        self._face.side_of(live).conversation.configure_as(self.conversation)
        return live


def _lane(response: TurnResponse) -> str:
    return WRITER if response.writes else response.id


# --- names and text -----------------------------------------------------------------------------------------


class EventDerivedIds:
    """Makes ids from the id of the client event that is served: the same event makes the same ids again."""

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self._event_id: str | None = None
        self._made = 0

    def derive_from(self, event_id: str | None) -> None:
        """Make ids from this event's id from now on. None: make random ones."""
        self._event_id, self._made = event_id, 0

    def __call__(self, prefix: str) -> str:
        if self._event_id is None:
            return new_id(prefix)
        self._made += 1
        return derived_id(prefix, self._session_id, self._event_id, str(self._made))


def typed_since(before: TextBuffer, after: TextBuffer) -> Typed:
    """The journal's record of what changed in the text that is on its way."""
    appended = after.text.startswith(before.text)
    start = len(before.text) if appended else _shared(before.text, after.text)
    return Typed(start=start, text=after.text[start:], role=after.role, item=after.id, call=after.call_id)


def _shared(one: str, other: str) -> int:
    """The length of the common beginning, found by bisection: no loop runs over characters."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low
