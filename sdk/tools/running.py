"""Running callables: in threads, as generators drained into an output, and left at a timeout.

A coroutine that is left, at a timeout or when its caller is cancelled, is cancelled and has `TIDY_SECONDS` to
clean up. One that shields itself runs on, and its result is dropped; `Detached.aclose` cancels it all the same.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import aclosing, closing, suppress
from functools import partial
from typing import Any, TypeVar

import anyio.to_thread
from anyio import CancelScope

from .context import ToolContext

_Result = TypeVar("_Result")

TIDY_SECONDS = 0.1
TURN_SECONDS = 0.05
"""An async generator that yields without ever waiting lets other tasks run, and its own timeout act, at least
once in so many seconds."""


async def in_thread(function: Callable[[], _Result]) -> _Result:
    """Call `function` in a thread of its own; returns what it returns, raises what it raises. If this is
    cancelled, the thread runs on, and its result is dropped.

    The number of threads is limited by anyio's default limiter; a thread that was left running does not count.
    """
    limiter, borrower = anyio.to_thread.current_default_thread_limiter(), object()
    await limiter.acquire_on_behalf_of(borrower)
    try:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_Result] = loop.create_future()
        context = contextvars.copy_context()

        def work() -> None:
            result = None
            try:
                result = context.run(function)
                resolve = partial(done.set_result, result)
            except BaseException as error:
                resolve = partial(done.set_exception, _raised(error))
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(lambda: _drop(result) if done.done() else resolve())

        # a daemon: at its end the interpreter would wait for a thread that hangs
        threading.Thread(target=work, name="holdfast-tool", daemon=True).start()
        try:
            return await done
        except asyncio.CancelledError:
            if not done.cancelled() and done.exception() is None:  # it was resolved, too
                _drop(done.result())
            raise
    finally:
        limiter.release_on_behalf_of(borrower)


def _drop(result: object) -> None:
    """Drop a result that nothing waits for. A coroutine is closed, so that Python does not warn of it."""
    if inspect.iscoroutine(result):
        result.close()


def _raised(error: BaseException) -> BaseException:
    """The error itself, or a `RuntimeError` for a `StopIteration`, which a future cannot hold."""
    return RuntimeError(str(error)) if isinstance(error, StopIteration) else error


async def drained(result: Any, context: ToolContext) -> bool:
    """If `result` is a generator, sync (read in a thread) or async, write all that it yields to `context` and
    return True; if not, return False. Raises what the generator raises, and `ToolFailed` for a piece that is no
    str or one too many."""
    if inspect.isasyncgen(result):
        stream: AsyncGenerator[Any, Any] = result
        async with aclosing(stream) as pieces:
            since = time.perf_counter()
            async for piece in pieces:
                context.write(piece)
                if time.perf_counter() - since > TURN_SECONDS:
                    await asyncio.sleep(0)
                    since = time.perf_counter()
    elif inspect.isgenerator(result):
        await in_thread(lambda: _drain(result, context))
    else:
        return False
    return True


def _drain(pieces: Generator[Any, Any, Any], context: ToolContext) -> None:
    """Write all that a sync generator yields to `context`, until its end or until the call is cancelled."""
    with closing(pieces):
        for piece in pieces:
            context.write(piece)
            if context.cancelled:
                return


class Detached:
    """Keeps tasks that were left running, until they end. `len()` of it: how many still run."""

    def __init__(self) -> None:
        self._left: set[asyncio.Task[Any]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._left)

    async def run(self, work: Callable[[], Awaitable[_Result]], seconds: float | None) -> _Result | None:
        """Run `work` in a task; returns its result, or None if it takes longer than `seconds` (None: no limit).
        Then, or when this is cancelled, the task is cancelled, and kept here if it goes on all the same. Raises
        what `work` raises."""
        limit, shield = CancelScope(), CancelScope()

        async def scoped() -> _Result | None:
            with limit, shield:
                return await work()
            return None

        task = asyncio.ensure_future(scoped())
        try:
            await asyncio.wait([task], timeout=seconds)
            return task.result() if task.done() else None
        finally:
            if not task.done():
                await self._leave(task, limit, shield)

    async def aclose(self) -> None:
        """Cancel all tasks that were left, and those left from now on; wait up to `TIDY_SECONDS` for them."""
        self._closed = True
        current = asyncio.current_task()
        left = [task for task in self._left if task is not current]
        for task in left:
            task.cancel()
        if left:
            with CancelScope(shield=True):
                await asyncio.wait(left, timeout=TIDY_SECONDS)

    async def _leave(self, task: asyncio.Task[Any], limit: CancelScope, shield: CancelScope) -> None:
        self._left.add(task)
        task.add_done_callback(self._ended)
        limit.cancel()
        if self._closed:
            task.cancel()
        try:
            with CancelScope(shield=True):
                await asyncio.wait([task], timeout=TIDY_SECONDS)
        finally:
            shield.shield = True  # else the cancelled scope cancels the task again in each pass of the loop

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._left.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as read, so that it is not logged
