"""One session as its Realtime client sees it: client events in, server events out.

Client events come in through `RealtimeSession.take`. Server events go out through its event log, to whichever
socket the session is on. An answer to a change is sent when the journal has the change. `RealtimeFace` makes
the sessions; a *face* is the code of one protocol that clients speak.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

import msgspec

from ...kvstore.log_lines import about_session
from ...runtime.errors import RuntimeFault
from ...runtime.link.client import EngineLink
from ...sdk.frames import client, server
from ...sdk.frames.exported import read_export
from ...sdk.frames.session import SessionResource
from ...sessions.adapters import SessionAdapter
from ...sessions.conversation.input_text_buffer import InputTextBuffer
from ...sessions.conversation.items import derived_id, new_id
from ...sessions.errors import HandleUnknown, SessionError, StorageFull, StorageUnavailable
from ...sessions.exports import SessionStart, imported
from ...sessions.journal.records import Begun, Configured, EventReceived, Typed
from ...sessions.journal.replay import Past, error_of
from ...sessions.registry import Reopened
from ...sessions.session import Session
from ...sessions.text.eager_prefill import PrefilledInput
from ...sessions.turn.events import EndReason, ReplyDone, ReplyEvent, ReplyStarted, ReplyTextDelta
from ...sessions.turn.response import TurnResponse
from ..access.auth import TurnCaller
from ..errors import INTERNAL, Draining, wire_error
from ..live.session import LiveSession, log_refusal, report
from ..live.sessions import LiveSessions, SessionConnection
from ..net.flag import Flag
from ..net.outbox import SessionOutbox
from ..settings import ClientLimits
from .conversation import CancelResponse, Conversation, StartResponse
from .event_log import UNSENT, EventLog
from .exports import RealtimeConfig, entries_of, imported_resource
from .translate import preamble_of
from .verbs import Edit, SessionVerb, SessionVerbs

log = logging.getLogger(__name__)

CHANGES = (
    client.SessionUpdate
    | client.ItemCreate
    | client.ItemDelete
    | client.TextCommit
    | client.ResponseCreate
    | client.ResponseSteer
    | Edit
    | client.SessionFork
    | client.SessionName
    | client.SessionPrune
)
"""Client events that change what the journal keeps. They are refused while it cannot write; their answers are
sent when it has the change."""
ACKNOWLEDGING = (server.ItemDone, server.ResponseDone)
"""Events of a reply that are sent only when the journal has what they show."""


class RealtimeFace:
    """The Realtime protocol, as a `Face`. Sockets open and resume their sessions here; ``sessions`` calls it to
    make the live sessions of this protocol. ``link``: to the engine, which knows the model's sampling defaults.
    ``names``: of the served model; the first becomes the `model` of a new session, the others may be set later.
    ``max_tokens``: the most tokens of a reply if its session sets no limit; None: as many as the context
    holds. ``adapter``: that of new sessions, whose `model` is its name; None: none."""

    def __init__(
        self,
        sessions: LiveSessions,
        link: EngineLink,
        names: Sequence[str],
        limits: ClientLimits,
        max_tokens: int | None = None,
        adapter: SessionAdapter | None = None,
    ) -> None:
        self.adapter = adapter
        self.sessions = sessions
        self.limits = limits
        self.names = frozenset(names)
        """The names of the served model."""
        self._model, self._max_tokens = names[0], max_tokens
        self._usual: SessionResource | None = None  # the first configuration of most sessions, which share it
        self._link = link

    def open(self, connection: SessionConnection, owner: bytes, salt: bytes = b"") -> RealtimeSession:
        """Open a new session on this connection. Its first events are posted. ``owner``: the digest of the
        client's key; only a client with the same key can resume it. ``salt``: the salt of its tenant. Raises
        ``SessionLimit``, ``StorageUnavailable``."""
        return self.side_of(self.sessions.open(self, connection, owner, salt))

    async def resume(
        self, connection: SessionConnection, handle: str, owner: bytes, former_owner: bytes | None = None
    ) -> RealtimeSession:
        """Move the session that ``handle`` opens to this connection, and return it. Nothing is sent there until
        `RealtimeSession.resume` is called. ``owner``: the digest of the client's key, which must be the
        session's owner; ``former_owner``: the digest that earlier versions made of the key, which serves as
        well. Raises ``HandleUnknown``, ``RecordDamaged``, ``SessionLimit``, ``StorageUnavailable``."""
        return self.side_of(await self.sessions.resume(self, connection, handle, owner, former_owner))

    async def import_(self, data: bytes, owner: bytes, salt: bytes = b"") -> Session:
        """Begin a new session, without a connection, with the exported session in ``data``, and return it when
        the journal has it. ``owner``, ``salt``: as in `open`. Raises ``ExportInvalid``, ``ItemInvalid``,
        ``ItemExists``, ``AdapterUnavailable``, ``SessionLimit``, ``StorageUnavailable``; then no session was
        made."""
        registry = self.sessions.registry
        hello, tokenizer = self._link.hello, registry.language.digest().hex()
        first = msgspec.msgpack.decode(self.config(), type=RealtimeConfig)

        def read(_: object) -> tuple[SessionResource, SessionStart]:
            header, entries = read_export(data)
            resource = imported_resource(header, first.session, registry.bounds)
            known = entries_of(entries, tokens=header.tokenizer == tokenizer)
            most = registry.settings.max_items
            preamble, clock, own = preamble_of(resource), header.clock, header.adapter
            begun = imported(
                preamble,
                known,
                clock,
                vocabulary=hello.vocab_size,
                max_items=most,
                adapter=None if own is None else SessionAdapter(own.name, bytes.fromhex(own.digest)),
            )
            return resource, begun

        resource, begun = await registry.aside(salt, len(data), read)
        config = msgspec.msgpack.encode(msgspec.structs.replace(first, session=resource))
        live = self.sessions.begin(self, owner, salt, config, begun)
        live.resumable = True
        await live.journaled()
        return live.session

    @staticmethod
    def side_of(live: LiveSession) -> RealtimeSession:
        """The `RealtimeSession` that serves the client of a live session. Raises ``HandleUnknown`` if a client
        of another protocol opened that session."""
        if not isinstance(live.face, RealtimeSession):
            raise HandleUnknown("No session can be resumed with this handle", param="handle")
        return live.face

    # --- as `Face` ------------------------------------------------------------------------------------------

    def config(self) -> bytes:
        """The configuration with which a new session begins, encoded for the journal: the defaults of model and
        server, and the id of a new conversation."""
        hello, most = self._link.hello, self._max_tokens
        resource = SessionResource(
            id="",
            model=self._model,
            max_output_tokens="inf" if most is None else min(most, hello.max_context),
            **msgspec.structs.asdict(hello.defaults),
        )
        return msgspec.msgpack.encode(RealtimeConfig(session=resource, conversation=new_id("conv")))

    def begin(self, session: Session, config: bytes) -> LiveSession:
        """Make a live session of a new session, and post its first events, `session.created` and
        `conversation.created`. ``config``: what `config` or `child_config` returned."""
        first = msgspec.msgpack.decode(config, type=RealtimeConfig)
        first = msgspec.structs.replace(first, session=self.named(first.session, session))
        self._usual = self._usual or first.session
        if first.session == self._usual:
            first = msgspec.structs.replace(first, session=self._usual)
        made = RealtimeSession(self, session, first)
        made.greet()
        return made.live

    def named(self, resource: SessionResource, session: Session) -> SessionResource:
        """The configuration of a new session, with its own name of the model: that of its adapter, or one of
        the model itself."""
        model = resource.model if resource.model in self.names else self._model
        model = model if session.adapter is None else session.adapter.name
        return resource if resource.model == model else msgspec.structs.replace(resource, model=model)

    def reopen(self, reopened: Reopened, caller: TurnCaller) -> LiveSession:
        """Make a live session of one that was read from the journal, with its latest configuration. The events
        of its last reply are posted again; if that reply was interrupted, it continues, for ``caller``."""
        config = msgspec.msgpack.decode(reopened.record.config, type=RealtimeConfig)
        if reopened.session.adapter is not None:
            named = self.named(config.session, reopened.session)
            config = msgspec.structs.replace(config, session=named)
        replayed = reopened.replayed
        replies = replayed.responses - (replayed.last is not None)
        made = RealtimeSession(self, reopened.session, config, replies)
        made.live.caller = caller
        made.restore(reopened)
        return made.live


class RealtimeSession:
    """One session and its client: it serves the client's events and posts the server's. Make it with
    `RealtimeFace`.

    ``config``: the first configuration. ``replies``: the number of replies that the session has had, without
    the last one if that one's events are to be posted again; 0 for a new session.
    """

    def __init__(
        self, face: RealtimeFace, session: Session, config: RealtimeConfig, replies: int = 0
    ) -> None:
        limits, registry = face.limits, face.sessions.registry
        self.live = LiveSession(session, self, face.sessions.turns)
        self.session = session
        self._face = face
        self._config = config
        self._ids = EventDerivedIds(session.id)
        self.conversation = Conversation(
            msgspec.structs.replace(config.session, id=session.id),
            session.history,
            ids=self._ids,
            parallel_responses=limits.parallel_responses,
            bounds=registry.bounds,
            names=face.names if session.adapter is None else frozenset({session.adapter.name}),
            conversation_id=config.conversation,
            admit=self.live.admit,
            most_characters=registry.most_characters,
        )
        self.event_log = EventLog(limits, replies, lambda: session.handles.current)
        self._verbs = SessionVerbs(self.live, face.sessions, self.conversation, self.event_log, limits.moves)
        self._client_events: dict[str, None] = {}  # ids of the latest, in order
        self._beginning: str | None = (
            None  # the response that was asked for last, until it has told something
        )
        self._told = Flag()  # set when a response has told something, or is over
        self._from_journal = False
        self._reopened = False  # the client was on the server before this one

    def greet(self) -> None:
        """Post `session.created` and `conversation.created`. They are sent when the journal has the new
        session."""
        ticket = self.session.log.sync()
        self.event_log.post(self.conversation.greet(self.session.handles.current), ticket=ticket)

    def restore(self, reopened: Reopened) -> None:
        """Take over what the journal has of the session: the configuration, the ids of client events, and the
        text that the client was streaming in. Post the events of the last reply again, and continue it if it
        was interrupted. Interrupted responses out of band end as failed."""
        replayed = reopened.replayed
        for event_id in replayed.heard:
            self._hear(event_id)
        self._from_journal = True
        if replayed.config is not None:
            resource = msgspec.msgpack.decode(replayed.config, type=SessionResource)
            self.conversation.configure(msgspec.structs.replace(resource, id=self.session.id))
        if replayed.last is not None:
            self._bring_back(replayed.last)
        for orphan in replayed.orphans.values():
            self._end_out_of_band(orphan)
        self.conversation.buffer = replayed.typed
        self.session.expect(replayed.typed.item())

    # --- sockets --------------------------------------------------------------------------------------------

    def resume(self, sink: SessionOutbox, after: str | None) -> None:
        """Send the session's events to ``sink``, the outbox of a socket, from now on: first `session.resumed`,
        then those behind the event with the id ``after``, which the client read last. None: it has read
        nothing; then a running reply's events are sent from its first one.

        Raises ``EventsExpired`` if these events are not kept any more.
        """
        writing = any(response.writes for response in self.live.running)
        self.event_log.attach(sink, self._resumed, after, running=writing)

    def _resumed(self, event_id: str, other_opening: bool) -> server.SessionResumed:
        """Make `session.resumed`, the greeting of a client that comes back. ``other_opening``: the last event
        that the client read is from before the session was last opened from the journal, or it named none. If
        so, and the session did come from the journal, answers of that time may be lost: client events that come
        a second time are then answered again. Otherwise they are ignored."""
        self._reopened = self._from_journal and other_opening
        return server.SessionResumed(
            event_id=event_id,
            session=self.conversation.session,
            handle=self.session.handles.current,
            last_client_event=next(reversed(self._client_events), None),
            reopened=self._reopened,
            running=[response.id for response in self.live.running],
        )

    # --- client events --------------------------------------------------------------------------------------

    async def take(self, event: client.ClientEvent) -> None:
        """Serve one client event after all earlier ones; returns when that is done. It is served to its end
        even if the caller is cancelled because the socket closes. An error is posted as an `error` event, and
        not raised."""
        await self.live.in_order(lambda: self._take(event))

    async def _take(self, event: client.ClientEvent) -> None:
        try:
            await self._serve(event)
        except Exception as error:  # it ends this event and nothing else
            if wire_error(error) is INTERNAL:
                log.exception("%s failed", type(event).__name__, extra=about_session(self.live.id))
            self.refuse(error, event.event_id)

    async def _serve(self, event: client.ClientEvent) -> None:
        """Serve an event in one of four ways: if it was served before, answer it again; refuse it; pass it to
        `SessionVerbs`; or apply it to the conversation and carry out the effects. Raises what refuses it on the
        way."""
        await self._its_turn(event)
        if self.live.resumable and event.event_id is not None and event.event_id in self._client_events:
            await self._answer_again(event)
        elif (refusal := self._refusal(event)) is not None:
            self.refuse(refusal, event.event_id)
        elif isinstance(event, SessionVerb):
            self._note(event)
            await self._verbs.serve(event)
        else:
            if isinstance(event, client.ResponseSteer):
                await self._make_way(event)
            await self.live.wait_ended(self.conversation.ending(event))
            prefilled = await self._prefilled() if isinstance(event, client.TextCommit) else None
            for cancelled in self._change(event, prefilled):
                await self.live.cancel(cancelled)

    async def _its_turn(self, event: client.ClientEvent) -> None:
        """Wait until the events before which ``event`` must not be served are posted: those of a reply that is
        told again from the journal, up to the last that the client has read; and the first event of a response
        that was asked for. A cancel does not wait for that one."""
        cancels = isinstance(event, client.ResponseCancel)
        while self._telling_again or (self._beginning is not None and not cancels):
            self._told.clear()
            await self._told.wait()

    @property
    def _telling_again(self) -> bool:
        return self.event_log.behind and any(response.writes for response in self.live.running)

    async def _prefilled(self) -> PrefilledInput | None:
        """How much of the streamed text is prefilled. It is asked before the text is committed: the events that
        show the item then leave when it joins the conversation."""
        item = self.conversation.buffer.item()
        if item is not None:
            with suppress(SessionError, RuntimeFault):  # the next turn raises it again
                return await self.session.prefilled_input(item)
        return None

    def refuse(self, error: Exception, event_id: str | None = None) -> None:
        """Post and log that a client event, or a frame that is no event, was refused because of ``error``.
        ``event_id``: the client event's, if it had one."""
        log_refusal(self.live.id, error)
        self.event_log.post([self.conversation.refusal(error, event_id)])

    def _refusal(self, event: client.ClientEvent) -> Exception | None:
        """The error because of which an event must not be served now; None if it may be served. An event is
        refused if it begins a turn and the server is going away, or if it changes what the journal keeps and
        the journal cannot write. A prune is served even if the journal, or the tenant's share of it, is full,
        because it makes room."""
        if self.live.draining and isinstance(event, client.ResponseCreate | client.ResponseSteer):
            return Draining("The server is going away")
        if not isinstance(event, CHANGES):
            return None
        fault = self.session.log.fault
        makes_room = isinstance(event, client.SessionPrune) and isinstance(fault, StorageFull)
        return None if makes_room else fault

    def _change(self, event: client.ClientEvent, prefilled: PrefilledInput | None) -> list[str]:
        """Apply an event to the conversation, post the answers, begin its turn, and append what has changed to
        the journal. Returns the ids of the responses to cancel. There is no await in here, so that all changes
        reach the journal in one commit."""
        conversation, journal = self.conversation, self.session.log
        before, typed = conversation.session, replace(conversation.buffer)
        self._note(event)
        answers: list[server.ServerEvent] = []
        cancelled: list[str] = []
        effects = conversation.receive(event, prefilled)
        if conversation.buffer != typed:
            self.session.expect(conversation.buffer.item())
        for effect in effects:
            match effect:
                case StartResponse():
                    answers += self._start(effect)
                case CancelResponse(response_id=response_id):
                    cancelled.append(response_id)
                case _:
                    answers.append(effect)
        if conversation.buffer != typed:
            journal.append(typed_since(typed, conversation.buffer))
        if conversation.session is not before:
            config = msgspec.msgpack.encode(conversation.session)
            journal.append(Configured(preamble=preamble_of(conversation.session), config=config))
        if answers:
            self.event_log.post(answers, journal.sync() if isinstance(event, CHANGES) else None)
        return cancelled

    def _note(self, event: client.ClientEvent) -> None:
        """Remember the event's id, in memory and in the journal, so that an event that is sent twice is served
        once. If the client can come back, also derive the ids of the items and responses that the event makes
        from its id, so that the same ids can be made again."""
        if event.event_id is not None:
            self._hear(event.event_id)
            self.session.log.append(EventReceived(event=event.event_id))
        self._ids.derive_from(event.event_id if self.live.resumable else None)

    def _hear(self, event_id: str) -> None:
        self._client_events.pop(event_id, None)
        self._client_events[event_id] = None
        if len(self._client_events) > self._face.limits.client_events:
            del self._client_events[next(iter(self._client_events))]

    async def _answer_again(self, event: client.ClientEvent) -> None:
        """Answer an event that was served before the session was opened from the journal, because the first
        answer may be lost. Does nothing if the client has read an event since the session was opened: the event
        log still has that answer."""
        if not self._reopened:
            return
        if isinstance(event, SessionVerb):
            await self._verbs.answer_again(event)
        else:
            self._ids.derive_from(event.event_id)
            self.event_log.post(self.conversation.answered(event), self.session.log.sync())

    async def _make_way(self, event: client.ResponseSteer) -> None:
        """Before a `response.steer` is served: cancel the response that writes the conversation, if one runs,
        and wait until it has ended, so that ``event`` can start the next one. Posts `response.steer.accepted`
        first. Raises if the event is refused; then nothing has changed."""
        response_id = self.conversation.check_steer(event)
        self.live.check_admission()
        accepted = server.SteerAccepted(event_id=UNSENT, response_id=response_id)
        self.event_log.post([accepted])
        if response_id is not None:
            await self.live.cancel(response_id, EndReason.STEERED)
        await self.live.wait_ended(response_id)

    # --- responses ------------------------------------------------------------------------------------------

    def _start(self, start: StartResponse) -> list[server.ServerEvent]:
        """Begin the turn that ``start`` names, and run it. If the session refuses it, returns the events that
        say so to the client.

        The history that the turn answers is fixed here, before any later event is served.
        """
        try:
            note = self.conversation.note(start.response_id)
            brief = self.conversation.brief(start.response_id)
            response = self.session.respond(start.request, start.response_id, note, whole_calls=brief)
        except Exception as error:  # the journal knows no such reply, so it is not counted
            report(self.live.id, start.response_id, error)
            return self.conversation.failed(start.response_id, error)
        try:
            if response.writes:
                self.event_log.begin_reply()
            self.live.run(response)
        except BaseException as error:
            self.conversation.forget(response.id)
            response.refuse(error)
            raise
        self._beginning = response.id
        return []

    def _bring_back(self, past: Past) -> None:
        """Post the events of ``past``, the session's last reply as the journal has it, again. If the reply was
        interrupted, continue it in a task, like a new turn."""
        self.conversation.revive(past.id, past.request, past.note)
        self.event_log.begin_reply()
        if past.ended is None:
            try:
                response = self.session.go_on(past)
            except Exception as error:  # for example where its grammar is refused now
                report(self.live.id, past.id, error)
                self.event_log.post(self.conversation.failed(past.id, error), of_reply=True)
            else:
                self.live.run(response)
            return
        for event in self.session.retold(past):
            self.event_log.post(self.conversation.reply(past.id, event), of_reply=True)
        if not past.ended.began:
            failed = self.conversation.failed(past.id, error_of(past.ended.error))
            self.event_log.post(failed, of_reply=True)

    def _end_out_of_band(self, orphan: Begun) -> None:
        """End a response out of band that was interrupted when the server ended, because such a one is not
        continued: post its `response.created`, and a `response.done` that says `failed`. ``orphan``: its
        beginning, as the journal has it."""
        self.conversation.revive(orphan.response, None, orphan.note)
        events = self.conversation.reply(orphan.response, ReplyStarted(0))
        events += self.conversation.failed(orphan.response, error_of(None))
        self.event_log.post(events)

    # --- as `SessionFace` -----------------------------------------------------------------------------------

    async def tell(self, response: TurnResponse, event: ReplyEvent) -> None:
        """Post the server events for one event of a running turn. Returns when the client can take more."""
        self._post_reply(self.conversation.reply(response.id, event), response)
        if isinstance(event, ReplyStarted):
            self._tell_rate_limits()
        if not isinstance(event, ReplyDone):
            await self.event_log.room()

    def tell_now(self, response: TurnResponse, event: ReplyTextDelta) -> bool:
        """Send more text of an open message within the call, before it returns. Returns False, and sends
        nothing, if the client cannot take it now or other events wait before it."""
        live = self.conversation.running.get(response.id)
        opened = None if live is None else live.open_text(event.item_id)
        if opened is None or not self.event_log.post_text(opened[0], event.text, of_reply=response.writes):
            return False
        opened[1].append(event.text)
        return True

    def ended(self, response: TurnResponse, error: Exception | None) -> None:
        """Called when a turn is over. ``error``: what ended it; if it is set and the client has not received
        the end, posts the end."""
        failed = error is not None and response.id in self.conversation.running
        self._post_reply(self.conversation.failed(response.id, error) if failed and error else [], response)
        self._tell_rate_limits()

    def _tell_rate_limits(self) -> None:
        """Post `rate_limits.updated` with what the client's key has left, if it has limits."""
        limits = list(self.live.rate_limits().limits)
        if limits:
            self.event_log.post([server.RateLimitsUpdated(event_id=UNSENT, rate_limits=limits)])

    def _post_reply(self, events: Iterable[server.ServerEvent], response: TurnResponse) -> None:
        for event in events:
            ticket = self.session.log.sync() if isinstance(event, ACKNOWLEDGING) else None
            # In brief, the beginning of a reply may wait for what follows.
            patient = isinstance(event, server.ResponseCreated) and self.conversation.brief(event.response.id)
            self.event_log.post([event], ticket, of_reply=response.writes, patient=patient)
        if self._beginning == response.id:
            self._beginning = None
        self._told.set()

    def detach(self) -> None:
        """Called when the session is on no socket any more: its events are kept for the next one."""
        self.event_log.detach()

    def alarm(self, fault: StorageUnavailable) -> None:
        """Called when the journal cannot write, because of ``fault``: posts that as an `error` event if answers
        are held back until the journal can write."""
        if self.event_log.holding:
            self.event_log.post_ahead(self.conversation.refusal(fault))

    def recovered(self, lost_seconds: float) -> None:
        """Called when another engine has taken over, after ``lost_seconds`` without one: posts
        `session.recovered`."""
        lost_ms = round(lost_seconds * 1000, 1)
        told = server.SessionRecovered(event_id=UNSENT, lost_ms=lost_ms)
        self.event_log.post([told])

    def going_away(self, seconds: float) -> None:
        """Called before the server ends: posts `server.going_away`, as the server closes the connection within
        ``seconds``. The event shows the handle with which the client can come back."""
        handle = self.session.handles.current or None
        told = server.ServerGoingAway(event_id=UNSENT, seconds=seconds, handle=handle)
        self.event_log.post_ahead(told)

    async def flushed(self) -> None:
        """Wait until no posted event is held back any more, and the socket, if there is one, has written
        all."""
        await self.event_log.flushed()

    def child_config(self) -> bytes:
        """The configuration with which a session that is forked from this one begins, encoded for the journal:
        the first configuration of this session, with the id of a new conversation."""
        config = RealtimeConfig(session=self._config.session, conversation=new_id("conv"))
        return msgspec.msgpack.encode(config)

    def fork(self, session: Session, config: bytes) -> LiveSession:
        """Make a live session of ``session``, which was forked from this one. It has the configuration that
        this session has now, and its first events are posted. ``config``: what `child_config` returned."""
        live = self._face.begin(session, config)
        conversation = self._face.side_of(live).conversation
        conversation.configure_as(self.conversation)
        own = self._face.named(conversation.session, session)
        if own is not conversation.session:  # the child has another adapter
            conversation.configure(own)
            config = msgspec.msgpack.encode(own)
            session.log.append(Configured(preamble=preamble_of(own), config=config))
        return live


# --- names and text -----------------------------------------------------------------------------------------


class EventDerivedIds:
    """Makes ids of items and responses; call it with a prefix. While a client event that has an id is served,
    the ids derive from it: the same event makes the same ids again, also after a restart."""

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self._event_id: str | None = None
        self._made = 0

    def derive_from(self, event_id: str | None) -> None:
        """Derive the next ids from the id of this client event. None: make random ones."""
        self._event_id, self._made = event_id, 0

    def __call__(self, prefix: str) -> str:
        if self._event_id is None:
            return new_id(prefix)
        self._made += 1
        return derived_id(prefix, self._session_id, self._event_id, str(self._made))


def typed_since(before: InputTextBuffer, after: InputTextBuffer) -> Typed:
    """The journal's record of a change of the text that the client streams in, from ``before`` to ``after``:
    the new text from the first character that differs, and the role or tool call that the text belongs to."""
    appended = after.text.startswith(before.text)
    start = len(before.text) if appended else _shared(before.text, after.text)
    return Typed(start=start, text=after.text[start:], role=after.role, item=after.id, call=after.call_id)


def _shared(one: str, other: str) -> int:
    """The number of characters with which both texts begin. It is found by bisection: no Python loop over
    characters."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low
