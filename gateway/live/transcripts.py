"""Turns for clients that send the whole conversation with each request (Chat Completions, Responses, Messages).

Such a client holds no session. `LiveSessions.continue_` finds the session that its conversation continues,
whatever protocol that one came by, so only new text is tokenized and only new tokens are prefilled. The code of
a protocol makes an `Ask` of each request, passes it to `Transcripts.turn`, and reads the events of the
`AskedTurn`; it knows no session.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec.structs import replace

from ...kvstore.log_lines import logging_with
from ...runtime.link.client import EngineLink
from ...sessions.adapters import SessionAdapter
from ...sessions.conversation.items import (
    FunctionCall,
    FunctionCallOutput,
    Item,
    Message,
    checked_preamble,
    new_id,
)
from ...sessions.errors import HandleUnknown, ItemInvalid, PromptTooLong, StorageUnavailable
from ...sessions.registry import Reopened
from ...sessions.session import Session
from ...sessions.text.tokenizer import ChatTokenizer
from ...sessions.tools.forms import CallForm, ReasoningForm
from ...sessions.turn.events import (
    EndReason,
    ReplyDone,
    ReplyEvent,
    ReplyStarted,
    ReplyStatus,
    ReplyTextDelta,
)
from ...sessions.turn.request import RequestBounds, TurnRequest, token_ids
from ...sessions.turn.response import TurnResponse
from ...sessions.workers import Stopped
from ..access.auth import TurnCaller
from ..errors import GatewayError
from .reply import SILENT, ReplyFold, Telling
from .session import LiveSession
from .sessions import LiveSessions, Transcript

T = TypeVar("T")
QUEUED = 256
"""The most events of a reply, on average, that wait to be taken for its client. With so many, the turns of the
request wait."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a client that sends the whole conversation.

    ``transcript``: the conversation. ``request``: parameters of the turn. ``choices``: the number of replies,
    each with a seed of its own; only the first joins the conversation. ``whole_calls``: deliver a tool call's
    arguments in one delta. ``prompts``: if there are any, each of these lists of token ids is a prompt of its
    own instead of the transcript, with ``choices`` replies, and nothing is kept of them. ``kept``: whether the
    journal keeps the conversation's session; otherwise it is found again as long as it stays in memory.
    ``silent``: what the reply says is not told (`prefilling`).
    """

    transcript: Transcript
    request: TurnRequest
    choices: int = 1
    whole_calls: bool = False
    prompts: tuple[tuple[int, ...], ...] = ()
    kept: bool = True
    silent: bool = False

    def prefilling(self) -> Ask:
        """The same, but it only prefills the prompt: it writes one token, which is not told and does not join
        the conversation. The KV of the whole prompt stays with its session."""
        request = replace(
            self.request,
            prefill_only=not self.prompts,
            max_output_tokens=1,
            min_output_tokens=0,
            format=None,
            tool=None,
            tool_choice="none",
            parse_calls=False,
        )
        return dataclasses.replace(self, request=request, whole_calls=True, silent=True)


class Transcripts:
    """Runs the turns of clients that send whole conversations. It is the `Face` by which `LiveSessions` makes
    their sessions. ``default_max_tokens``: the most tokens of a reply if its request sets no limit; None: as
    many as fit into the context. ``adapter``: the one that computes the turns; None: none."""

    def __init__(
        self,
        sessions: LiveSessions,
        link: EngineLink,
        default_max_tokens: int | None,
        adapter: SessionAdapter | None = None,
    ) -> None:
        self.adapter = adapter
        self._sessions = sessions
        self._link = link
        self.default_max_tokens = default_max_tokens

    @property
    def bounds(self) -> RequestBounds:
        """What the model allows in a request."""
        return self._sessions.registry.bounds

    @property
    def context(self) -> int:
        """The tokens that the model's context holds."""
        return self._link.hello.max_context

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The model's tokenizer."""
        return self._sessions.registry.language.tokenizer

    @property
    def opens_plainly(self) -> bool:
        """Whether the first text of a reply is its visible text: the template opens no reasoning and no channel
        before it."""
        forms = self._sessions.registry.language.forms
        opened = forms.opened or forms.reasoning is ReasoningForm.OPENED
        return not opened and forms.calls is not CallForm.HARMONY

    async def prompt_tokens(self, client: TurnCaller, transcript: Transcript, begun: str = "") -> list[int]:
        """The token ids of the prompt that a conversation gives, up to the opening of the reply. ``begun``:
        text with which the reply shall begin, put behind it. Raises ``ToolInvalid``, ``TemplateFailed``,
        ``PromptTooLong``."""
        registry = self._sessions.registry
        preamble = checked_preamble(transcript.preamble)
        ids = await registry.prompt_tokens(client.salt, preamble, transcript.items, begun)
        found: list[int] = ids.tolist()
        return found

    def raw_tokens(self, text: str, *, special: bool, stopped: Stopped, most: int | None = None) -> list[int]:
        """The token ids of a text without a chat template. Takes long for a long text: call it in
        `Service.aside`. ``special``: with the tokens that the tokenizer puts around a text. ``most``: the
        context in tokens, into which they must fit with one token more; None: any number. Raises
        ``PromptTooLong``, before all are made."""
        language = self._sessions.registry.language
        least = language.tokenizer.least(text)
        if most is None or least < most:
            ids = language.prefix_rule.raw(text, special=special, most=most, stopped=stopped)
            least = len(ids)
        if most is not None and least >= most:
            raise PromptTooLong.of(f"it has at least {least} tokens", most, least, param="prompt")
        return ids

    def raw_text(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens included. Takes long for many: call it in
        `Service.aside`. Raises ``SamplingInvalid`` for an id that is not in the vocabulary."""
        ids = token_ids("tokens", tokens, self.bounds.vocab_size)
        (text,) = self.tokenizer.backend.decode_batch([ids], skip_special_tokens=False)  # others may run
        return str(text)

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that the model itself recommends, as keyword arguments of
        `TurnRequest.checked`; only those that it sets."""
        defaults = self._link.hello.defaults
        named = {name: getattr(defaults, name) for name in defaults.__struct_fields__}
        return {name: value for name, value in named.items() if value is not None}

    @asynccontextmanager
    async def turn(self, client: TurnCaller, ask: Ask, reply_id: str) -> AsyncIterator[AskedTurn]:
        """Run a request's turn during the block. Yields it when its prompt was accepted. If the block is left
        early, the turn is cancelled. ``reply_id``: of the answer that the client gets, for the turn's log line.

        Raises ``RateLimited``, ``QueueTooLong``, ``SessionLimit``, ``TurnLimit``, ``StorageUnavailable``,
        ``ItemInvalid``, ``ToolInvalid``, ``GrammarInvalid``, ``PromptTooLong``, ``TemplateFailed``,
        ``EngineUnavailable``: before anything was computed.
        """
        checked_preamble(ask.transcript.preamble)
        self._check_length(ask)
        self._sessions.turns.admit(client)
        connection = _Connection(client)
        if ask.prompts:
            live = self._sessions.open(self, connection, client.owner, client.salt, kept=False)
        else:
            live = await self._sessions.continue_(
                self,
                connection,
                ask.transcript,
                client.owner,
                client.salt,
                kept=ask.kept,
                truncates=ask.request.truncation is not None,
            )
        turn = AskedTurn(live, ask, reply_id)
        try:
            await turn.begin()
            yield turn
        finally:
            await asyncio.shield(asyncio.ensure_future(self._end(turn, live, connection)))

    async def _end(self, turn: AskedTurn, live: LiveSession, connection: _Connection) -> None:
        await turn.aclose()
        if live.went_on or turn.prefilled:
            self._sessions.left(live, connection)
        else:
            await self._sessions.drop(live, connection)

    def _check_length(self, ask: Ask) -> None:
        """Raise ``PromptTooLong`` for a prompt that cannot fit into the context, ``ItemInvalid`` for one with
        more items than a session may have, before it reaches the journal. Token ids are counted; of a
        conversation only one with too many items or characters is refused here."""
        context, items = self._link.hello.max_context, len(ask.transcript.items)
        if longest := max(map(len, ask.prompts), default=0):
            if longest >= context:
                raise PromptTooLong.of(f"it has {longest} tokens", context, longest, param="prompt")
            return
        if items > (may := self._sessions.registry.settings.max_items):
            raise ItemInvalid(f"A conversation holds at most {may} items; this one has {items}")
        if ask.request.truncation is not None:
            return
        if items >= context:
            raise PromptTooLong.of(f"it has {items} items, each of a token or more", context, items)
        most = self._sessions.registry.most_characters
        if most is None:
            return
        size = len(ask.transcript.preamble.instructions) + sum(map(_characters, ask.transcript.items))
        if size > most:
            least = -(-size * context // most)
            raise PromptTooLong.of(f"it has at least {least} tokens", context, least)

    # --- as `Face` ------------------------------------------------------------------------------------------

    def config(self) -> bytes:
        """The configuration that the journal keeps with a session: empty, because each request has its own."""
        return b""

    def begin(self, session: Session, config: bytes) -> LiveSession:
        """Make a live session of a new session. ``config`` is not used."""
        live = LiveSession(session, _TranscriptSession(self), self._sessions.turns)
        live.disposable = True
        return live

    def reopen(self, reopened: Reopened, caller: TurnCaller) -> LiveSession:
        """Raises ``HandleUnknown``: no client has a handle of such a session, so none can be resumed."""
        raise HandleUnknown("No session can be resumed with this handle", param="handle")


class _Connection:
    """A request, while it uses a session; to `LiveSessions` it is the session's connection. ``caller``: its
    client."""

    def __init__(self, caller: TurnCaller) -> None:
        self.caller = caller

    def taken(self, why: GatewayError) -> None:
        """Called when another connection has the session; does nothing, as no other client can take the session
        while the request uses it."""


class _TranscriptSession:
    """The `SessionFace` of one session of `Transcripts`: it passes the events of each turn to the queue that
    the turn's request reads."""

    def __init__(self, face: Transcripts) -> None:
        self._face = face
        self._readers: dict[str, tuple[EventQueue, int]] = {}

    def read(self, response: TurnResponse, queue: EventQueue, number: int) -> None:
        """Put the turn's events into ``queue`` from now on, as those of the reply with this ``number``."""
        self._readers[response.id] = queue, number

    async def tell(self, response: TurnResponse, event: ReplyEvent) -> None:
        queue, number = self._readers[response.id]
        await queue.put(number, event)

    def tell_now(self, response: TurnResponse, event: ReplyTextDelta) -> bool:
        queue, number = self._readers[response.id]
        return queue.put_now(number, event)

    def ended(self, response: TurnResponse, error: Exception | None) -> None:
        queue, number = self._readers.pop(response.id)
        queue.end(number, error)

    def detach(self) -> None:
        """Called when the request is over or another one has the session; does nothing, as the request ends its
        own turns."""

    def alarm(self, fault: StorageUnavailable) -> None:
        """Called when the journal cannot write; does nothing, as a turn that runs goes on all the same."""

    def recovered(self, lost_seconds: float) -> None:
        """Called when another engine has taken over; does nothing, as the client only sees a pause."""

    def going_away(self, seconds: float) -> None:
        """Called before the server ends; does nothing, as the turn ends by itself, or is cancelled."""

    async def flushed(self) -> None:
        """Called when the server drains, to wait until all is sent; returns without waiting, as no frame of an
        ended turn is queued in this object."""

    def child_config(self) -> bytes:
        return self._face.config()

    def fork(self, session: Session, config: bytes) -> LiveSession:
        return self._face.begin(session, config)


class EventQueue:
    """The events of one request's ``replies``, in number, between the tasks that run their turns, which put
    them, and the one that sends them to the client, which takes them: each with its reply's number."""

    def __init__(self, replies: int) -> None:
        self._events: list[tuple[int, ReplyEvent]] = []
        self._most = QUEUED * replies
        self._left = set(range(replies))
        self._error: Exception | None = None
        self._open = True
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    async def put(self, number: int, event: ReplyEvent) -> None:
        """Add an event. First wait while the queue is full."""
        while not self.put_now(number, event):
            await self._room.wait()

    def put_now(self, number: int, event: ReplyEvent) -> bool:
        """Add an event, unless the queue is full. Returns whether it was added. After `close` events are
        dropped, and it returns True."""
        if not self._room.is_set():
            return False
        if self._open:
            self._events.append((number, event))
            self._news.set()
            if isinstance(event, ReplyDone):
                self._left.discard(number)
            if len(self._events) >= self._most:
                self._room.clear()
        return True

    def end(self, number: int, error: Exception | None) -> None:
        """Called when no event of a reply follows. If it had no `ReplyDone`, the request ends with it, and
        ``error``, unless it is None, is what `take` raises once all events are taken."""
        if number in self._left:
            self._left.clear()
            self._error = self._error or error
            self._news.set()

    async def take(self) -> list[tuple[int, ReplyEvent]]:
        """Remove and return all events in the queue; waits for the first. Returns an empty list when all
        replies have ended, or raises the error that ended one."""
        while self._left and not self._events:
            self._news.clear()
            await self._news.wait()
        taken, self._events = self._events, []
        self._room.set()
        if not taken and self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # breaks the cycle of frame and exception
        return taken

    def close(self) -> None:
        """Called when the reader has left: drops the events in the queue and all that come later."""
        self._open = False
        self._events.clear()
        self._room.set()


class AskedTurn:
    """The replies to one `Ask`, on the live session ``live``. Call `begin`, then read `told` to its end.
    ``reply_id``: of the client's answer, for log lines. ``replies``: by their numbers: 0 for the first choice;
    with ``prompts``, all choices of the first prompt come first."""

    def __init__(self, live: LiveSession, ask: Ask, reply_id: str) -> None:
        self.live = live
        most = ask.request.max_output_tokens
        self.replies = [
            ReplyFold(number, most, silent=ask.silent)
            for number in range(max(1, len(ask.prompts)) * ask.choices)
        ]
        self._ask = ask
        self._reply_id = reply_id
        self._responses: list[TurnResponse] = []
        self._queue = EventQueue(len(self.replies))
        self._first: list[tuple[int, ReplyEvent]] = []

    @property
    def prefilled(self) -> bool:
        """Whether the request only wanted its prompt computed, and that has been done."""
        done = self.replies[0].done
        computed = done is not None and done.status in (ReplyStatus.COMPLETED, ReplyStatus.INCOMPLETE)
        return computed and self._ask.silent

    async def begin(self) -> None:
        """Begin the first reply, and wait until its prompt was accepted; raises the error by which it was
        refused. For an `Ask` with ``prompts``, begin all replies and wait for none."""
        ask = self._ask
        if ask.prompts:
            for number in range(len(self.replies)):
                prompt = ask.prompts[number // ask.choices]
                self._prepare(replace(_choice(ask.request, number), prompt=prompt))
                self._run(number)
                await asyncio.sleep(0)  # there may be thousands: others run meanwhile
            return
        self._prepare(ask.request)
        self._run(0)
        for number in range(1, ask.choices):  # now, as the first reply may join the conversation soon
            self._prepare(_choice(ask.request, number))
        self._first = await self._queue.take()

    def _prepare(self, request: TurnRequest) -> None:
        """Make the response to a request on the conversation as it is now. It does not run yet."""
        request = replace(request, verbatim=True)
        turn_id = new_id("turn")  # the client's answer has an id of its own
        response = self.live.session.respond(request, turn_id, whole_calls=self._ask.whole_calls)
        self._responses.append(response)

    def _run(self, number: int) -> None:
        side, response = self.live.face, self._responses[number]
        assert isinstance(side, _TranscriptSession), "only `Transcripts` makes asked turns"
        side.read(response, self._queue, number)
        with logging_with(reply=self._reply_id):
            self.live.run(response)

    async def told(self, by: Telling[T]) -> AsyncIterator[list[T]]:
        """What ``by`` says of the replies, as their events come, in batches. A reply is over once the journal
        has it on disk. Further choices of a conversation begin with the first output of choice 0, because they
        share its prompt.

        Raises the error that ended a reply without its `ReplyDone`.
        """
        async for batch in self._events():
            made: list[T] = []
            for number, event in batch:
                reply = self.replies[number]
                if isinstance(event, ReplyDone) and self._ask.kept:
                    made += reply.close_at(event, by)
                    yield made
                    made = []
                    await self.live.journaled()
                made += reply.told(event, by)
            yield made

    async def whole(self) -> None:
        """Read all events to the end. Raises the error that ended a reply without its `ReplyDone`."""
        async for _ in self.told(SILENT):
            pass

    async def _events(self) -> AsyncIterator[list[tuple[int, ReplyEvent]]]:
        """The events of all replies in batches, each event with its reply's number."""
        waiting = () if self._ask.prompts else range(1, len(self._responses))
        taken = self._first or await self._queue.take()
        while taken:
            if not all(isinstance(event, ReplyStarted) for _, event in taken):
                for number in waiting:
                    self._run(number)
                waiting = ()
            yield taken
            taken = await self._queue.take()

    async def cancel(self, reason: EndReason = EndReason.CLIENT_CANCELLED) -> None:
        """End all replies as soon as possible; their last events still come, with this ``reason``."""
        for response in self._responses:
            await self.live.cancel(response.id, reason)

    async def aclose(self) -> None:
        """Cancel the replies that still run, and wait until they have ended. No events are delivered any
        more."""
        self._queue.close()
        for response in self._responses:
            with suppress(Exception):
                await self.live.cancel(response.id)
        for response in self._responses:
            await self.live.wait_ended(response.id)
            await response.aclose()  # it may not have run


def _choice(request: TurnRequest, number: int) -> TurnRequest:
    """The request for the reply with this number beside the first one: it does not join the conversation, and
    its seed is the request's seed plus the number."""
    sampling = request.sampling
    seed = (sampling.seed + number) % (1 << 63)
    return replace(request, sampling=replace(sampling, seed=seed), out_of_band=True)


def _characters(item: Item) -> int:
    match item:
        case Message(text=text) | FunctionCallOutput(output=text) | FunctionCall(arguments=text):
            return len(text)
