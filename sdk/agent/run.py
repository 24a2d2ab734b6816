"""A run: the model's calls are run and their outputs go back, until it is done or a limit is reached.

    response streams ─call is complete─▶ its tool starts ─all tools are done─▶ next response, outputs first

Outputs go back in the order of the calls, as templates without call ids need it; those of tools that stream go
while the tools run. Meanwhile the server has a hint of when the session is needed again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import anyio
import msgspec

from ..connection.connection import Connection
from ..connection.responses import Finished, Rounds
from ..errors import ChatBusy, LimitInvalid, SDKError
from ..frames.client import ItemCreate, ResponseCancel, ResponseCreate, SessionLease
from ..frames.items import FunctionCallItem
from ..frames.response import ResponseParams
from ..frames.server import OutputItemDone, ServerEvent, SessionLeased, TextDelta
from ..params import in_brief
from ..reading import Reading, Unread
from ..reply import Reply
from ..tools.running import Detached
from ..tools.tool import Tool
from .calls import CallOutputs, RunningCalls
from .events import RunDone, RunEvent, StepFinished, StopReason, TextPiece, WaitFinished, usage_of
from .tracing import Tracers

HINT_SECONDS = 1.0
"""The default of `hint_seconds`: the server is told how long tools are expected to take if that is at least so
many seconds."""


@dataclass(frozen=True, slots=True)
class RunLimits:
    """Limits of a run; None: no limit. ``steps``: responses; ``calls``: tools run; ``seconds``: from the
    beginning; ``tokens``: sampled ones.

    A run that reaches a limit ends in order: calls that were not run get an output that says so. Raises
    `LimitInvalid` below 1 step, 0 calls, 0 seconds or 1 token.
    """

    steps: int | None = 25
    calls: int | None = 100
    seconds: float | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        least = {"steps": 1, "calls": 0, "seconds": 0.0, "tokens": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and not value >= low:
                raise LimitInvalid(f"`{name}` must be at least {low:g}, not {value!r}")


class RunBudget:
    """What one run has used of its limits: ``steps``, ``calls``, ``tokens``, and the seconds since `begin`."""

    def __init__(self, limits: RunLimits) -> None:
        self._limits = limits
        self.steps = self.calls = self.tokens = 0
        self.begin()

    def begin(self) -> None:
        """Count the seconds from now on."""
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken so far."""
        return time.monotonic() - self._began

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the limit, at least 0; None: there is no limit."""
        return None if self._limits.seconds is None else max(0.0, self._limits.seconds - self.seconds)

    @property
    def tokens_left(self) -> int | None:
        """Tokens until the limit; None: there is no limit."""
        return None if self._limits.tokens is None else self._limits.tokens - self.tokens

    def take_call(self) -> bool:
        """Count one more call. Returns False, and counts none, if the limit is reached."""
        if self._limits.calls is not None and self.calls >= self._limits.calls:
            return False
        self.calls += 1
        return True

    def reached(self) -> StopReason | None:
        """Which limit allows no further response: "seconds", "steps" or "tokens"; None: one more is allowed."""
        limits = self._limits
        if limits.seconds is not None and self.seconds >= limits.seconds:
            return "seconds"
        if limits.steps is not None and self.steps >= limits.steps:
            return "steps"
        if limits.tokens is not None and self.tokens >= limits.tokens:
            return "tokens"
        return None


class Run(Reading[RunEvent, RunDone]):
    """One run, made by `Chat.run`: the model works with tools until it is done or a limit is reached. Iterates
    over `RunEvent`s, of which the last is `RunDone`; `await` reads to the end and gives that.

    Raises what `Reply` raises. Errors of tools are not raised: the model reads them. If the reading task is
    cancelled, the tools are cancelled at once; if the loop is left by `break`, when the chat's next turn
    begins. `calls`, `outputs`: the tool calls of the present step, and what sends their outputs; `rounds`: the
    responses that have ended.
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
        detached: Detached,
        unread: Unread | None = None,
    ) -> None:
        super().__init__(Rounds(), unread)
        self._connection = connection
        self._create = in_brief(create)
        self._tools = tools
        self._budget = RunBudget(limits)
        self._claim = claim
        self._tracers = tracers
        self._hint_seconds = hint_seconds
        self._events: deque[RunEvent] = deque()
        self._texts: list[str] = []
        self._callers: list[FunctionCallItem] = []  # calls that the caller answers
        self._broken: list[FunctionCallItem] = []  # calls with arguments that are no JSON
        self._stop: StopReason | None = None
        self._waiting: tuple[float, float | None] | None = None  # since when, and the hint that was sent
        self._done: RunDone | None = None
        self.calls = RunningCalls(tools, detached)
        self.outputs = CallOutputs(connection, self.calls)
        self.reply = Reply(connection, self._next_create(), first, rounds=self.rounds)
        """The response of the run that was asked for last, or that is asked for first."""

    # --- as the chat sees a turn ---

    def stop(self) -> None:
        """Begin no further response, and cancel all tools. What comes until `RunDone` can still be read."""
        self._stop = self._stop or "cancelled"
        self.calls.cancel()

    def close(self) -> None:
        """End the run here, without a `RunDone`, and cancel all tools. Nothing is sent to the server."""
        self._over = True
        self.calls.cancel()

    # --- reading ---

    async def _next(self) -> RunEvent:
        try:
            if not self._begun:
                self._begun = True  # from here on no other turn may begin
                await self._claim(self)
                self._budget.begin()
            while not self._events and not self._over:
                await self._advance()
        except Exception:
            self.close()
            self.calls.take()  # a response that failed was taken back, its calls with it
            raise
        except anyio.get_cancelled_exc_class():
            self.close()
            raise
        if not self._events:
            raise StopAsyncIteration
        return self._events.popleft()

    async def done(self) -> RunDone:
        """Read to the end and return the `RunDone`. Raises `ChatBusy` if the run was left before its end."""
        return await self

    def _end(self) -> RunDone:
        if self._done is None:
            raise ChatBusy("The run was left before its end")
        return self._done

    def __repr__(self) -> str:
        return f"<Run {self._state}, {len(self.rounds)} responses ended>"

    async def text(self) -> str:
        """Read to the end; returns the text of all responses, joined."""
        return (await self).text

    # --- inside ---

    def _next_create(self) -> ResponseCreate:
        """The event that asks for the next response, within the tokens that are left; a lower
        `max_output_tokens` in it stays. Counts a step."""
        self._budget.steps += 1
        left = self._budget.tokens_left
        if left is None:
            return self._create
        params = self._create.response or ResponseParams()
        given = params.max_output_tokens
        most = min(given, left) if isinstance(given, int) else left
        return ResponseCreate(response=msgspec.structs.replace(params, max_output_tokens=most))

    async def _advance(self) -> None:
        if self._waiting is not None:
            await self._wait()
        else:
            await self._read()
        self._pass_on()
        if self._waiting is not None and not self.calls.running:
            await self._waited(*self._waiting)

    async def _read(self) -> None:
        """Read one event of the response, or its end, and do what follows. At the time limit, cancel the
        response and the tools."""
        event: ServerEvent | None = None
        left = None if self._stop else self._budget.seconds_left
        with anyio.move_on_after(left) as deadline:
            event = await anext(self.reply, None)
        if deadline.cancelled_caught:
            self._stop = "seconds"
            self.calls.cancel()
            if self._connection.responses.busy:
                await self._connection.send(ResponseCancel())
            else:  # nothing was asked for
                await self._finish("seconds")
        elif isinstance(event, TextDelta):
            self._texts.append(event.delta)
            self._put(TextPiece(event.delta))
        elif isinstance(event, OutputItemDone):
            if isinstance(event.item, FunctionCallItem):
                self._called(event.item)
        elif event is None:
            await self._replied()

    def _called(self, item: FunctionCallItem) -> None:
        """Called when a tool call of the response is complete: starts its tool, while the response goes on. If
        it may not run, it gets an error as its output. One that the caller answers, or with arguments that are
        no JSON, is kept for later."""
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
        elif not self._budget.take_call():
            self.calls.answer(item, "The call was not run: no more calls are allowed", "not_run")
            self._stop = self._stop or "calls"
        else:
            self.calls.start(item)

    async def _replied(self) -> None:
        """Called when the response is over: runs the calls that are left, tells the server how long the tools
        take, and begins to wait for them."""
        finished = self.reply.finished
        if finished is None:  # the chat's next turn has begun
            self._stop = self._stop or "cancelled"
            await self._finish(self._stop)
            return
        ended = _ended(finished)
        if ended is not None:
            self._stop = self._stop or ended
            self.calls.cancel()
        known = {item.call_id for item in (*self._callers, *self._broken)}
        for item in finished.response.output:
            if isinstance(item, FunctionCallItem) and item.call_id not in known:
                self._called(item)
        for item in self._broken:
            self.calls.answer(item, "The arguments of the call are no JSON object", "invalid_arguments")
        self._broken.clear()
        self._pass_on()
        self._budget.tokens += 0 if finished.usage is None else finished.usage.output_tokens
        self._put(StepFinished(len(self.rounds), finished))
        self.outputs.begin()
        expected = self._hint() if self.calls.running else None
        self._waiting = (time.perf_counter(), expected)

    def _pass_on(self) -> None:
        """Give the events of the calls to the reader and to the tracers."""
        while self.calls.events:
            self._put(self.calls.events.popleft())

    def _hint(self) -> float | None:
        """Tell the server in how many seconds the session is needed again, and return that number. None if it
        is not told, because the time is not known or shorter than `hint_seconds`."""
        expected, least = self.calls.expected(), self._hint_seconds
        if expected is None or least is None or expected < least:
            return None
        self.calls.beside(self._send_hint(expected))
        return expected

    async def _send_hint(self, expected: float) -> None:
        """Send `returns_in` with a lease of 0 seconds, which is none: real leases for such waits would use up
        the budget of sessions that need one. Errors are dropped."""
        with suppress(SDKError):  # errors of the connection reach the reader
            await self._connection.request(SessionLease(ttl=0.0, returns_in=expected), SessionLeased)

    async def _wait(self) -> None:
        """Wait for the next event of a call. At the time limit, cancel the tools."""
        with anyio.move_on_after(self._budget.seconds_left) as deadline:
            while self.calls.running and not self.calls.events:
                self.calls.news.clear()
                await self.calls.news.wait()
        if deadline.cancelled_caught:
            self._stop = self._stop or "seconds"
            self.calls.cancel()

    async def _waited(self, since: float, expected: float | None) -> None:
        """Called when all tools of the step are done: asks for the next response, or ends the run. ``since``:
        when the wait began, by `time.perf_counter`; ``expected``: the seconds that the server was told, or
        None."""
        calls, outputs, sent = await self.outputs.take()
        self._waiting = None
        if calls:
            self._put(WaitFinished(len(self.rounds), expected, time.perf_counter() - since))
        stop = self._stop or ("caller" if self._callers else None) or (None if calls else "completed")
        stop = stop or self._budget.reached()
        if stop is None:
            self.reply = Reply(self._connection, self._next_create(), outputs, rounds=self.rounds, sent=sent)
            return
        for output in outputs:
            await self._connection.send(output)
        await self._finish(stop)

    async def _finish(self, stop: StopReason) -> None:
        self._over = True
        rounds = tuple(self.rounds)
        self._done = RunDone(
            "".join(self._texts), stop, usage_of(rounds), rounds, self._budget.calls, self._budget.seconds
        )
        self._put(self._done)
        await self._tracers.aclose()

    def _put(self, event: RunEvent) -> None:
        self._events.append(event)
        self._tracers.trace(event)


def _ended(finished: Finished) -> StopReason | None:
    """Why the run ends with this response, even if it called tools; None: it may go on."""
    response = finished.response
    if response.status == "completed":
        return None
    if response.status == "cancelled":
        return "cancelled"
    reason = response.status_details.reason if response.status_details else None
    return None if finished.calls and reason == "max_output_tokens" else "incomplete"
