"""Coroutines that may be left running when their caller stops waiting: at a timeout, or when it is cancelled.

A coroutine that is left is cancelled and has `TIDY_SECONDS` to clean up. One that shields itself runs on, and
its result is dropped; `aclose` cancels it in spite of its shields.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from anyio import CancelScope

TIDY_SECONDS = 0.1

_Result = TypeVar("_Result")


class Detached:
    """Owns the tasks that were left running. ``len``: how many still run."""

    def __init__(self) -> None:
        self._left: set[asyncio.Task[Any]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._left)

    async def run(self, work: Callable[[], Awaitable[_Result]], seconds: float | None) -> _Result | None:
        """The result within `seconds` (None: no limit), else None. Raises what `work` raises."""
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
            shield.shield = True  # else the cancelled scope cancels the task again in each turn of the loop

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._left.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as read, so that it is not logged
