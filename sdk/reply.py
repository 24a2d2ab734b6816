"""One response as it comes: `Reply` asks for it and yields its typed events.

It runs no tools, and passes over the events of other responses on the same connection.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import msgspec

from .connection.connection import Aside, Connection, server_error
from .connection.responses import Finished, Progress, Rounds
from .errors import ProtocolBroken, ResponseFailed, SDKError
from .frames.client import ItemCreate, ResponseCreate, ResponseSteer
from .frames.items import AnyItem, FunctionCallItem
from .frames.response import Response
from .frames.sampling import TokenLogprob
from .frames.server import (
    ArgumentsDelta,
    ErrorEvent,
    OutputFrame,
    OutputItemAdded,
    OutputItemDone,
    ResponseDone,
    ServerEvent,
    TextDelta,
)
from .params import SentOutputs, together
from .reading import Reading, Unread

NOTHING_BEGAN = frozenset({"rate_limit_exceeded", "too_many_responses"})
"""Codes by which a response is refused before the items in its event are added."""


class Reply(Reading[ServerEvent, Finished]):
    """One response: asks for it and iterates over its server events, the last of which is `response.done`;
    `await` reads to the end and gives the finished response.

    `create`: the event that asks for it. `first`: items to add before it; `sent`: outputs of tools that were
    added before it. If the response is refused, both are deleted again. `beside`: it is out of band, and read
    beside others. `claim` is awaited before anything is sent.

    At the end `finished` is set, and appended to `rounds`. If the chat's next turn began before this response
    was read to its end, the iteration ends early and `finished` stays None. Raises `ServerError` if the server
    refuses an item, an output or the response, `ResponseFailed` if it ends `failed`, `ConnectionLost`.
    """

    def __init__(
        self,
        connection: Connection,
        create: ResponseCreate | ResponseSteer,
        first: Sequence[ItemCreate] = (),
        *,
        claim: Callable[[Reply], Awaitable[None]] | None = None,
        rounds: Rounds | None = None,
        sent: SentOutputs | None = None,
        unread: Unread | None = None,
        beside: bool = False,
    ) -> None:
        super().__init__(Rounds() if rounds is None else rounds, unread)
        self._beside = beside
        self._aside: Aside | None = None
        self._connection = connection
        self._create = create
        self._first = deque(first)
        self._items = _items(create, first)
        self._apart = False  # whether they were sent before the event that asks for the response
        self._claim = claim
        self._sent = SentOutputs() if sent is None else sent
        self._first_ids = set(self._sent.events)
        self._create_id: str | None = None
        self._began = 0.0
        self._first_output: float | None = None
        self._logprobs: list[TokenLogprob] = []
        self.progress = Progress()
        """What has come of the response so far."""
        self._output: dict[int, AnyItem] = {}
        self.finished: Finished | None = None

    @property
    def response_id(self) -> str | None:
        """The response's id; None until it has begun."""
        return self.progress.response_id

    @property
    def running(self) -> bool:
        """Whether the response has been asked for, and there is more to read."""
        if self._aside is not None:
            return self._aside.running
        if self.response_id is not None:
            return self.response_id in self._connection.responses.running
        return self._create_id in self._connection.responses.asked

    @property
    def texts(self) -> dict[str, str]:
        """The text of each of its messages, as far as it was read, by item id. A new dict."""
        return dict(self.progress.texts)

    def witness(self, event: ServerEvent) -> None:
        """Take in a server event that other code has read, as if it had been read here: it updates `texts` and,
        at the end, `finished`. A response that ends `failed` raises nothing here."""
        with suppress(ResponseFailed):
            self._note(event)

    def __repr__(self) -> str:
        state = self._state if self.finished is None else self.finished.status
        return f"<Reply {self.response_id} {state}>" if self.response_id else f"<Reply {state}>"

    def _end(self) -> Finished:
        return last_of(self.rounds)

    async def _next(self) -> ServerEvent:
        if self._create_id is None:
            await self._ask()
        while self.running:
            event = await (self._aside or self._connection).receive()
            if isinstance(event, ErrorEvent):
                await self._refused(event)
            if self._note(event):
                return event
        raise StopAsyncIteration

    async def _ask(self) -> None:
        """Await `claim`, then send `first` and `create`, in one event if they are small. What was sent before a
        cancellation is not sent again. After a `response.steer`, wait until no other task reads: it gets the
        end of the steered response."""
        if self._claim is not None:
            await self._claim(self)
        self._began = time.perf_counter()
        create = self._create
        if self._first and isinstance(create, ResponseCreate):
            whole = together(create, self._first)
            if whole is not None:
                create = whole
                self._first.clear()
        self._apart |= len(self._first) > 0
        while self._first:  # each is sent once, also when this is cancelled and taken up again
            self._first_ids.add(await self._connection.send(self._first.popleft()))
        self.rounds.latest = self.progress
        if self._beside and isinstance(create, ResponseCreate):
            self._aside = await self._connection.aside(create)
            self._create_id = self._aside.event_id
            return
        self._create_id = await self._connection.send(create)
        if isinstance(self._create, ResponseSteer):
            await self._connection.others()  # the reply that ends for this one is read to its end first

    async def _refused(self, event: ErrorEvent) -> None:
        """Raise `ServerError` if the error is about this response, about what was sent for it, or about no
        event in particular. Before that: if the response was refused, delete what was added for it; if an item
        or output was refused, cancel the response."""
        refused = event.error.event_id
        if refused in self._first_ids:
            await self._connection.quiet()  # a reply without what was refused is not wanted
        if refused == self._create_id:
            self.rounds.latest = None  # there is no such response: the one before is the last
            began = self._apart or event.error.code not in NOTHING_BEGAN
            await self._take_back(self._items if began else ())
        if refused in self._first_ids or refused in (self._create_id, None):
            raise server_error(event.error)

    async def _take_back(self, items: Sequence[str]) -> None:
        """Delete the added `items` and the outputs at the server: without a reply they would stand in the next
        turn. Errors are dropped."""
        for item_id in (*items, *self._sent.items):
            with suppress(SDKError):  # the refusal is what is raised
                await self._connection.delete(item_id)
        for call_id, commit in self._sent.commits.items():
            with suppress(SDKError):
                committed = await self._connection.committed(commit, call_id)
                if committed is not None:
                    await self._connection.delete(committed.item_id)

    def _note(self, event: ServerEvent) -> bool:
        """Update what is known of the response by a server event; its end sets `finished`. Returns whether the
        event is about this response, or an error. Raises `ResponseFailed` if the response ended `failed`,
        `ProtocolBroken`."""
        if not self.progress.take(event):
            return isinstance(event, ErrorEvent)
        if isinstance(event, ResponseDone):
            self._ended(event.response)
        elif isinstance(event, OutputFrame):
            if isinstance(event, TextDelta):
                self._logprobs += event.logprobs or ()
            if isinstance(event, OutputItemDone):
                self._output[event.output_index] = event.item
            if self._first_output is None and _is_output(event):
                self._first_output = time.perf_counter()
        return True

    def _ended(self, response: Response) -> None:
        ended = time.perf_counter()
        if not response.output:  # brief events do not repeat it
            response = msgspec.structs.replace(response, output=list(self._output.values()))
        ttft = None if self._first_output is None else (self._first_output - self._began) * 1000
        self.finished = Finished(response, ttft, (ended - self._began) * 1000, tuple(self._logprobs))
        self.rounds.append(self.finished)
        if response.status == "in_progress":
            broken = ProtocolBroken("The server sent response.done with the status in_progress")
            raise self._connection.located(broken)
        if response.status == "failed":
            error = response.status_details.error if response.status_details else None
            if error is None:
                raise ResponseFailed("The response failed")
            raise ResponseFailed(error.message, code=error.code, kind=error.type)


def last_of(rounds: Rounds) -> Finished:
    """The last of the responses of a turn, `rounds`. Raises `ResponseFailed` if there is none, because the
    chat's next turn began before."""
    if not rounds:
        raise ResponseFailed("The chat's next turn began before this one was read to its end")
    return rounds[-1]


def _items(create: ResponseCreate | ResponseSteer, first: Sequence[ItemCreate]) -> list[str]:
    """Ids of the items that are added with a response, the last one first: in this order they are taken
    back."""
    items = [event.item for event in first] + (create.input if isinstance(create, ResponseSteer) else [])
    return [item.id for item in reversed(items) if item.id]


def _is_output(event: OutputFrame) -> bool:
    """Whether the event ends the time to first token: it holds text or a part of a call. (With `events` "brief"
    a call comes as one complete item.)"""
    if isinstance(event, OutputItemAdded | OutputItemDone):
        return isinstance(event.item, FunctionCallItem)
    return isinstance(event, TextDelta | ArgumentsDelta)
