"""What the routes and the WebSocket of Responses call: it begins responses, stores them, and finds what is
stored."""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from ...kvstore.log_lines import logging_with
from ...sdk.errors import FieldInvalid, FieldMissing
from ...sessions.conversation.items import new_id
from ...sessions.errors import ConversationBusy, ItemUnknown
from ...sessions.stored import StoredObject
from ...sessions.workers import Stopped
from ..access.auth import TurnCaller
from ..answers import check
from ..clients import Asked
from ..errors import ConversationUnknown, PreviousResponseUnknown, ResponseUnknown
from ..live.requests import tools_of
from ..live.transcripts import Ask
from ..service import Service
from . import frames, notes
from .events import (
    CompactionResult,
    CountedInput,
    DeletionResult,
    ResponseFault,
    ResponseObject,
    ToldConversation,
)
from .items import GivenItem, GivenReference, KeptCompaction, KeptItem
from .notes import ConversationNote, ItemsNote, KeptResponse
from .reply import ResponseReply, item_id, response_named, usage_of
from .running import LoggedEvent, RunningResponse
from .translate import (
    ask_of,
    check_create,
    compaction_of,
    functions_in,
    kept_items,
    named_by,
    response_of,
    summary_ask,
    transcript_of,
    without_echoes,
)

T = TypeVar("T")
ITEM_BYTES = 64
"""For `Service.aside` an item, or an event of a stream, counts as so many bytes: it takes a few microseconds to
translate, however long its text is."""
MOST_ITEMS = 20_000
"""The most items of a stored conversation, as of any other."""
LOCAL = 64
"""The most unstored responses that one connection remembers."""


@dataclass(frozen=True, slots=True)
class Continued:
    """What a request continues. ``items``: all items up to there. ``parent``: the stored object, a response or
    a conversation, that has them; None if they are stored nowhere."""

    items: list[KeptItem]
    parent: StoredObject | None = None

    @property
    def unstored(self) -> list[KeptItem]:
        """The items that no stored object has: all or none."""
        return self.items if self.parent is None else []


class LocalResponses:
    """The responses with ``store: false`` that one connection remembers: the latest `LOCAL` ones, so that a
    request on the same connection can continue them."""

    def __init__(self) -> None:
        self._items: OrderedDict[str, list[KeptItem]] = OrderedDict()

    def keep(self, response_id: str, items: list[KeptItem]) -> None:
        """Remember a response. ``items``: all items of its conversation, up to its output."""
        self._items[response_id] = items
        while len(self._items) > LOCAL:
            self._items.popitem(last=False)

    def find(self, response_id: str) -> list[KeptItem] | None:
        """All items of the conversation up to the output of this response; None if it is not remembered."""
        return self._items.get(response_id)

    def evict(self, response_id: str | None) -> None:
        """Forget a response, if it is remembered, because a request that continued it failed."""
        self._items.pop(response_id or "", None)


class ResponsesFace:
    """All responses and conversations of one service. Every method has a ``client`` and finds only what its
    tenant has stored."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.limits = service.settings.limits
        self._running: dict[tuple[bytes, str], RunningResponse] = {}
        self._busy: set[tuple[bytes, str]] = set()  # conversations with a response that runs

    # --- creating -------------------------------------------------------------------------------------------

    async def begin(
        self,
        client: TurnCaller,
        asked: Asked[frames.CreateBody],
        *,
        streamed: bool,
        generate: bool = True,
        local: LocalResponses | None = None,
        steers: Sequence[GivenItem] = (),
    ) -> RunningResponse:
        """Begin the response that is asked for. It runs to its end by itself. ``streamed``: its events are
        read while it runs. ``generate`` false: prefill its prompt and write nothing. ``local``: the unstored
        responses that the client's connection remembers. ``steers``: further input items, from
        `response.steer`, which go before those of the body.

        Raises ``FieldInvalid``, ``PreviousResponseUnknown``, ``ConversationUnknown``, ``ConversationBusy`` and
        what `Transcripts.turn` raises: before anything was computed.
        """
        body = asked.body
        check_create(body)
        transcripts = await self.service.transcripts(body.model)
        if body.stored:
            self.service.stored.check(client.salt)
        response_id = new_id("resp")
        past = await self._past(client, body.previous_response_id, body.conversation_id, local)
        given = await self._given(client, body.input, response_id, past.items, steers)
        bounds, sampling, most = transcripts.bounds, transcripts.sampling, transcripts.default_max_tokens

        def ask_for(_: Stopped) -> Ask:
            items, first = [*past.items, *given], len(past.items) + len(steers)
            transcript = transcript_of(body.instructions, tools_of(functions_in(body.tools)), items, first)
            named = named_by(body, transcript, response_id)
            return ask_of(body, named, bounds, sampling, most, streamed=streamed)

        size = ITEM_BYTES * (len(past.items) + len(given))
        ask = await self.service.aside(client.salt, size, ask_for)
        model = body.model or self.service.model
        begun = response_of(asked, response_id, model, int(time.time()), ask.request)
        if not generate:
            ask = ask.prefilling()
        if body.conversation_id is not None:
            self._hold(client, body.conversation_id)
        finishing = _Finishing(self, client, body, past, local)
        try:
            async with AsyncExitStack() as stack:
                with logging_with(conversation=body.conversation_id):
                    turn = await stack.enter_async_context(transcripts.turn(client, ask, response_id))
                running = RunningResponse(
                    ResponseReply(begun, len(given)),
                    turn,
                    stack.pop_all(),
                    given,
                    finishing.finish,
                    streamed=streamed,
                    waits=streamed and not body.background,
                )
            if body.background:
                await finishing.store_begun(running)
        except BaseException:
            self.release(client, body.conversation_id)
            raise
        self._running[client.salt, response_id] = running
        self.service.spawn(running.run())
        return running

    def _hold(self, client: TurnCaller, conversation_id: str) -> None:
        """Count a response of this conversation as running, so that no other one can begin until `release`, and
        no item is added or removed. Raises ``ConversationBusy`` if one runs already."""
        self._check_idle(client, conversation_id)
        self._busy.add((client.salt, conversation_id))

    def _check_idle(self, client: TurnCaller, conversation_id: str) -> None:
        """Raise ``ConversationBusy`` if a response of this conversation runs: what it reads and writes is
        stored at its end, before what comes then."""
        if (client.salt, conversation_id) in self._busy:
            told = "A response of this conversation is running: retry when it has ended"
            raise ConversationBusy(told, param="conversation")

    def release(self, client: TurnCaller, conversation_id: str | None) -> None:
        """Called when the response of this conversation has ended: others may begin. Does nothing for None."""
        self._busy.discard((client.salt, conversation_id or ""))

    async def _past(
        self,
        client: TurnCaller,
        previous: str | None,
        conversation: str | None,
        local: LocalResponses | None = None,
    ) -> Continued:
        if conversation is not None:
            stored = await self.conversation(client, conversation)
            return Continued(await self.items(client, stored.notes), stored)
        if previous is None:
            return Continued([])
        if local is not None and (known := local.find(previous)) is not None:
            return Continued(known)
        if (client.salt, previous) in self._running:
            told = "The previous response is still running: continue when it has ended"
            raise FieldInvalid(told, "previous_response_id")
        found = await self.service.stored.find(client.salt, previous)
        if found is None or not notes.is_response(found):
            raise PreviousResponseUnknown(previous)
        return Continued(await self.items(client, found.notes), found)

    async def _given(
        self,
        client: TurnCaller,
        given: str | Sequence[GivenItem] | None,
        owner_id: str,
        known: Sequence[KeptItem] = (),
        steers: Sequence[GivenItem] = (),
        first: int = 0,
        param: str = "input",
    ) -> list[KeptItem]:
        """The items that a client gives, in the form in which they are stored. ``steers``: items that go before
        them. ``owner_id``: the id of the response or conversation that they belong to, from which their ids are
        made; ``first``: the number of the first new id. ``known``: items that references may name without a
        look-up. ``param``: the field that has them, for errors."""
        referred = await self._referred(client, given, known)
        numbers = itertools.count(first)

        def name(prefix: str) -> str:
            return item_id(prefix, owner_id, next(numbers))

        def kept(_: Stopped) -> list[KeptItem]:
            made = kept_items(given, name, referred, param)
            return [*kept_items(steers, name, {}), *without_echoes(made, known, param)]

        return await self.service.aside(
            client.salt, ITEM_BYTES * (isinstance(given, list) and len(given)), kept
        )

    async def items(self, client: TurnCaller, stored: Sequence[bytes]) -> list[KeptItem]:
        """All items in the notes of a stored object, as `notes.items_of` finds them."""
        return await self.service.aside(client.salt, sum(map(len, stored)), lambda _: notes.items_of(stored))

    async def _referred(
        self, client: TurnCaller, given: str | Sequence[GivenItem] | None, known: Iterable[KeptItem]
    ) -> dict[str, KeptItem]:
        """By id, the items that the references among ``given`` name: out of ``known``, or out of the stored
        object that an item's id names. Those that are not found are left out."""
        names = {item.id for item in given or () if isinstance(item, GivenReference)}
        if not names:
            return {}
        found = {item.id: item for item in known if item.id in names}
        for name in names - found.keys():
            suffix = response_named(name)
            for owner_id in (f"resp_{suffix}", f"conv_{suffix}"):
                stored = None if suffix is None else await self.service.stored.find(client.salt, owner_id)
                items = [] if stored is None else await self.items(client, stored.notes)
                found.update((item.id, item) for item in items if item.id == name)
        return found

    def ended(self, client: TurnCaller, response_id: str) -> None:
        """Called when the response with this id does not run any more: `running` finds it no longer."""
        self._running.pop((client.salt, response_id), None)

    # --- stored responses -----------------------------------------------------------------------------------

    def running(self, client: TurnCaller, response_id: str) -> RunningResponse | None:
        """The response with this id that runs and is to be stored; None if none does."""
        running = self._running.get((client.salt, response_id))
        return running if running is not None and running.response.store else None

    async def stored(self, client: TurnCaller, response_id: str) -> tuple[StoredObject, KeptResponse]:
        """A stored response: the stored object, and the response in it. One that ran when an earlier server
        ended is shown as failed. Raises ``ResponseUnknown``."""
        found = await self.service.stored.find(client.salt, response_id)
        if found is None or not notes.is_response(found):
            raise ResponseUnknown(f"Response with id {response_id[:128]!r} not found")
        note = await self.service.aside(client.salt, len(found.last), lambda _: notes.response_in(found))
        if note.response.status in ("queued", "in_progress"):  # the server ended before it did
            note = _lost(note)
        return found, note

    async def retold(self, client: TurnCaller, response_id: str, begin: int) -> list[LoggedEvent]:
        """The events of a stored response from a number on, the same as when it ran. Raises
        ``ResponseUnknown``."""
        _, note = await self.stored(client, response_id)

        def told(_: Stopped) -> list[LoggedEvent]:
            events = ResponseReply.retold(note.response, len(note.input), note.cuts)
            return [LoggedEvent.of(one) for one in events[begin:]]

        return await self.service.aside(client.salt, ITEM_BYTES * sum(map(len, note.cuts)), told)

    async def retrieve(self, client: TurnCaller, response_id: str) -> ResponseObject:
        """A response, stored or running. Raises ``ResponseUnknown``."""
        if (running := self.running(client, response_id)) is not None:
            return running.response
        return (await self.stored(client, response_id))[1].response

    async def delete(self, client: TurnCaller, response_id: str) -> DeletionResult:
        """Forget a stored response, and the session that wrote it; one that runs is cancelled first. Raises
        ``ResponseUnknown``."""
        if (running := self.running(client, response_id)) is not None:
            await running.cancel()
        stored, _ = await self.stored(client, response_id)
        await self._forget(stored, await self._sessions(client, stored))
        return DeletionResult(id=response_id, object="response")

    async def _forget(self, stored: StoredObject, sessions: set[int]) -> None:
        """Forget a stored object, and the sessions, by their numbers, that wrote what is in it: other objects
        hold all that they need."""
        self.service.stored.drop(stored)
        await self.service.delete(sessions)
        await self.service.stored.durable()

    async def input_items(self, client: TurnCaller, response_id: str) -> list[KeptItem]:
        """All items from which a stored response was written, in order. Raises ``ResponseUnknown``."""
        if (running := self.running(client, response_id)) is not None:
            await running.ended()
        stored, note = await self.stored(client, response_id)
        before = await self.items(client, stored.notes[: -stored.own])
        return [*before, *note.before, *note.input]

    # --- without a response ---------------------------------------------------------------------------------

    async def count(self, client: TurnCaller, body: frames.CountBody) -> CountedInput:
        """The number of tokens of the prompt that a request would have. Raises ``FieldInvalid``,
        ``FieldMissing``, ``PreviousResponseUnknown``, ``ConversationUnknown``, and what
        `Transcripts.prompt_tokens` raises."""
        transcripts = await self.service.transcripts(body.model)
        past = await self._past(client, body.previous_response_id, body.conversation_id)
        given = await self._given(client, body.input, new_id("resp"), past.items)
        items = [*past.items, *given]
        if not items:
            raise FieldMissing("Missing required parameter: 'input'", "input")
        transcript = await self.service.aside(
            client.salt,
            ITEM_BYTES * len(items),
            lambda _: transcript_of(
                body.instructions, tools_of(functions_in(body.tools)), items, len(past.items)
            ),
        )
        return CountedInput(input_tokens=len(await transcripts.prompt_tokens(client, transcript)))

    async def compact(self, client: TurnCaller, body: frames.CompactBody) -> CompactionResult:
        """Shorten a conversation: the model summarises it. A client puts the result's item instead of the
        conversation into its next request. Raises what `begin` raises, and the error of a summary that
        failed."""
        transcripts = await self.service.transcripts(body.model)
        past = await self._past(client, body.previous_response_id, None)
        result_id = new_id("resp")
        given = await self._given(client, body.input, result_id, past.items)
        items = [*past.items, *given]
        if not items:
            raise FieldInvalid("There is nothing to shorten: give `input` or `previous_response_id`", "input")
        bounds, sampling = transcripts.bounds, transcripts.sampling
        ask = await self.service.aside(
            client.salt,
            ITEM_BYTES * len(items),
            lambda _: summary_ask(
                transcript_of(body.instructions, (), items, len(past.items)), bounds, sampling
            ),
        )
        async with transcripts.turn(client, ask, result_id) as turn:
            await turn.whole()
        check(turn.replies)
        (reply,) = turn.replies
        compaction = KeptCompaction(
            id=item_id("cmp", result_id, len(given)), encrypted_content=compaction_of(reply.text)
        )
        return CompactionResult(
            id=result_id,
            created_at=int(time.time()),
            output=[compaction],
            usage=usage_of(reply.usage),
        )

    # --- conversations --------------------------------------------------------------------------------------

    async def conversation(self, client: TurnCaller, conversation_id: str) -> StoredObject:
        """A stored conversation, its latest version. Raises ``ConversationUnknown``."""
        found = await self.service.stored.find(client.salt, conversation_id)
        if found is None or notes.conversation_in(found) is None:
            raise ConversationUnknown(f"Conversation with id {conversation_id[:128]!r} not found")
        return found

    async def _latest(
        self, client: TurnCaller, conversation_id: str, work: Callable[[StoredObject], Awaitable[T]]
    ) -> tuple[StoredObject, T]:
        """The latest version of a conversation, and what ``work`` makes of it: it works again if there is a
        newer version when it is done. Raises ``ConversationUnknown``, and what ``work`` does."""
        while True:
            kept = await self.conversation(client, conversation_id)
            made = await work(kept)
            if await self.conversation(client, conversation_id) == kept:
                return kept, made

    async def make_conversation(self, client: TurnCaller, body: frames.ConversationBody) -> ToldConversation:
        """Make and store a conversation with the body's items and metadata. Raises ``FieldInvalid``,
        ``StorageUnavailable``."""
        stored = self.service.stored
        stored.check(client.salt)
        made = ToldConversation(id=new_id("conv"), created_at=int(time.time()), metadata=body.metadata or {})
        given = await self._given(client, body.items, made.id, param="items")
        note = notes.encoded(ConversationNote(conversation=made))
        kept = stored.add(made.id, client.salt, note, owner=client.owner)
        if given:
            stored.append(kept, notes.encoded(ItemsNote(items=given)))
        await stored.durable()
        return made

    async def change_conversation(
        self, client: TurnCaller, conversation_id: str, body: frames.ConversationChange
    ) -> ToldConversation:
        """Replace a conversation's metadata. Raises ``ConversationUnknown``, ``StorageUnavailable``."""
        self.service.stored.check(client.salt)
        kept = await self.conversation(client, conversation_id)
        before = notes.conversation_in(kept)
        assert before is not None, "it is a conversation"
        changed = ToldConversation(id=before.id, created_at=before.created_at, metadata=body.metadata or {})
        self.service.stored.append(kept, notes.encoded(ConversationNote(conversation=changed)))
        await self.service.stored.durable()
        return changed

    async def delete_conversation(self, client: TurnCaller, conversation_id: str) -> DeletionResult:
        """Forget a conversation, and the sessions that wrote its responses. The responses stay. Raises
        ``ConversationUnknown``."""
        await self._forget(*await self._latest(client, conversation_id, partial(self._sessions, client)))
        return DeletionResult(id=conversation_id, object="conversation.deleted")

    async def _sessions(self, client: TurnCaller, stored: StoredObject) -> set[int]:
        """The sessions that wrote a stored object's own responses and items, as `notes.sessions_of` finds
        them."""
        return await self.service.aside(client.salt, stored.size, lambda _: notes.sessions_of(stored))

    async def add_items(
        self, client: TurnCaller, conversation_id: str, items: Sequence[GivenItem]
    ) -> list[KeptItem]:
        """Add items to a conversation. Returns them as they are stored. Raises ``ConversationUnknown``,
        ``ConversationBusy``, ``FieldInvalid``, ``StorageUnavailable``."""
        self.service.stored.check(client.salt)
        self._check_idle(client, conversation_id)

        async def more(kept: StoredObject) -> tuple[list[KeptItem], list[KeptItem]]:
            def read(_: Stopped) -> tuple[int, list[KeptItem]]:
                return notes.made_items(kept), notes.items_of(kept.notes)

            first, there = await self.service.aside(client.salt, kept.size, read)
            if len(there) + len(items) > MOST_ITEMS or kept.size > self.limits.body_bytes:
                told = f"A conversation holds at most {MOST_ITEMS} items, in {self.limits.body_bytes} bytes"
                raise FieldInvalid(f"{told}: begin another one", "items")
            named = {item.id for item in items}
            echoes = [item for item in there if item.id in named]
            return echoes, await self._given(
                client, items, conversation_id, there, first=first, param="items"
            )

        kept, (echoes, given) = await self._latest(client, conversation_id, more)
        if given:
            self.service.stored.append(kept, notes.encoded(ItemsNote(items=given)))
            await self.service.stored.durable()
        return [*echoes, *given]

    async def remove_item(self, client: TurnCaller, conversation_id: str, item: str) -> ToldConversation:
        """Remove an item from a conversation, and forget the sessions that wrote its responses. The responses
        stay. Raises ``ConversationUnknown``, ``ConversationBusy``, ``ItemUnknown``."""
        self._check_idle(client, conversation_id)

        async def rest(kept: StoredObject) -> tuple[list[bytes], set[int]]:
            def made(_: Stopped) -> tuple[list[bytes], set[int]]:
                item_in(notes.items_of(kept.notes), item)
                return notes.without(kept, item), notes.sessions_of(kept)

            return await self.service.aside(client.salt, kept.size, made)

        kept, (left, sessions) = await self._latest(client, conversation_id, rest)
        self.service.stored.rewrite(kept, left, owner=client.owner)
        await self.service.delete(sessions)
        await self.service.stored.durable()
        told = notes.conversation_in(kept)
        assert told is not None, "it is a conversation"
        return told


class _Finishing:
    """Stores one response when it ends, and releases its conversation. ``past``: what it continues. ``local``:
    the unstored responses that the client's connection remembers; None over HTTP."""

    def __init__(
        self,
        face: ResponsesFace,
        client: TurnCaller,
        body: frames.CreateBody,
        past: Continued,
        local: LocalResponses | None,
    ) -> None:
        self._face = face
        self._client = client
        self._body = body
        self._past = past
        self._local = local
        self._begun: StoredObject | None = None

    async def store_begun(self, running: RunningResponse) -> None:
        """Store a response that runs in the background, before the client learns its id."""
        self._begun = self._add(running)
        await self._face.service.stored.durable()

    async def finish(self, running: RunningResponse) -> None:
        """Store a response that has ended, add its items to its conversation, and wait until the journal has
        that. A response with ``store: false`` is only remembered for its connection."""
        response, stored = running.response, self._face.service.stored
        try:
            if response.store:
                if self._begun is None:
                    self._add(running)
                else:
                    stored.append(self._begun, self._note(running))
            elif self._local is not None and response.status != "failed":
                items = [*self._past.items, *running.given, *response.output]
                self._local.keep(response.id, items)
            if await self._join_conversation(running) or response.store:
                await stored.durable()
            if self._local is not None and response.status == "failed":
                self._local.evict(response.previous_response_id)
        finally:
            self._face.release(self._client, self._body.conversation_id)
            self._face.ended(self._client, response.id)

    def _add(self, running: RunningResponse) -> StoredObject:
        return self._face.service.stored.add(
            running.response.id,
            self._client.salt,
            self._note(running),
            owner=self._client.owner,
            parent=self._past.parent,
        )

    def _note(self, running: RunningResponse) -> bytes:
        note = KeptResponse(
            response=running.response,
            input=running.given,
            before=self._past.unstored,
            cuts=running.reply.cuts,
            session=_session_of(running),
        )
        return notes.encoded(note)

    async def _join_conversation(self, running: RunningResponse) -> bool:
        """Add the items of a response, input and output, to its conversation. Not done if it has none, if the
        conversation was deleted, or if the response failed. Returns whether it was done."""
        response, conversation = running.response, self._body.conversation_id
        if conversation is None or response.status == "failed":
            return False
        stored = self._face.service.stored
        kept = await stored.find(self._client.salt, conversation)
        if kept is None:
            return False
        items = ItemsNote(items=[*running.given, *response.output], session=_session_of(running))
        stored.append(kept, notes.encoded(items))
        return True


def _session_of(running: RunningResponse) -> str:
    """The number in the journal of the session that writes a response, hexadecimal; "" if the journal keeps
    none."""
    log = running.turn.live.session.log
    return f"{log.number:x}" if log.durable else ""


def item_in(items: Sequence[KeptItem], name: str) -> KeptItem:
    """The item with the id ``name``. Raises ``ItemUnknown``."""
    found = next((item for item in items if item.id == name), None)
    if found is None:
        raise ItemUnknown(f"Item with id {name[:128]!r} not found", param="item_id")
    return found


def _lost(note: KeptResponse) -> KeptResponse:
    """The note of a response that ran when an earlier server ended: the same, as a failed response."""
    fault = ResponseFault(code="server_error", message="The server ended before the response did")
    lost = replace(note.response, status="failed", error=fault)
    return replace(note, response=lost)
