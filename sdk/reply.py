"""One response as it comes: `Reply` yields its typed events; `Finished` is what remains of it.

Knows nothing of tools being run, nor of what other responses do on the same connection.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate

import anyio
import msgspec

from .connection import Connection, server_error
from .errors import ProtocolBroken, ResponseFailed, SDKError
from .frames.client import ItemCreate, ResponseCreate, ResponseSteer
from .frames.items import AnyItem, FunctionCallItem, MessageItem
from .frames.response import KVReceipt, Response, Usage
from .frames.sampling import TokenLogprob
from .frames.server import (
    ArgumentsDelta,
    ErrorEvent,
    OutputFrame,
    OutputItemAdded,
    OutputItemDone,
    ResponseCreated,
    ResponseDone,
    ServerEvent,
    TextDelta,
)
from .params import Sent, together


@dataclass(frozen=True, slots=True)
class Finished:
    """A response after its end. `ttft_ms`: from sending to the first text or call, measured here.

    `logprobs`: of the tokens of its messages, where `top_logprobs` asked for them.
    """

    response: Response
    ttft_ms: float | None
    total_ms: float
    logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def text(self) -> str:
        """What was said."""
        return "".join(item.text for item in self.response.output if isinstance(item, MessageItem))

    @property
    def calls(self) -> list[FunctionCallItem]:
        """The tool calls that are whole."""
        return [
            item
            for item in self.response.output
            if isinstance(item, FunctionCallItem) and item.status == "completed"
        ]

    @property
    def status(self) -> str:
        """completed, cancelled or incomplete."""
        return self.response.status

    @property
    def usage(self) -> Usage | None:
        """Tokens, as the standard counts them."""
        return self.response.usage

    @property
    def kv(self) -> KVReceipt | None:
        """What the turn cost in KV, where the server tells."""
        return self.response.kv if isinstance(self.response.kv, KVReceipt) else None


@dataclass(slots=True)
class Progress:
    """What has come of one response: `texts` of its messages, by their ids. It outlives who read it, so that a
    reply that was left can still be cut."""

    response_id: str | None = None
    texts: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """All that was said so far."""
        return "".join(self.texts.values())

    def take(self, event: ServerEvent) -> bool:
        """Note an event; whether it is this response's."""
        match event:
            case ResponseCreated() if self.response_id is None:
                self.response_id = event.response.id
            case ResponseDone():
                return event.response.id == self.response_id
            case TextDelta() if event.response_id == self.response_id:
                self.texts[event.item_id] = self.texts.get(event.item_id, "") + event.delta
            case OutputFrame():
                return event.response_id == self.response_id
            case _:
                return False
        return True

    def shorten(self, item_id: str, end: int) -> None:
        """It was cut after `end` characters of this message."""
        kept: dict[str, str] = {}
        for known, text in self.texts.items():
            kept[known] = text[:end] if known == item_id else text
            if known == item_id:
                break
        self.texts = kept


class Rounds(list[Finished]):
    """The responses of one turn that have ended. `latest`: what has come of the one that was asked for last."""

    latest: Progress | None = None


class Reply:
    """Asks for one response and iterates over its events, up to and with `response.done`.

    `first` are items to add before it, in the same breath; when the response is refused they are taken back,
    and the outputs that were `sent` before; that one of these was refused is this one's refusal.
    Raises `ServerError` when the server refuses one of them or the response, `ResponseFailed` when it ends
    `failed`, `ConnectionLost`. Before anything is sent `claim` is awaited; at the end `finished` is set and
    appended to `rounds`. Ends early, without both, when the chat's next turn began before this one was read to
    its end.
    """

    def __init__(
        self,
        connection: Connection,
        create: ResponseCreate | ResponseSteer,
        first: Sequence[ItemCreate] = (),
        *,
        claim: Callable[[Reply], Awaitable[None]] | None = None,
        rounds: Rounds | None = None,
        sent: Sent | None = None,
    ) -> None:
        self._connection = connection
        self._create = create
        self._first = deque(first)
        self._items = _items(create, first)
        self._claim = claim
        self._sent = Sent() if sent is None else sent
        self._first_ids = set(self._sent.events)
        self._create_id: str | None = None
        self._given_up = False
        self._began = 0.0
        self._first_output: float | None = None
        self._logprobs: list[TokenLogprob] = []
        self._progress = Progress()
        self._output: dict[int, AnyItem] = {}
        self.finished: Finished | None = None
        self.rounds = Rounds() if rounds is None else rounds

    def asks(self, create: ResponseCreate) -> None:
        """Ask for this instead; before it is read."""
        assert self._create_id is None, "it has been asked for"
        self._create = create

    @property
    def response_id(self) -> str | None:
        """The response's, once it has begun."""
        return self._progress.response_id

    @property
    def running(self) -> bool:
        """Whether there is more to read."""
        if self.response_id is not None:
            return self._connection.runs(self.response_id)
        return self._create_id is not None and self._connection.awaits(self._create_id)

    @property
    def given_up(self) -> bool:
        """Whether reading it was cancelled, and not taken up again."""
        return self._given_up

    @property
    def said(self) -> dict[str, str]:
        """What was read of its messages so far, by their ids."""
        return dict(self._progress.texts)

    def witness(self, event: ServerEvent) -> None:
        """An event that was read elsewhere: it counts, and a failed end raises nothing."""
        with suppress(ResponseFailed):
            self._is_ours(event)

    def __aiter__(self) -> AsyncIterator[ServerEvent]:
        return self

    async def __anext__(self) -> ServerEvent:
        self._given_up = False
        try:
            return await self._next()
        except anyio.get_cancelled_exc_class():
            self._given_up = True
            raise

    async def _next(self) -> ServerEvent:
        if self._create_id is None:
            await self._ask()
        while self.running:
            event = await self._connection.receive()
            if isinstance(event, ErrorEvent):
                await self._refused(event)
            if self._is_ours(event):
                return event
        raise StopAsyncIteration

    async def _ask(self) -> None:
        if self._claim is not None:
            await self._claim(self)
        self._began = time.perf_counter()
        create = self._create
        if self._first and isinstance(create, ResponseCreate):
            whole = together(create, self._first)
            if whole is not None:
                create = whole
                self._first.clear()
        while self._first:  # each once, though the waiting be cancelled and taken up again
            self._first_ids.add(await self._connection.send(self._first.popleft()))
        self.rounds.latest = self._progress
        self._create_id = await self._connection.send(create)
        if isinstance(self._create, ResponseSteer):
            await self._connection.others()  # who reads the reply that ends for this one reads it to its end

    async def _refused(self, event: ErrorEvent) -> None:
        refused = event.error.event_id
        if refused in self._first_ids:
            await self._connection.quiet()  # the reply to what was refused with it is of no use
        if refused == self._create_id:
            self.rounds.latest = None  # there is no such response: the last is the one before
            await self._take_back()
        if refused in self._first_ids or refused in (self._create_id, None):
            raise server_error(event.error)

    async def _take_back(self) -> None:
        """Leave the conversation as it was: what cannot be answered would stand in the next turn's way too."""
        for item_id in (*self._items, *self._sent.items):
            with suppress(SDKError):  # what is told is the refusal; a lost connection tells itself
                await self._connection.delete(item_id)
        for call_id, commit in self._sent.commits.items():
            with suppress(SDKError):
                told = await self._connection.committed(commit, call_id)
                if told is not None:
                    await self._connection.delete(told.item_id)

    def _is_ours(self, event: ServerEvent) -> bool:
        if not self._progress.take(event):
            return isinstance(event, ErrorEvent)
        if isinstance(event, ResponseDone):
            self._end(event.response)
        elif isinstance(event, OutputFrame):
            if isinstance(event, TextDelta):
                self._logprobs += event.logprobs or ()
            if isinstance(event, OutputItemDone):
                self._output[event.output_index] = event.item
            if self._first_output is None and _is_output(event):
                self._first_output = time.perf_counter()
        return True

    def _end(self, response: Response) -> None:
        ended = time.perf_counter()
        if not response.output:  # what was told is not told again
            response = msgspec.structs.replace(response, output=list(self._output.values()))
        ttft = None if self._first_output is None else (self._first_output - self._began) * 1000
        self.finished = Finished(response, ttft, (ended - self._began) * 1000, tuple(self._logprobs))
        self.rounds.append(self.finished)
        if response.status == "in_progress":
            raise ProtocolBroken("The server ended a response that is in progress")
        if response.status == "failed":
            error = response.status_details.error if response.status_details else None
            if error is None:
                raise ResponseFailed("The response failed")
            raise ResponseFailed(error.message, code=error.code, kind=error.type)


def _items(create: ResponseCreate | ResponseSteer, first: Sequence[ItemCreate]) -> list[str]:
    """Ids of the items that come with a response, the last one first."""
    items = [event.item for event in first] + (create.input if isinstance(create, ResponseSteer) else [])
    return [item.id for item in reversed(items) if item.id]


def place_in(said: Mapping[str, str], heard: int) -> tuple[str, int] | None:
    """The message, by its id, in which the first `heard` characters end, and how many of them are its own."""
    begins = zip(said, accumulate(map(len, said.values()), initial=0), strict=False)
    found = [(item_id, heard - begin) for item_id, begin in begins if begin < heard or begin == 0]
    return found[-1] if found else None


def _is_output(event: OutputFrame) -> bool:
    """Whether the event is the model's: text, or a call, which in brief is told when it is whole."""
    if isinstance(event, OutputItemAdded | OutputItemDone):
        return isinstance(event.item, FunctionCallItem)
    return isinstance(event, TextDelta | ArgumentsDelta)


def said_in(finished: Finished) -> dict[str, str]:
    """The messages of a response, by id."""
    output = finished.response.output
    return {item.id or "": item.text for item in output if isinstance(item, MessageItem)}


def characters_heard(said: str, heard: int | str | None) -> int:
    """How many characters were heard. Raises `ValueError`."""
    if heard is None:
        return len(said)
    if isinstance(heard, str):
        if not said.startswith(heard):
            raise ValueError("The reply does not begin with this text")
        return len(heard)
    if not 0 <= heard <= len(said):
        raise ValueError(f"{len(said)} characters of the reply have come, not {heard}")
    return heard
