"""The Realtime protocol as a pure state machine: an event in, effects out. No sockets, no loop, no clock.

`Conversation` decides which client event may come now, and edits the history. It runs nothing: the caller runs
the response that a `StartResponse` effect names, and passes the events of its turn to `Conversation.reply`, or
the error that ended it to `failed`. A response *in brief*, for which a client may ask, leaves out the events
that only repeat what others say.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from ...sdk.errors import FieldInvalid, FrameError
from ...sdk.frames import client, server
from ...sdk.frames.client import ResponseSteer
from ...sdk.frames.items import AnyItem, InputItem, ItemReference
from ...sdk.frames.response import ResponseParams
from ...sdk.frames.session import SessionPatch, SessionResource
from ...sdk.frames.unserved import without_effect
from ...sessions.conversation.history import ROOT, History
from ...sessions.conversation.items import FunctionCallOutput, Item, checked_item, new_id
from ...sessions.errors import ConversationBusy, ItemExists, ItemUnknown, SessionError
from ...sessions.text.eager_prefill import PrefilledInput
from ...sessions.turn.events import ReplyEvent
from ...sessions.turn.request import UNBOUNDED, RequestBounds, TurnRequest
from ..errors import GatewayError, NothingToCancel, TooManyResponses, error_details
from .effects import CancelResponse, Effect, Send, StartResponse
from .response import LiveResponse
from .text_input import IncomingText
from .translate import RequestCache, frame_of, item_of, patched, preamble_of, request_of, seed_of, under

PARALLEL_RESPONSES = 8
_NONE: frozenset[str] = frozenset()
_BUSY = "The conversation already has an active response: wait for it or cancel it"


class ResponseNote(msgspec.Struct, frozen=True, array_like=True):
    """What the journal keeps of a response for this protocol, so that the response's server events can be made
    again after a restart.

    ``asked_by``: the `event_id` of the client event that asked for it. ``metadata``: the client's. ``before``:
    the id of the item before the response's first item; None: no item was before it. ``brief``: it leaves out
    events that repeat others. ``unserved``: names of fields of the request that this server ignores.
    """

    asked_by: str | None
    metadata: dict[str, str] | None
    before: str | None
    brief: bool = False
    unserved: tuple[str, ...] = ()


class EventNumbers:
    """Makes provisional ids for a conversation's events, numbered in their order."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def __call__(self) -> str:
        return f"event_{next(self._numbers)}"


class Conversation:
    """The protocol's state in one session: the configuration, the running responses, and the text that the
    client streams in. It edits ``history``, and sends nothing itself.

    ``session``: the first configuration. ``ids`` makes an id with a given prefix. ``parallel_responses``: the
    most responses that run at once. ``bounds``: what the model allows in a request. ``names``: the names of the
    served model; `session.update` may set any of them. ``conversation_id``: None makes a new one. ``admit`` is
    called before each response, and raises if it may not start. ``most_characters``: longer streamed text is
    refused; None: no limit.
    """

    def __init__(
        self,
        session: SessionResource,
        history: History,
        *,
        ids: Callable[[str], str] = new_id,
        parallel_responses: int = PARALLEL_RESPONSES,
        bounds: RequestBounds = UNBOUNDED,
        names: frozenset[str] = frozenset(),
        conversation_id: str | None = None,
        admit: Callable[[], None] = lambda: None,
        most_characters: int | None = None,
    ) -> None:
        self._initial = session
        self._session = session
        self._history = history
        self._ids = ids
        self._parallel_responses = parallel_responses
        self._admit = admit
        self._bounds = bounds
        self._names = names
        self.event_id = EventNumbers()
        """Makes a provisional id for an event. The event log puts the final id in its place when it sends the
        event."""
        self.running: dict[str, LiveResponse] = {}
        """The responses that have been created and have not ended, by id, out-of-band ones included."""
        self._after_reply = _NONE  # ids of items that were added while a reply runs: they follow it
        self._requests = RequestCache(bounds)
        self.incoming = IncomingText(self.event_id, ids, most_characters)
        """Text that the client streams in, until it is committed as an item."""
        self.conversation_id = conversation_id or ids("conv")
        history.preamble = preamble_of(session)

    def configure(self, session: SessionResource) -> None:
        """Use ``session``, the latest configuration that the journal has, when the session is opened from it. A
        null field of a later `session.update` still goes back to the first configuration."""
        self._session = session
        self._history.preamble = preamble_of(session)

    def configure_as(self, parent: Conversation) -> None:
        """Take over the present configuration of ``parent``, the conversation that this one was forked from.
        The session's own id stays."""
        self._session = msgspec.structs.replace(parent.session, id=self._session.id)
        self._history.share_preamble(parent._history)

    @property
    def session(self) -> SessionResource:
        """The configuration as it is now, after all `session.update` events."""
        return self._session

    # --- events in ---

    def greet(self, handle: str | UnsetType = UNSET) -> list[server.ServerEvent]:
        """Make the first events of a new session: `session.created` and `conversation.created`. ``handle``: the
        handle with which the client can resume the session, which `session.created` shows; UNSET leaves it
        out."""
        conversation = server.ConversationResource(id=self.conversation_id)
        return [
            server.SessionCreated(event_id=self.event_id(), session=self._session, handle=handle),
            server.ConversationCreated(event_id=self.event_id(), conversation=conversation),
        ]

    def receive(self, event: client.ClientEvent) -> list[Effect]:
        """Apply one client event, and return what the caller has to do, in order. An event that may not come
        now changes nothing; its one effect sends an `error` event. Empty for events that are served elsewhere,
        such as `session.fork`."""
        try:
            return self._receive(event)
        except (SessionError, FrameError, GatewayError) as error:
            return [Send(self.refusal(error, event.event_id), error)]

    def refusal(self, error: Exception, event_id: str | None = None) -> server.ErrorEvent:
        """Make the `error` event for ``error``, because of which a client event, or a frame that is no event,
        was refused. ``event_id``: the client event's, if it had one."""
        return server.ErrorEvent(event_id=self.event_id(), error=error_details(error, event_id))

    def brief(self, response_id: str) -> bool:
        """Whether the running response with this id leaves out the events that repeat others. False if no such
        response runs."""
        live = self.running.get(response_id)
        return live is not None and live.brief

    def reply(self, response_id: str, event: ReplyEvent) -> list[server.ServerEvent]:
        """Make the server events for ``event``, the next event of a running response's turn. After `ReplyDone`
        the response does not run any more."""
        live = self.running[response_id]
        events = live.feed(event, self._before_reply)
        if live.done:
            del self.running[response_id]
        return events

    def failed(self, response_id: str, error: Exception) -> list[server.ServerEvent]:
        """End the response with this id after its turn raised ``error``, and make its last events. If it has
        had no event yet, that is one `error`; otherwise its open item is closed, its items are deleted, and
        `response.done` says `failed`."""
        live = self.running[response_id]
        del self.running[response_id]
        return live.fail(error) if live.started else [self.refusal(error, live.asked_by)]

    def forget(self, response_id: str) -> None:
        """Remove the response with this id, which was created but never run, if it is there. No event is made
        for it."""
        self.running.pop(response_id, None)

    def _receive(self, event: client.ClientEvent) -> list[Effect]:
        match event:
            case client.SessionUpdate(session=patch):
                updated = patched(self._session, patch, self._initial, self._names)
                with under("session"):  # must be possible
                    request_of(ResponseParams(), updated, self._resolved, self._bounds)
                self._history.preamble = preamble_of(updated)
                self._session = updated
                return [Send(self._updated(patch))]
            case client.ItemCreate():
                item = item_of(event.item, self._ids)
                return [*self.insert(item, event.previous_item_id), *self.incoming.answered([item])]
            case client.ItemRetrieve(item_id=item_id):
                return [Send(self._retrieved(item_id))]
            case client.ItemDelete(item_id=item_id):
                self._delete_item(item_id)
                return [Send(server.ItemDeleted(event_id=self.event_id(), item_id=item_id))]
            case client.TextAppend() | client.TextReplace() | client.TextClear() | client.TextCommit():
                return self.incoming.receive(event, self)
            case client.ResponseCreate():
                return self._create_after(event)
            case ResponseSteer():
                return self._steer(event)
            case client.ResponseCancel(response_id=response_id):
                return self._cancel(response_id)
            case _:
                return []  # served elsewhere: the session's verbs, and which session a socket is on

    def _updated(self, patch: SessionPatch) -> server.SessionUpdated:
        """Make `session.updated`: the whole configuration, and the names of the fields of ``patch`` that this
        server ignores."""
        unserved = without_effect("session", patch) or UNSET
        session = msgspec.structs.replace(self._session, unserved=unserved)
        return server.SessionUpdated(event_id=self.event_id(), session=session)

    # --- items ---

    def insert(self, item: Item, asked: str | None) -> tuple[Send, ...]:
        """Put an item into the history after the item with the id ``asked``: ``"root"`` puts it first, None
        last. Returns the events that show it to the client. Raises a `SessionError` if it is refused; then
        nothing has changed."""
        writer = self._writer()
        if writer is not None and item.id in writer.item_ids:
            raise ItemExists(f"An item with id {item.id!r} is in a running reply", param="item.id")
        if isinstance(item, FunctionCallOutput):
            self.check_call(item.call_id, "item.call_id")
        previous = self._last_item_id() if asked is None else asked
        self._history.insert(item, asked)
        if writer is not None and (asked is None or asked in self._after_reply):
            self._after_reply |= {item.id}
        frame, shown = frame_of(item), None if previous == ROOT else previous
        return tuple(Send(event) for event in self._shown(frame, shown))

    def check_call(self, call_id: str, param: str) -> None:
        """Check that the output of the tool call ``call_id`` may be added now: the call is in the history, or a
        running reply has made it, and it has no output yet. Raises ``CallUnknown`` or ``CallAnswered``, which
        name the field ``param``."""
        writer = self._writer()
        saying = () if writer is None else writer.call_ids
        self._history.calls().check(call_id, saying, param=param)

    def _shown(self, frame: AnyItem, previous: str | None) -> list[server.ServerEvent]:
        return [
            server.ItemAdded(event_id=self.event_id(), item=frame, previous_item_id=previous),
            server.ItemDone(event_id=self.event_id(), item=frame, previous_item_id=previous),
        ]

    def _retrieved(self, item_id: str | None) -> server.ItemRetrieved:
        item, previous = self._history.found(item_id)
        return server.ItemRetrieved(event_id=self.event_id(), item=frame_of(item), previous_item_id=previous)

    def _delete_item(self, item_id: str) -> None:
        writer = self._writer()
        if writer is not None and item_id in writer.item_ids:
            raise ItemUnknown(f"The item {item_id!r} is in a running reply", param="item_id")
        self._history.delete(item_id)
        self._after_reply -= {item_id}

    def _last_item_id(self) -> str | None:
        """The id of the conversation's last item as the client sees it; None if the conversation is empty.
        Items that a running reply has begun count. Items that were added while it runs come behind them."""
        last, writer = next(self._history.backwards(), None), self._writer()
        if writer is None or (last is not None and last.id in self._after_reply):
            return None if last is None else last.id
        return writer.item_ids[-1] if writer.item_ids else self._before_reply()

    def _before_reply(self) -> str | None:
        """The id of the item before the first item of the running reply: the last one that was not added while
        it runs. None if the reply is at the conversation's beginning."""
        before = (item.id for item in self._history.backwards() if item.id not in self._after_reply)
        return next(before, None)

    # --- responses ---

    def _create_after(self, event: client.ResponseCreate) -> list[Effect]:
        """Serve a `response.create`: add its items at the conversation's end and start its response. Out of
        band, the items go into its request and are not added. Raises if an item or the response is refused;
        then nothing has changed."""
        if not event.items:
            return [self._create_response(event)]
        params = event.response or ResponseParams()
        if params.conversation == "none":
            return [self._create_response(event, [self._followed_by(item) for item in event.items])]
        if self._writer() is not None:
            raise ConversationBusy(_BUSY)
        return self._begin_with([item_of(item, self._ids) for item in event.items], event)

    def _begin_with(self, items: Sequence[Item], event: client.ResponseCreate) -> list[Effect]:
        """Add ``items`` at the conversation's end and start the response that ``event`` asks for. Returns the
        effects in order: the events that show the items (not for a response in brief); the end of the prefill
        of streamed text, if an item is the output that this text was for; the start. Raises if an item or the
        response is refused; then all items are removed again."""
        added, inserted = list[Send](), 0
        try:
            for item in items:
                added += self.insert(item, None)
                inserted += 1
            start = self._create_response(event)
        except BaseException:
            for item in reversed(items[:inserted]):
                self._history.delete(item.id)
            raise
        over = self.incoming.answered(items)
        return [*over, start] if _brief(event.response) else [*added, *over, start]

    def _followed_by(self, frame: AnyItem) -> Item:
        """Make the item of ``frame`` for a response out of band, which alone reads it, behind the conversation.
        It is not added. Raises if it is the output of a tool call that cannot be answered now."""
        item = item_of(frame, self._ids)
        if isinstance(item, FunctionCallOutput):
            self.check_call(item.call_id, "items.call_id")
        return item

    def _create_response(self, event: client.ResponseCreate, more: Sequence[Item] = ()) -> StartResponse:
        params = event.response or ResponseParams()
        writes = params.conversation != "none"
        if writes and self._writer() is not None:
            raise ConversationBusy(_BUSY)
        if len(self.running) >= self._parallel_responses:
            raise TooManyResponses(f"At most {self._parallel_responses} responses run at once")
        self._admit()
        response_id = self._ids("resp")
        seed = seed_of(response_id)
        with under("response"):
            request = self._requests.of(params, self._session, self._resolved, seed, more)
        live = LiveResponse(
            response_id,
            self.event_id,
            conversation_id=self.conversation_id if writes else None,
            max_output_tokens=request.max_output_tokens or "inf",
            metadata=params.metadata if isinstance(params.metadata, dict) else None,
            asked_by=event.event_id,
            brief=_brief(params),
            unserved=tuple(without_effect("response", params)),
        )
        if writes:
            self._after_reply = _NONE
        self.running[live.id] = live
        return StartResponse(live.id, request)

    def ending(self, event: client.ClientEvent) -> str | None:
        """The id of the response that must end before ``event`` can be served: if ``event`` is a
        `response.create` for the conversation, the reply that still runs there although it was cancelled. None:
        the event need not wait."""
        writer = self._writer()
        if not isinstance(event, client.ResponseCreate) or writer is None or not writer.cancelling:
            return None
        return None if event.response and event.response.conversation == "none" else writer.id

    def check_steer(self, event: ResponseSteer) -> str | None:
        """Check a `response.steer`, which ends the running reply early and starts another one with more input,
        before the reply is ended. Returns the id of the running reply's response, which must end first; None if
        none runs. Changes nothing.

        Raises a `SessionError` or `FrameError` if the event cannot be served.
        """
        writer = self._writer()
        self._check_items([item_of(item, new_id) for item in event.input])
        params = event.response or ResponseParams()
        if params.conversation == "none":
            raise FieldInvalid(
                "`response.steer` starts no response out of band", "response.conversation", event.event_id
            )
        with under("response"):
            request_of(params, self._session, self._resolved, self._bounds)
        return None if writer is None else writer.id

    def _steer(self, event: ResponseSteer) -> list[Effect]:
        if self._writer() is not None:
            raise ConversationBusy("The conversation has another active response: wait for it or cancel it")
        items = [item_of(item, self._ids) for item in event.input]
        return self._begin_with(
            items, client.ResponseCreate(event_id=event.event_id, response=event.response)
        )

    def _check_items(self, items: Sequence[Item]) -> None:
        """Check that ``items`` could be added at the conversation's end, one after another, behind the items
        and calls that a running reply has begun. Adds nothing. Raises ``ItemInvalid``, ``ItemExists``,
        ``CallUnknown`` or ``CallAnswered``."""
        writer, calls = self._writer(), self._history.calls().copy()
        taken = {ROOT, *(() if writer is None else writer.item_ids)}
        for item in items:
            checked_item(item)
            if item.id in self._history or item.id in taken:
                raise ItemExists(f"An item with id {item.id!r} is already there", param="input")
            taken.add(item.id)
            if isinstance(item, FunctionCallOutput):
                calls.check(item.call_id, () if writer is None else writer.call_ids)
            calls.add(item)

    # --- a conversation opened again ---

    def note(self, response_id: str) -> bytes:
        """Encode the `ResponseNote` of the running response with this id, for the journal. `revive` decodes
        it."""
        live = self.running[response_id]
        return msgspec.msgpack.encode(
            ResponseNote(live.asked_by, live.metadata, self._before_reply(), live.brief, live.unserved)
        )

    def revive(
        self, response_id: str, request: TurnRequest | None, note: bytes, after_reply: Iterable[str] = ()
    ) -> None:
        """Count a response from the journal as running, so that `reply` and `failed` can make its events again,
        from the first one. Makes no event itself.

        ``request``: of its turn; None for a response out of band. ``note``: the bytes that `note` returned when
        it began. ``after_reply``: ids of the items that were added to the conversation while it ran.
        """
        kept = msgspec.msgpack.decode(note, type=ResponseNote)
        writes = request is not None
        self.running[response_id] = LiveResponse(
            response_id,
            self.event_id,
            conversation_id=self.conversation_id if writes else None,
            before=kept.before,
            max_output_tokens=(request.max_output_tokens if request else None) or "inf",
            metadata=kept.metadata,
            asked_by=kept.asked_by,
            brief=kept.brief,
            unserved=kept.unserved,
        )
        if writes:
            self._after_reply = frozenset(after_reply)

    def answered(self, event: client.ClientEvent) -> list[server.ServerEvent]:
        """Make the answer again to a client event that was served before the session was opened from the
        journal, because the first answer may be lost. Nothing changes. If the answer cannot be made again, for
        example because its item was deleted since, it is an `error` event. Empty for an event without an
        answer. The events of a response are not made here."""
        try:
            return self._answered(event)
        except (SessionError, FrameError, GatewayError) as error:
            return [self.refusal(error, event.event_id)]

    def _answered(self, event: client.ClientEvent) -> list[server.ServerEvent]:
        match event:
            case client.SessionUpdate():
                return [self._updated(event.session)]
            case client.ItemCreate():
                return self._shown_again(item_of(event.item, self._ids).id)
            case client.ResponseCreate(items=items, response=params):
                ids = [item_of(item, self._ids).id for item in items]
                shown = [] if _brief(params) else ids
                return [event for item_id in shown for event in self._shown_again(item_id)]
            case client.ItemDelete(item_id=item_id):
                return [server.ItemDeleted(event_id=self.event_id(), item_id=item_id)]
            case client.ItemRetrieve(item_id=item_id):
                return [self._retrieved(item_id)]
            case client.TextClear():
                return [server.TextCleared(event_id=self.event_id())]
            case client.TextCommit():
                item_id = self._ids("item")
                told = self.incoming.told(self._history.get(item_id), PrefilledInput(0, 0))
                return [told, *self._shown_again(item_id)]
        return []

    def _shown_again(self, item_id: str) -> list[server.ServerEvent]:
        item, previous = self._history.found(item_id)
        return self._shown(frame_of(item), previous)

    def _cancel(self, response_id: str | None) -> list[Effect]:
        live = self._writer() if response_id is None else self.running.get(response_id)
        if live is None:
            raise NothingToCancel("Cancellation failed: no such response is active")
        if live.cancelling:
            return []
        live.cancelling = True
        return [CancelResponse(live.id)]

    def _resolved(self, item: InputItem) -> Item:
        if isinstance(item, ItemReference):
            return self._history.get(item.id)
        return item_of(item, self._ids)

    def _writer(self) -> LiveResponse | None:
        """The running response that writes the conversation, of which there is at most one; None if none runs.
        Responses out of band do not count."""
        return next((live for live in self.running.values() if live.conversation_id is not None), None)


def _brief(params: ResponseParams | None) -> bool:
    """Whether the client asks for a response in brief, without events that repeat others. False if it gave no
    parameters (None)."""
    return params is not None and params.events == "brief"
