"""Coroutines beside who waits for them, and may leave them behind: at a timeout, or when cancelled.

What is left is cancelled, and has a moment to tidy up. What goes on all the same, having shielded itself, is
left in peace, and what it gives is not read; `aclose` cancels it whatever its shields. Knows nothing of tools.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from anyio import CancelScope

TIDY_SECONDS = 0.1

_Result = TypeVar("_Result")


class Detached:
    """The owner of what is left behind. ``len``: how many go on."""

    def __init__(self) -> None:
        self._left: set[asyncio.Task[Any]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._left)

    async def run(self, work: Callable[[], Awaitable[_Result]], seconds: float | None) -> _Result | None:
        """What it gives within so many seconds; None: it has not. Raises what it raises."""
        patience, peace = CancelScope(), CancelScope()

        async def scoped() -> _Result | None:
            with patience, peace:
                return await work()
            return None

        task = asyncio.ensure_future(scoped())
        try:
            await asyncio.wait([task], timeout=seconds)
            return task.result() if task.done() else None
        finally:
            if not task.done():
                await self._leave(task, patience, peace)

    async def aclose(self) -> None:
        """Cancel all that were left, and those that are left from now on; wait a moment for their ends."""
        self._closed = True
        current = asyncio.current_task()
        left = [task for task in self._left if task is not current]
        for task in left:
            task.cancel()
        if left:
            with CancelScope(shield=True):
                await asyncio.wait(left, timeout=TIDY_SECONDS)

    async def _leave(self, task: asyncio.Task[Any], patience: CancelScope, peace: CancelScope) -> None:
        self._left.add(task)
        task.add_done_callback(self._ended)
        patience.cancel()
        if self._closed:
            task.cancel()
        try:
            with CancelScope(shield=True):
                await asyncio.wait([task], timeout=TIDY_SECONDS)
        finally:
            peace.shield = True  # a scope cancels what goes on with each turn of the loop

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._left.discard(task)
        if not task.cancelled():
            task.exception()  # nobody else asks for it
