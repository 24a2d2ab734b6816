"""The Realtime protocol as a pure state machine: an event in, effects out. No sockets, no loop, no clock.

`Conversation` decides which client event may come now, and edits the history. It runs nothing: the caller sends
the server events among the effects, runs the response that a `StartResponse` names, and passes the events of
its turn to `Conversation.reply`, or the error that ended it to `failed`. A response *in brief*, for which a
client may ask, leaves out the events that only repeat what others say.

The client may stream a text in before it becomes an item (`input_text_buffer.*`): a user's or system text, or
the output of a tool that still runs, for a call that has no output yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from ...sdk.errors import FieldInvalid
from ...sdk.frames import client, server
from ...sdk.frames.items import AnyItem, InputItem, ItemReference, MessageItem
from ...sdk.frames.response import ResponseParams
from ...sdk.frames.session import SessionPatch, SessionResource
from ...sdk.frames.unserved import without_effect
from ...sessions.conversation.history import REPLY, ROOT, History
from ...sessions.conversation.input_text_buffer import InputTextBuffer
from ...sessions.conversation.items import (
    FunctionCallOutput,
    Item,
    Role,
    checked_item,
    new_id,
)
from ...sessions.errors import (
    CallAnswered,
    CallUnknown,
    ConversationBusy,
    CutInvalid,
    ItemExists,
    ItemUnknown,
    PromptTooLong,
)
from ...sessions.text.eager_prefill import PrefilledInput
from ...sessions.turn.events import ReplyEvent
from ...sessions.turn.request import UNBOUNDED, RequestBounds, TurnRequest
from ..errors import NothingToCancel, TooManyResponses, error_details
from .event_log import UNSENT
from .response import LiveResponse, ResponseNote
from .translate import RequestCache, frame_of, item_of, patched, preamble_of, request_of, seed_of, under

PARALLEL_RESPONSES = 8
_WRITTEN = "The item {!r} is in a reply that still runs: wait for its end or cancel it"
_BUSY = "The conversation already has an active response: wait for it or cancel it"


@dataclass(frozen=True, slots=True)
class StartResponse:
    """Run the turn ``request``, and pass its events to `Conversation.reply` with this ``response_id``."""

    response_id: str
    request: TurnRequest


@dataclass(frozen=True, slots=True)
class CancelResponse:
    """Cancel a running response. What it said so far stays, and it ends with `response.done` as usual."""

    response_id: str


Effect: TypeAlias = server.ServerEvent | StartResponse | CancelResponse
"""What the caller of `Conversation.receive` has to do for a client event. A server event is to be sent."""


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
        self.running: dict[str, LiveResponse] = {}
        """The responses that have been created and have not ended, by id, out-of-band ones included."""
        self._requests = RequestCache(bounds)
        self.buffer = InputTextBuffer()
        """Text that the client streams in, until it is committed as an item."""
        self._most_characters = most_characters
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
            server.SessionCreated(event_id=UNSENT, session=self._session, handle=handle),
            server.ConversationCreated(event_id=UNSENT, conversation=conversation),
        ]

    def receive(self, event: client.ClientEvent, prefilled: PrefilledInput | None = None) -> Sequence[Effect]:
        """Apply one client event, and return what the caller has to do, in order. Empty for events that are
        served elsewhere, such as `session.fork`. ``prefilled``: of a commit, how much of the streamed text is
        prefilled. Raises a `SessionError`, `FrameError` or `GatewayError` if the event may not come now; then
        nothing has changed."""
        match event:
            case client.SessionUpdate(session=patch):
                updated = patched(self._session, patch, self._initial, self._names)
                with under("session"):  # must be possible
                    request_of(ResponseParams(), updated, self._resolved, self._bounds)
                self._history.preamble = preamble_of(updated)
                self._session = updated
                return [self._updated(patch)]
            case client.ItemCreate():
                item = item_of(event.item, self._ids)
                shown = self._insert(item, event.previous_item_id)
                self._answered_whole([item])
                return shown
            case client.ItemRetrieve(item_id=item_id):
                return [self._retrieved(item_id)]
            case client.ItemDelete(item_id=item_id):
                self._delete_item(item_id)
                return [server.ItemDeleted(event_id=UNSENT, item_id=item_id)]
            case client.TextAppend(text=text, role=role, call_id=call_id):
                self._check_owner(role, call_id)
                self._check_length(len(self.buffer.text) + len(text))
                self.buffer.append(text, role, call_id)
            case client.TextReplace(start=start, text=text):
                self._check_length(start + len(text))
                self.buffer.replace(start, text)
            case client.TextClear():
                self.buffer.clear()
                return [server.TextCleared(event_id=UNSENT)]
            case client.TextCommit(call_id=call_id):
                self._check_owner(None, call_id)
                return self._commit(prefilled or PrefilledInput())
            case client.ResponseCreate():
                return self._create_after(event)
            case client.ResponseSteer():
                return self._steer(event)
            case client.ResponseCancel(response_id=response_id):
                return self._cancel(response_id)
        return []

    def refusal(self, error: Exception, event_id: str | None = None) -> server.ErrorEvent:
        """Make the `error` event for ``error``, because of which a client event, or a frame that is no event,
        was refused. ``event_id``: the client event's, if it had one."""
        return server.ErrorEvent(event_id=UNSENT, error=error_details(error, event_id))

    def brief(self, response_id: str) -> bool:
        """Whether the running response with this id leaves out the events that repeat others. False if no such
        response runs."""
        live = self.running.get(response_id)
        return live is not None and live.note.brief

    def reply(self, response_id: str, event: ReplyEvent) -> list[server.ServerEvent]:
        """Make the server events for ``event``, the next event of a running response's turn. After `ReplyDone`
        the response does not run any more."""
        live = self.running[response_id]
        events = live.feed(event, self.before_reply)
        if live.done:
            del self.running[response_id]
        return events

    def failed(self, response_id: str, error: Exception) -> list[server.ServerEvent]:
        """End the response with this id after its turn raised ``error``, and make its last events. If it has
        had no event yet, that is one `error`; otherwise its open item is closed, its items are deleted, and
        `response.done` says `failed`."""
        live = self.running[response_id]
        del self.running[response_id]
        return live.fail(error) if live.created else [self.refusal(error, live.note.asked_by)]

    def forget(self, response_id: str) -> None:
        """Remove the response with this id, which was created but never run, if it is there. No event is made
        for it."""
        self.running.pop(response_id, None)

    def _updated(self, patch: SessionPatch) -> server.SessionUpdated:
        """Make `session.updated`: the whole configuration, and the names of the fields of ``patch`` that this
        server ignores."""
        unserved = without_effect("session", patch) or UNSET
        session = msgspec.structs.replace(self._session, unserved=unserved)
        return server.SessionUpdated(event_id=UNSENT, session=session)

    # --- items ---

    def _insert(self, item: Item, asked: str | None) -> list[server.ServerEvent]:
        """Put an item into the history after the item with the id ``asked``: ``"root"`` puts it first, None
        last. Returns the events that show it to the client. Raises a `SessionError` if it is refused; then
        nothing has changed."""
        writer = self._writer()
        if writer is not None and item.id in writer.item_ids:
            raise ItemExists(f"An item with id {item.id!r} is in a running reply", param="item.id")
        if isinstance(item, FunctionCallOutput):
            self._check_call(item.call_id, "item.call_id")
        previous, behind = asked, asked
        if asked is None:
            previous = next(self._seen(), None)
        elif self._history.busy and writer is not None and asked in writer.item_ids:
            if asked != writer.item_ids[-1]:
                raise ConversationBusy(_WRITTEN.format(asked), param="previous_item_id")
            behind = REPLY
        elif asked == ROOT:
            previous = None
        self._history.insert(item, behind)
        return self._shown(item, previous)

    def _check_call(self, call_id: str, param: str) -> None:
        """Check that the output of the tool call ``call_id`` may be added now: the call is in the history, or a
        running reply has made it, and it has no output yet. Raises ``CallUnknown`` or ``CallAnswered``, which
        name the field ``param``."""
        writer = self._writer()
        saying = () if writer is None else writer.call_ids
        self._history.calls().check(call_id, saying, param=param)

    def _shown(self, item: Item, previous: str | None) -> list[server.ServerEvent]:
        frame = frame_of(item)
        return [
            server.ItemAdded(event_id=UNSENT, item=frame, previous_item_id=previous),
            server.ItemDone(event_id=UNSENT, item=frame, previous_item_id=previous),
        ]

    def _retrieved(self, item_id: str | None) -> server.ItemRetrieved:
        found, previous = self._found(item_id)
        writer = self._writer()
        frame = None if writer is None else writer.item(found)
        return server.ItemRetrieved(
            event_id=UNSENT,
            item=frame or frame_of(self._history.get(found)),
            previous_item_id=previous,
        )

    def _delete_item(self, item_id: str) -> None:
        writer = self._writer()
        if writer is not None and item_id in writer.item_ids:
            raise ConversationBusy(_WRITTEN.format(item_id), param="item_id")
        self._history.delete(item_id)

    def check_message(self, item_id: str) -> str | None:
        """Check that a running reply that has begun the item ``item_id`` may be cut there: it is a message.
        Returns the id of that reply's response, None if there is none. Raises ``CutInvalid``."""
        writer = self._writer()
        item = None if writer is None else writer.item(item_id)
        if writer is None or item is None:
            return None
        if not isinstance(item, MessageItem):
            raise CutInvalid(f"The item {item_id!r} is no message of the assistant", param="item_id")
        return writer.id

    def check_free(self) -> None:
        """Raises ``ConversationBusy`` while a reply writes the conversation."""
        if self._writer() is not None:
            raise ConversationBusy(_BUSY)

    def _seen(self) -> Iterator[str]:
        """The ids of the conversation's items as the client sees them, from the last to the first: those that a
        running reply has begun stand for it."""
        writer = self._writer()
        for item in self._history.backwards_with_reply():
            if item is not None:
                yield item.id
            elif writer is not None:
                yield from reversed(writer.item_ids)

    def _found(self, item_id: str | None) -> tuple[str, str | None]:
        """The id of an item that the client sees, None: the last one, and of the item before it; None if it is
        the first. Raises ``ItemUnknown``."""
        seen = self._seen()
        found = next((known for known in seen if item_id in (None, known)), None)
        if found is None:
            missing = "no items" if item_id is None else f"no item {item_id!r}"
            raise ItemUnknown(f"The conversation has {missing}", param="item_id")
        return found, next(seen, None)

    def before_reply(self) -> str | None:
        """The id of the item before the running reply, or of the last item if none runs. None if there is
        none."""
        items = self._history.backwards_with_reply()
        if self._history.busy:
            next(item for item in items if item is None)
        before = next(items, None)
        return None if before is None else before.id

    # --- streamed text ---

    def _check_length(self, characters: int) -> None:
        most = self._most_characters
        if most is not None and characters > most:
            told = f"The model's context holds no text of more than {most} characters"
            raise PromptTooLong(told, param="text")

    def _check_owner(self, role: Role | None, call_id: str | None) -> None:
        self.buffer.check(role, call_id)
        if call_id is not None and not self.buffer.begun:
            self._check_call(call_id, "call_id")

    def _commit(self, prefilled: PrefilledInput) -> list[server.ServerEvent]:
        """Make the streamed text the conversation's last item, and empty the buffer. Raises if the text is
        refused; then it stays in the buffer."""
        item = checked_item(self.buffer.whole())
        item = msgspec.structs.replace(item, id=self._ids("item"))
        try:
            shown = self._insert(item, None)
        except (CallUnknown, CallAnswered) as refused:
            raise type(refused)(refused.message, param="call_id") from None
        self.buffer.clear()
        return [self._committed(item, prefilled), *shown]

    def _committed(self, item: Item, prefilled: PrefilledInput) -> server.TextCommitted:
        return server.TextCommitted(
            event_id=UNSENT,
            item_id=item.id,
            prefilled_tokens=prefilled.prefilled,
            left_tokens=prefilled.left,
            call_id=item.call_id if isinstance(item, FunctionCallOutput) else UNSET,
        )

    def _answered_whole(self, items: Sequence[Item]) -> None:
        """If the buffer holds a part of a tool call's output, and ``items``, which were just added, have the
        whole output of that call, empty the buffer."""
        outputs = {item.call_id for item in items if isinstance(item, FunctionCallOutput)}
        if self.buffer.call_id in outputs:
            self.buffer.clear()

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
        self.check_free()
        return self._begin_with([item_of(item, self._ids) for item in event.items], event)

    def _begin_with(self, items: Sequence[Item], event: client.ResponseCreate) -> list[Effect]:
        """Add ``items`` at the conversation's end and start the response that ``event`` asks for. Returns the
        events that show the items (none for a response in brief), and the start. Raises if an item or the
        response is refused; then all items are removed again."""
        added, inserted = list[Effect](), 0
        try:
            for item in items:
                added += self._insert(item, None)
                inserted += 1
            start = self._create_response(event)
        except BaseException:
            for item in reversed(items[:inserted]):
                self._history.delete(item.id)
            raise
        self._answered_whole(items)
        return [start] if _brief(event.response) else [*added, start]

    def _followed_by(self, frame: AnyItem) -> Item:
        """Make the item of ``frame`` for a response out of band, which alone reads it, behind the conversation.
        It is not added. Raises if it is the output of a tool call that cannot be answered now."""
        item = item_of(frame, self._ids)
        if isinstance(item, FunctionCallOutput):
            self._check_call(item.call_id, "items.call_id")
        return item

    def _create_response(self, event: client.ResponseCreate, more: Sequence[Item] = ()) -> StartResponse:
        params = event.response or ResponseParams()
        writes = params.conversation != "none"
        if writes:
            self.check_free()
        if len(self.running) >= self._parallel_responses:
            raise TooManyResponses(f"At most {self._parallel_responses} responses run at once")
        self._admit()
        response_id = self._ids("resp")
        seed = seed_of(response_id)
        with under("response"):
            request = self._requests.of(params, self._session, self._resolved, seed, more)
        note = ResponseNote(
            asked_by=event.event_id,
            metadata=params.metadata if isinstance(params.metadata, dict) else None,
            before=self.before_reply(),
            brief=_brief(params),
            unserved=tuple(without_effect("response", params)),
        )
        self.running[response_id] = LiveResponse(
            response_id,
            note,
            conversation_id=self.conversation_id if writes else None,
            max_output_tokens=request.max_output_tokens or "inf",
        )
        return StartResponse(response_id, request)

    def ending(self, event: client.ClientEvent) -> str | None:
        """The id of the response that must end before ``event`` can be served: if ``event`` is a
        `response.create` for the conversation, the reply that still runs there although it was cancelled. None:
        the event need not wait."""
        writer = self._writer()
        if not isinstance(event, client.ResponseCreate) or writer is None or not writer.cancelling:
            return None
        return None if event.response and event.response.conversation == "none" else writer.id

    def check_steer(self, event: client.ResponseSteer) -> str | None:
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

    def _steer(self, event: client.ResponseSteer) -> list[Effect]:
        self.check_free()
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
        return msgspec.msgpack.encode(self.running[response_id].note)

    def revive(self, response_id: str, request: TurnRequest | None, note: bytes) -> None:
        """Count a response from the journal as running, so that `reply` and `failed` can make its events again,
        from the first one. Makes no event itself.

        ``request``: of its turn; None for a response out of band. ``note``: the bytes that `note` returned when
        it began.
        """
        kept = msgspec.msgpack.decode(note, type=ResponseNote)
        writes = request is not None
        self.running[response_id] = LiveResponse(
            response_id,
            kept,
            conversation_id=self.conversation_id if writes else None,
            max_output_tokens=(request.max_output_tokens if request else None) or "inf",
            before=UNSET if writes and self._history.busy else kept.before,
        )

    def answered(self, event: client.ClientEvent) -> list[server.ServerEvent]:
        """Make the answer again to a client event that was served before the session was opened from the
        journal, because the first answer may be lost. Nothing changes. Empty for an event without an answer.
        The events of a response are not made here. Raises if the answer cannot be made again, for example
        because its item was deleted since."""
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
                return [server.ItemDeleted(event_id=UNSENT, item_id=item_id)]
            case client.ItemRetrieve(item_id=item_id):
                return [self._retrieved(item_id)]
            case client.TextClear():
                return [server.TextCleared(event_id=UNSENT)]
            case client.TextCommit():
                item_id = self._ids("item")
                told = self._committed(self._history.get(item_id), PrefilledInput())
                return [told, *self._shown_again(item_id)]
        return []

    def _shown_again(self, item_id: str) -> list[server.ServerEvent]:
        found, previous = self._found(item_id)
        return self._shown(self._history.get(found), previous)

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
