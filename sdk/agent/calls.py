"""The tool calls of one run: tools run as concurrent tasks, outputs sent in the order of the calls.

    call 1 has ended ─item─▶ call 2 streams ─append, append, …, commit─▶ call 3 ─with the next response

A call that streams gets the session's one input buffer as soon as the response is over and all calls before it
have ended; what it wrote until then goes first. So the prompt is the same as if all had ended at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import anyio
from anyio import CancelScope

from ..connection.connection import Connection
from ..errors import ConnectionLost, SDKError
from ..frames.client import ClientEvent, ItemCreate, TextAppend, TextClear, TextCommit, TextReplace
from ..frames.items import FunctionCallItem
from ..params import SentOutputs, output_of
from ..tools.context import ToolContext, broken_off, failure
from ..tools.running import Detached
from ..tools.tool import Tool, no_such_tool
from .events import CallFinished, CallOutcome, CallPiece, CallProgress, CallStarted, RunEvent

FRAME_SECONDS, FRAME_SHARE = 0.02, 1 / 16
"""Pieces of an output are collected for `FRAME_SECONDS`, or for `FRAME_SHARE` of the time since its first if
that is longer, and go in one frame. So little is left to send at the end, and a long output takes few frames,
each of which the server renders."""
LAST_SECONDS = 1.0
"""How long `CallOutputs.aclose` tries to take back an output that is partly sent."""


@dataclass(slots=True, eq=False)
class RunningCall:
    """One tool call of a step (a response of the model in a run). ``item``: the model's call. ``output``: the
    text for the model; None until the call has ended, which sets ``over``. ``began``: when, by
    `time.perf_counter`. ``expected``: seconds that it is expected to take; None: not known.

    ``streams``: the output comes in pieces, which the ``context`` collects. ``news`` is set when there is more
    of it. ``sent``: the whole output has been sent.
    """

    item: FunctionCallItem
    began: float
    expected: float | None
    streams: bool = False
    output: str | None = None
    context: ToolContext = field(default_factory=ToolContext)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    sent: bool = False

    @property
    def id(self) -> str:
        return self.item.call_id or ""


class RunningCalls:
    """The tool calls of one step of a run, in the order in which the model made them; each tool runs in a task.

    ``events``: those of the calls that the reader of the run has not got yet; ``news`` is set when there are
    more. ``stirred`` is set when a call has written something or has ended. ``tools``: those that can be run,
    by name. ``detached`` takes tools that do not end when cancelled.
    """

    def __init__(self, tools: Mapping[str, Tool], detached: Detached) -> None:
        self.events: deque[RunEvent] = deque()
        self.news = asyncio.Event()
        self.stirred = asyncio.Event()
        self._tools = tools
        self._detached = detached
        self._calls: dict[str, RunningCall] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __contains__(self, call_id: str) -> bool:
        return call_id in self._calls

    @property
    def running(self) -> bool:
        """Whether any call has not ended."""
        return any(call.output is None for call in self._calls.values())

    def unsent(self) -> list[RunningCall]:
        """The calls, in order, of which the whole output has not been sent; some may still run."""
        return [call for call in self._calls.values() if not call.sent]

    def expected(self) -> float | None:
        """Seconds from now until the last of the running calls is expected to end, 0 if it should have ended
        already. None if no call runs, or if the time of one of them is not known."""
        now = time.perf_counter()
        running = [call for call in self._calls.values() if call.output is None]
        left = [call.expected - (now - call.began) for call in running if call.expected is not None]
        return max(0.0, *left, 0.0) if running and len(left) == len(running) else None

    def start(self, item: FunctionCallItem) -> None:
        """Start the tool that `item` calls, and return at once. A call of an unknown tool gets an error as its
        output."""
        tool = self._tools.get(item.name)
        if tool is None:
            self.answer(item, no_such_tool(item.name, self._tools), "unknown_tool")
            return
        call = RunningCall(item, time.perf_counter(), tool.expects(), tool.streams)
        self._calls[call.id] = call
        self._put(CallStarted(call.id, item.name, item.arguments, call.expected))
        self.beside(self._run(tool, call))

    def answer(self, item: FunctionCallItem, cause: str, outcome: CallOutcome) -> None:
        """End a call that is not run: its output is the error `cause`, its outcome `outcome`."""
        call = RunningCall(item, time.perf_counter(), None)
        self._calls[call.id] = call
        self._finish(call, failure(cause), outcome, 0.0)

    def cancel(self) -> None:
        """Cancel all tools, without waiting. A running call ends now, with an output that says so."""
        for task in list(self._tasks):
            task.cancel()
        for call in self._calls.values():
            if call.output is None:
                self._cut(call)

    async def over(self) -> None:
        """Wait until all tasks have ended; call `cancel` first. A tool that ignores its cancellation is left to
        ``detached``, so this does not take long."""
        if self._tasks:
            with CancelScope(shield=True):
                await asyncio.wait(self._tasks)

    def beside(self, work: Coroutine[None, None, None]) -> None:
        """Run a coroutine in a task beside the calls; `cancel` cancels it too."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def take(self) -> list[RunningCall]:
        """Remove and return all calls, in order. Sending their outputs is the caller's task from now on."""
        calls, self._calls = self._calls, {}
        return list(calls.values())

    async def _run(self, tool: Tool, call: RunningCall) -> None:
        name = call.item.name

        def report(note: str, fraction: float | None) -> None:
            self._put(CallProgress(call.id, name, note, fraction))

        def wrote(text: str) -> None:
            if call.output is None:
                call.streams = True
                call.news.set()
                self.stirred.set()
                self._put(CallPiece(call.id, name, text))

        call.context = ToolContext(call.id, report, wrote)
        try:
            outcome = await tool.call(call.item.arguments, call.context, self._detached)
        except BaseException:  # also a task that is cancelled ends its call
            if call.output is None:
                self._cut(call)
            raise
        if call.output is None:
            self._finish(call, outcome.output, outcome.kind, outcome.seconds, outcome.error)

    def _cut(self, call: RunningCall) -> None:
        call.context.cancelled = True
        output = broken_off(call.context.written, failure("The call was cancelled"))
        self._finish(call, output, "cancelled", time.perf_counter() - call.began)

    def _finish(
        self,
        call: RunningCall,
        output: str,
        outcome: CallOutcome,
        seconds: float,
        error: BaseException | None = None,
    ) -> None:
        call.output = output
        call.news.set()
        call.over.set()
        self.stirred.set()
        self._put(CallFinished(call.id, call.item.name, output, outcome, seconds, call.expected, error))

    def _put(self, event: RunEvent) -> None:
        self.events.append(event)
        self.news.set()


class CallOutputs:
    """Sends the outputs of a run's ``calls`` to the server, in the order of the calls. While the tools run, it
    sends outputs that stream and those before them; the others go with the request for the next response."""

    def __init__(self, connection: Connection, calls: RunningCalls) -> None:
        self._connection = connection
        self._calls = calls
        self._task: asyncio.Task[None] | None = None
        self._sent = SentOutputs()
        self._filling = False  # whether the buffer holds an output that is not committed
        self._finishing = anyio.Lock()
        self._displaced = False  # a message has the buffer: nothing of this step streams any more

    def begin(self) -> None:
        """Start to send outputs that stream. Call it when the response is over; it does nothing if no call
        runs."""
        if self._task is None and self._calls.running:
            self._task = asyncio.ensure_future(self._send_streams())
            self._task.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def take(self) -> tuple[int, list[ItemCreate], SentOutputs]:
        """Wait until no call runs, and end the step. Returns how many calls it had, the outputs that are still
        to be sent, and those that were sent. Raises what sending them raised, and `ConnectionLost` if the chat
        was closed meanwhile."""
        if self._task is not None:
            await asyncio.wait([self._task])
            task, self._task = self._task, None
            if task.cancelled():  # by `aclose`
                raise self._connection.located(ConnectionLost("The chat was closed while its tools ran"))
            task.result()
        calls, sent, self._sent = self._calls.take(), self._sent, SentOutputs()
        self._displaced = False
        return len(calls), [_item_of(call) for call in calls if not call.sent], sent

    async def finish(self) -> None:
        """Cancel all tools and send the outputs that are left, so that each call in the conversation has
        one."""
        self._calls.cancel()
        _, outputs, _ = await self.take()
        for output in outputs:
            await self._connection.send(output)

    async def aclose(self) -> None:
        """Cancel all tools, and clear an output that is partly in the input buffer at the server."""
        self._calls.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            if self._filling:
                with suppress(SDKError), anyio.move_on_after(LAST_SECONDS):
                    await self._connection.send(TextClear())
        await self._calls.over()

    async def _send_streams(self) -> None:
        """Send outputs, in order, until all calls have ended; those that are left go with the next response."""
        await asyncio.sleep(0)  # calls made just now begin, and may write something
        while self._calls.running:
            self._calls.stirred.clear()
            ready = self._ready()
            if ready is None:
                await self._calls.stirred.wait()
                continue
            if not self._connection.buffer.lend(self, self._give_way):
                self._displaced = True
                continue
            *before, streaming = ready
            for call in before:
                await self._send(_item_of(call))
                call.sent = True
            await self._connection.clear_leftover()
            if not self._displaced:
                await self._stream(streaming)
            self._connection.buffer.release(self)

    def _ready(self) -> list[RunningCall] | None:
        """The calls to send now, in order: first the ended ones that are not sent, last one that still runs and
        streams. None if the first call that still runs does not stream, or none runs."""
        unsent = self._calls.unsent()
        for at, call in enumerate(unsent):
            if call.output is None:
                may_stream = call.streams and not self._displaced
                return unsent[: at + 1] if may_stream else None
        return None

    async def _give_way(self) -> None:
        """Called when a `TextInput` takes the session's input buffer: clear the buffer at the server. An output
        that was partly in it is sent as one item when its tool has ended, and no other output of this step
        streams."""
        self._displaced = True
        async with self._finishing:
            if self._filling:
                self._filling = False
                await self._send(TextClear())

    async def _stream(self, call: RunningCall) -> None:
        """Append the output of a call to the input buffer as it comes, and commit it when the call ends."""
        self._filling = True
        pieces, texts, began = 0, list[str](), time.perf_counter()
        while call.output is None and self._filling:
            call.news.clear()
            text, pieces = call.context.written_since(pieces)
            if text or not texts:
                await self._send(TextAppend(text=text, call_id=call.id))
                texts.append(text)
            with anyio.move_on_after(max(FRAME_SECONDS, FRAME_SHARE * (time.perf_counter() - began))):
                await call.over.wait()
            await call.news.wait()
        async with self._finishing:
            if self._filling:
                await self._finish(call, "".join(texts))

    async def _finish(self, call: RunningCall, sent: str) -> None:
        """Make the input buffer, which holds the text `sent`, the whole output of the call, and commit it."""
        self._filling, call.sent = False, True
        output = call.output or ""
        if not output.startswith(sent):  # it was too long: an error replaces it
            await self._send(TextReplace(start=0, text=output))
        elif rest := output[len(sent) :]:
            await self._send(TextAppend(text=rest, call_id=call.id))
        self._sent.commits[call.id] = await self._send(TextCommit(call_id=call.id))

    async def _send(self, event: ClientEvent) -> str:
        event_id = await self._connection.send(event)
        self._sent.events.append(event_id)
        if isinstance(event, ItemCreate) and event.item.id:
            self._sent.items.append(event.item.id)
        return event_id


def _item_of(call: RunningCall) -> ItemCreate:
    return output_of(call.item, call.output or "")
