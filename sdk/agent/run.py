"""A run: the model speaks, its calls are run, what they answer goes back, until it is done or a limit comes.

    reply streams ─call closes─▶ its tool starts ─reply over─▶ all have answered ─▶ next reply, outputs first

Outputs go back in the order of the calls, as templates without call ids need it; those of tools that stream go
while they run. Meanwhile the server is told when the session is expected back, and nothing of it runs there but
what computes such pieces. Knows nothing of other turns.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

import anyio
import msgspec

from .. import keeping
from ..connection import Connection
from ..detached import Detached
from ..errors import ChatBusy, SDKError
from ..frames.client import ItemCreate, ResponseCancel, ResponseCreate
from ..frames.items import FunctionCallItem
from ..frames.response import ResponseParams
from ..frames.server import OutputItemDone, ServerEvent, TextDelta
from ..params import in_brief
from ..reply import Finished, Reply, Rounds
from ..tools.tool import Tool
from .answers import Answered, Answers
from .calls import Calls
from .events import RunDone, RunEvent, StepFinished, StopReason, TextPiece, WaitFinished, usage_of
from .limits import Budget, RunLimits
from .tracing import Tracers

HINT_SECONDS = 1.0
"""Shorter waits are not worth telling the server."""


class Run:
    """Iterates over `RunEvent`s; the last is `RunDone`. Made by `Chat.run`.

    Raises what `Reply` raises; what goes wrong with tools does not: the model reads it. Leaving the loop, or
    cancelling it, cancels its tools when the chat's next turn begins at the latest.
    """

    def __init__(
        self,
        connection: Connection,
        create: ResponseCreate,
        first: Sequence[ItemCreate],
        tools: Mapping[str, Tool],
        limits: RunLimits,
        claim: Callable[[Run], Awaitable[None]],
        tracers: Tracers,
        hint_seconds: float | None,
        apart: Detached,
    ) -> None:
        self._connection = connection
        self._create = in_brief(create)
        self._tools = tools
        self._budget = Budget(limits)
        self._limits = limits
        self._claim = claim
        self._tracers = tracers
        self._hint_seconds = hint_seconds
        self._events: deque[RunEvent] = deque()
        self._said: list[str] = []
        self._callers: list[FunctionCallItem] = []  # calls that the caller answers
        self._broken: list[FunctionCallItem] = []  # calls that are no JSON
        self._stop: StopReason | None = None
        self._waiting: tuple[float, float | None] | None = None  # since when, and what the server was told
        self._begun = self._over = self._given_up = False
        self._done: RunDone | None = None
        self.calls = Calls(tools, apart)
        self.answers = Answers(connection, self.calls)
        self.rounds = Rounds()
        self._reply = Reply(connection, self._create, first, rounds=self.rounds)

    # --- as the chat sees a turn ---

    @property
    def running(self) -> bool:
        """Whether it has begun and is not over."""
        return self._begun and not self._over

    @property
    def given_up(self) -> bool:
        """Whether reading it was cancelled."""
        return self._given_up

    @property
    def reply(self) -> Reply:
        """Its latest response."""
        return self._reply

    def stop(self) -> None:
        """Begin no further response, let no tool go on."""
        self._stop = self._stop or "cancelled"
        self.calls.cancel()

    def close(self) -> None:
        """Nothing more is read of it."""
        self._over = True
        self.calls.cancel()

    # --- reading ---

    def __aiter__(self) -> AsyncIterator[RunEvent]:
        return self

    async def __anext__(self) -> RunEvent:
        try:
            if not self._begun:
                await self._begin()
            while not self._events and not self._over:
                await self._advance()
        except Exception:
            self.close()
            self.calls.take()  # a response that failed was taken back, its calls with it
            raise
        except anyio.get_cancelled_exc_class():
            self._given_up = True
            self.close()
            raise
        if not self._events:
            raise StopAsyncIteration
        return self._events.popleft()

    async def done(self) -> RunDone:
        """Read to the end, if that was not done before; how it ended. Raises `ChatBusy`: it was left before."""
        async for _ in self:
            pass
        if self._done is None:
            raise ChatBusy("The run was left before its end")
        return self._done

    async def text(self) -> str:
        """Read to the end; all that was said."""
        return (await self.done()).text

    # --- inside ---

    async def _begin(self) -> None:
        self._begun = True  # from here on no other turn may begin
        await self._claim(self)
        self._budget = Budget(self._limits)
        self._reply.asks(self._next())

    def _next(self) -> ResponseCreate:
        """What asks for the next response."""
        self._budget.steps += 1
        return _within(self._create, self._budget.tokens_left)

    def _ask(self, answered: Answered) -> None:
        """The response to what the tools have answered."""
        outputs, sent = answered.outputs, answered.sent
        self._reply = Reply(self._connection, self._next(), outputs, rounds=self.rounds, sent=sent)

    async def _advance(self) -> None:
        if self._waiting is not None:
            await self._wait()
        else:
            await self._read()
        self._hear()
        if self._waiting is not None and not self.calls.running:
            await self._waited(*self._waiting)

    async def _read(self) -> None:
        """One event of the response, or its end."""
        event: ServerEvent | None = None
        left = None if self._stop else self._budget.seconds_left
        with anyio.move_on_after(left) as deadline:
            event = await anext(self._reply, None)
        if deadline.cancelled_caught:
            self._stop = "seconds"
            self.calls.cancel()
            if self._connection.busy:
                await self._connection.send(ResponseCancel())
            else:  # nothing was asked for
                await self._end("seconds")
        elif isinstance(event, TextDelta):
            self._said.append(event.delta)
            self._tell(TextPiece(event.delta))
        elif isinstance(event, OutputItemDone):
            if isinstance(event.item, FunctionCallItem):
                self._called(event.item)
        elif event is None:
            await self._replied()

    def _called(self, item: FunctionCallItem) -> None:
        """A call is whole: run it at once, whatever the model says after it."""
        tool = self._tools.get(item.name)
        if (item.call_id or "") in self.calls:
            return
        if item.status == "incomplete":
            self._broken.append(item)
        elif tool is not None and tool.invoke is None:
            self._callers.append(item)
        elif self._stop is not None:
            self.calls.answer(item, "The call was not run: the work has ended", "not_run")
        elif self._budget.reached() == "steps":
            self.calls.answer(item, "The call was not run: this was the last step", "not_run")
        elif not self._budget.takes_call():
            self.calls.answer(item, "The call was not run: no more calls are allowed", "not_run")
            self._stop = self._stop or "calls"
        else:
            self.calls.start(item)

    async def _replied(self) -> None:
        """The response is over."""
        finished = self._reply.finished
        if finished is None:  # the chat's next turn has begun
            self._stop = self._stop or "cancelled"
            await self._end(self._stop)
            return
        ended = _ended(finished)
        if ended is not None:
            self._stop = self._stop or ended
            self.calls.cancel()
        told = {item.call_id for item in (*self._callers, *self._broken)}
        for item in finished.response.output:
            if isinstance(item, FunctionCallItem) and item.call_id not in told:
                self._called(item)
        for item in self._broken:
            self.calls.answer(item, "The arguments of the call are no JSON object", "invalid_arguments")
        self._broken.clear()
        self._hear()
        self._budget.tokens += 0 if finished.usage is None else finished.usage.output_tokens
        self._tell(StepFinished(len(self.rounds), finished))
        self.answers.begin()
        expected = self._hint() if self.calls.running else None
        self._waiting = (time.perf_counter(), expected)

    def _hear(self) -> None:
        """What the tools have told."""
        while self.calls.events:
            self._tell(self.calls.events.popleft())

    def _hint(self) -> float | None:
        """Tell the server when the session is expected back; what it was told."""
        expected, least = self.calls.expected(), self._hint_seconds
        if expected is None or least is None or expected < least:
            return None
        self.calls.beside(self._foretell(expected))
        return expected

    async def _foretell(self, expected: float) -> None:
        """No promise is asked for: those who wait longest would use up the budget of those who need it."""
        with suppress(SDKError):  # a hint; what is wrong with the connection its reader is told
            await keeping.lease(self._connection, None, 0.0, expected)

    async def _wait(self) -> None:
        """For the next that a tool tells."""
        with anyio.move_on_after(self._budget.seconds_left) as deadline:
            while self.calls.running and not self.calls.events:
                self.calls.news.clear()
                await self.calls.news.wait()
        if deadline.cancelled_caught:
            self._stop = self._stop or "seconds"
            self.calls.cancel()

    async def _waited(self, since: float, expected: float | None) -> None:
        """All tools of the step have answered: go on, or end."""
        answered = await self.answers.take()
        self._waiting = None
        if answered.calls:
            self._tell(WaitFinished(len(self.rounds), expected, time.perf_counter() - since))
        stop = (
            self._stop or ("caller" if self._callers else None) or (None if answered.calls else "completed")
        )
        stop = stop or self._budget.reached()
        if stop is None:
            self._ask(answered)
            return
        for output in answered.outputs:
            await self._connection.send(output)
        await self._end(stop)

    async def _end(self, stop: StopReason) -> None:
        self._over = True
        rounds = tuple(self.rounds)
        self._done = RunDone(
            "".join(self._said), stop, usage_of(rounds), rounds, self._budget.calls, self._budget.seconds
        )
        self._tell(self._done)
        await self._tracers.aclose()

    def _tell(self, event: RunEvent) -> None:
        self._events.append(event)
        self._tracers.tell(event)


def _ended(finished: Finished) -> StopReason | None:
    """Why no further response may follow, whatever was called."""
    response = finished.response
    if response.status == "completed":
        return None
    if response.status == "cancelled":
        return "cancelled"
    reason = response.status_details.reason if response.status_details else None
    return None if finished.calls and reason == "max_output_tokens" else "incomplete"


def _within(create: ResponseCreate, tokens: int | None) -> ResponseCreate:
    """The response with at most so many tokens."""
    if tokens is None:
        return create
    params = create.response or ResponseParams()
    asked = params.max_output_tokens
    most = min(asked, tokens) if isinstance(asked, int) else tokens
    return ResponseCreate(response=msgspec.structs.replace(params, max_output_tokens=most))
