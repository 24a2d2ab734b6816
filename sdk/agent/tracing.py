"""Tracers: callables, plain or async, that get each event of a run, as its reader does.

`TraceFile` writes runs in the format that `benchmarks` replay: what was computed, and how long tools took.
"""

from __future__ import annotations

import asyncio
import csv
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TypeAlias

from .events import RunDone, RunEvent, StepFinished, WaitFinished

Tracer: TypeAlias = Callable[[RunEvent], Awaitable[object] | object]

log = logging.getLogger(__name__)
LAST_SECONDS = 1.0
"""How long async tracers may go on after the end of a run."""

COLUMNS = (
    "session_id", "round_idx", "prefix_len", "input_len", "output_len", "tool_wait_after_ms",
    "tool_wait_expected_ms",
)  # fmt: skip


class Tracers:
    """The tracers of one run: callables that get each of its events. Errors that they raise are logged and
    dropped."""

    def __init__(self, tracers: Iterable[Tracer]) -> None:
        self._tracers = tuple(tracers)
        self._tasks: set[asyncio.Task[None]] = set()

    def trace(self, event: RunEvent) -> None:
        """Call each tracer with the event. What an async one still has to do goes on in a task, beside the
        run."""
        for tracer in self._tracers:
            try:
                result = tracer(event)
            except Exception:
                log.exception("a tracer failed on %s", type(event).__name__)
                continue
            if inspect.isawaitable(result):
                task = asyncio.ensure_future(_awaited(result, event))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Wait up to `LAST_SECONDS` for async tracers that still run, then cancel them."""
        tasks = self._tasks - {asyncio.current_task()}  # a tracer may itself close the chat
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=LAST_SECONDS)
        finally:
            for task in tasks:
                task.cancel()


async def _awaited(result: Awaitable[object], event: RunEvent) -> None:
    try:
        await result
    except Exception:
        log.exception("a tracer failed on %s", type(event).__name__)


class TraceFile:
    """A tracer that appends a CSV row to the file ``path`` for each response of a run; a new file gets the
    column names first. ``session_id`` stands in each row. A response without usage gets no row.

    ``round_idx``: the row's number, from 0; ``prefix_len``: prompt tokens that the session had before;
    ``input_len``: new ones; ``output_len``: sampled ones; ``tool_wait_after_ms``: milliseconds that its tools
    took after it; ``tool_wait_expected_ms``: those that the server was told before, empty if it was not told.
    """

    def __init__(self, path: Path | str, session_id: str) -> None:
        self._path = Path(path)
        self._session_id = session_id
        self._round = 0
        self._step: StepFinished | None = None

    def __call__(self, event: RunEvent) -> None:
        """Take one event of the run. The row of a response is written when its tools are done."""
        match event:
            case StepFinished():
                self._write(None)
                self._step = event
            case WaitFinished():
                self._write(event)
            case RunDone():
                self._write(None)

    def _write(self, wait: WaitFinished | None) -> None:
        step, self._step = self._step, None
        if step is None or step.finished.usage is None:
            return
        usage, kv = step.finished.usage, step.finished.kv
        new = usage.input_tokens if kv is None else kv.new
        waited = 0 if wait is None else round(wait.seconds * 1000)
        expected = "" if wait is None or wait.expected is None else round(wait.expected * 1000)
        row = (
            self._session_id,
            self._round,
            usage.input_tokens - new,
            new,
            usage.output_tokens,
            waited,
            expected,
        )
        self._round += 1
        begins = not self._path.exists()
        with self._path.open("a", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            if begins:
                rows.writerow(COLUMNS)
            rows.writerow(row)
