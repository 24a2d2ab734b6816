"""The calls of one run: tools side by side as tasks, what they tell, and what is owed to the model.

A call that has begun is owed an answer until that is taken out here; who leaves before tells the model so.
Knows nothing of responses, nor of how answers travel.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field

from anyio import CancelScope

from ..detached import Detached
from ..frames.items import FunctionCallItem
from ..tools.context import ToolContext
from ..tools.outputs import broken_off, failure
from ..tools.tool import Tool, no_such_tool
from .events import CallFinished, CallOutcome, CallPiece, CallProgress, CallStarted, RunEvent


@dataclass(slots=True, eq=False)
class Call:
    """One call; ``output`` is None until it is ``over``.

    ``streams``: its output comes in pieces, which are in the ``context`` it runs with. ``news`` is set when
    there is more of it, ``sent`` when the server has been given all of it.
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
        """By which the model knows it."""
        return self.item.call_id or ""


class Calls:
    """All calls of a step. ``events``: what they told, for who reads; ``news`` is set when there is more.
    ``stirred`` is set when one has begun to answer, or has answered."""

    def __init__(self, tools: Mapping[str, Tool], apart: Detached) -> None:
        self.events: deque[RunEvent] = deque()
        self.news = asyncio.Event()
        self.stirred = asyncio.Event()
        self._tools = tools
        self._apart = apart
        self._calls: dict[str, Call] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __contains__(self, call_id: str) -> bool:
        return call_id in self._calls

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def running(self) -> bool:
        """Whether a tool has not answered."""
        return any(call.output is None for call in self._calls.values())

    def unsent(self) -> list[Call]:
        """Those whose answers the server has not been given, in the order in which they were made."""
        return [call for call in self._calls.values() if not call.sent]

    def expected(self) -> float | None:
        """Seconds until the last of those that run is expected back; None where that is not known of one."""
        now = time.perf_counter()
        running = [call for call in self._calls.values() if call.output is None]
        left = [call.expected - (now - call.began) for call in running if call.expected is not None]
        return max(0.0, *left, 0.0) if running and len(left) == len(running) else None

    def start(self, item: FunctionCallItem) -> None:
        """Run the tool that is called. A call that cannot be run is answered with what is wrong."""
        tool = self._tools.get(item.name)
        if tool is None:
            self.answer(item, no_such_tool(item.name, self._tools), "unknown_tool")
            return
        call = Call(item, time.perf_counter(), tool.expects(), tool.streams)
        self._calls[call.id] = call
        self._tell(CallStarted(call.id, item.name, item.arguments, call.expected))
        self.beside(self._run(tool, call))

    def answer(self, item: FunctionCallItem, cause: str, outcome: CallOutcome) -> None:
        """Answer a call that is not run."""
        call = Call(item, time.perf_counter(), None)
        self._calls[call.id] = call
        self._finish(call, failure(cause), outcome, 0.0)

    def cancel(self) -> None:
        """Let no tool go on; those that ran are answered with that."""
        for task in list(self._tasks):
            task.cancel()
        for call in self._calls.values():
            if call.output is None:
                self._cut(call)

    async def over(self) -> None:
        """Until each has ended, or was left behind; after `cancel`."""
        if self._tasks:
            with CancelScope(shield=True):
                await asyncio.wait(self._tasks)

    def beside(self, work: Coroutine[None, None, None]) -> None:
        """Do something of no consequence beside them; it ends with them."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def take(self) -> list[Call]:
        """The calls, in the order in which they were made; they are owed no more."""
        calls, self._calls = self._calls, {}
        return list(calls.values())

    async def _run(self, tool: Tool, call: Call) -> None:
        name = call.item.name

        def report(note: str, fraction: float | None) -> None:
            self._tell(CallProgress(call.id, name, note, fraction))

        def wrote(text: str) -> None:
            if call.output is None:
                call.streams = True
                call.news.set()
                self.stirred.set()
                self._tell(CallPiece(call.id, name, text))

        call.context = ToolContext(call.id, report, wrote)
        try:
            outcome = await tool.call(call.item.arguments, call.context, self._apart)
        except BaseException:  # whoever ended it: nobody waits for its answer for ever
            if call.output is None:
                self._cut(call)
            raise
        if call.output is None:
            self._finish(call, outcome.output, outcome.kind, outcome.seconds)

    def _cut(self, call: Call) -> None:
        call.context.cancelled = True
        output = broken_off(call.context.written, failure("The call was cancelled"))
        self._finish(call, output, "cancelled", time.perf_counter() - call.began)

    def _finish(self, call: Call, output: str, outcome: CallOutcome, seconds: float) -> None:
        call.output = output
        call.news.set()
        call.over.set()
        self.stirred.set()
        self._tell(CallFinished(call.id, call.item.name, output, outcome, seconds, call.expected))

    def _tell(self, event: RunEvent) -> None:
        self.events.append(event)
        self.news.set()
