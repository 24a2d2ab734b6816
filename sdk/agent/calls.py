"""The calls of one run: tools side by side as tasks, what they tell, and what is owed to the model.

A call that has begun is owed an answer until that is taken out here; who leaves before tells the model so.
Knows nothing of responses.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass

from ..frames.items import FunctionCallItem
from ..toolcontext import ToolContext
from ..tools import Tool, failure, no_such_tool
from .events import CallFinished, CallOutcome, CallProgress, CallStarted, RunEvent


@dataclass(slots=True)
class _Call:
    """One call; ``output`` is None until it is over."""

    item: FunctionCallItem
    began: float
    expected: float | None
    output: str | None = None


class Calls:
    """All calls of a step. ``events``: what they told, for who reads; ``news`` is set when there is more."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self.events: deque[RunEvent] = deque()
        self.news = asyncio.Event()
        self._tools = tools
        self._calls: dict[str, _Call] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __contains__(self, call_id: str) -> bool:
        return call_id in self._calls

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def running(self) -> bool:
        """Whether a tool has not answered."""
        return any(call.output is None for call in self._calls.values())

    def expected(self) -> float | None:
        """Seconds until the last of those that run is expected back; None where that is not known of one."""
        now = time.perf_counter()
        running = [call for call in self._calls.values() if call.output is None]
        left = [call.expected - (now - call.began) for call in running if call.expected is not None]
        return max(0.0, *left, 0.0) if running and len(left) == len(running) else None

    def start(self, item: FunctionCallItem) -> None:
        """Run the tool that is called. A call that cannot be run is answered with what is wrong."""
        call_id = item.call_id or ""
        tool = self._tools.get(item.name)
        if tool is None:
            self.answer(item, no_such_tool(item.name, self._tools), "unknown_tool")
            return
        call = self._calls[call_id] = _Call(item, time.perf_counter(), tool.expects())
        self._tell(CallStarted(call_id, item.name, item.arguments, call.expected))
        self.beside(self._run(tool, call))

    def answer(self, item: FunctionCallItem, cause: str, outcome: CallOutcome) -> None:
        """Answer a call that is not run."""
        call = self._calls[item.call_id or ""] = _Call(item, time.perf_counter(), None)
        self._finish(call, failure(cause), outcome, 0.0)

    def cancel(self) -> None:
        """Let no tool go on; those that ran are answered with that."""
        for task in list(self._tasks):
            task.cancel()
        for call in self._calls.values():
            if call.output is None:
                self._cut(call)

    def beside(self, work: Coroutine[None, None, None]) -> None:
        """Do something of no consequence beside them; it ends with them."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def take(self) -> list[tuple[FunctionCallItem, str]]:
        """The calls with their outputs, in the order of the calls; they are owed no more."""
        calls, self._calls = self._calls, {}
        return [(call.item, call.output or "") for call in calls.values()]

    async def _run(self, tool: Tool, call: _Call) -> None:
        call_id, name = call.item.call_id or "", call.item.name

        def report(note: str, fraction: float | None) -> None:
            self._tell(CallProgress(call_id, name, note, fraction))

        try:
            outcome = await tool.call(call.item.arguments, ToolContext(call_id, report))
        except BaseException:  # whoever ended it: nobody waits for its answer for ever
            if call.output is None:
                self._cut(call)
            raise
        if call.output is None:
            self._finish(call, outcome.output, outcome.kind, outcome.seconds)

    def _cut(self, call: _Call) -> None:
        self._finish(call, failure("The call was cancelled"), "cancelled", time.perf_counter() - call.began)

    def _finish(self, call: _Call, output: str, outcome: CallOutcome, seconds: float) -> None:
        call.output = output
        call_id, name = call.item.call_id or "", call.item.name
        self._tell(CallFinished(call_id, name, output, outcome, seconds, call.expected))

    def _tell(self, event: RunEvent) -> None:
        self.events.append(event)
        self.news.set()
