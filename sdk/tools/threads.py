"""Sync callables beside the event loop, each in a thread of its own that keeps no process from ending.

Knows nothing of tools.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

import anyio.to_thread

_Result = TypeVar("_Result")


async def in_thread(function: Callable[[], _Result]) -> _Result:
    """What `function` returns or raises; who is cancelled leaves it behind.

    At once run as many as anyio's default limiter of threads allows; one that was left behind counts no more.
    """
    limiter, borrower = anyio.to_thread.current_default_thread_limiter(), object()
    await limiter.acquire_on_behalf_of(borrower)
    try:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_Result] = loop.create_future()
        context = contextvars.copy_context()

        def work() -> None:
            try:
                settle = partial(done.set_result, context.run(function))
            except BaseException as error:
                settle = partial(done.set_exception, _raised(error))
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(lambda: None if done.done() else settle())

        # a daemon: the interpreter waits for other threads at its end, for one that hangs without end
        threading.Thread(target=work, name="holdfast-tool", daemon=True).start()
        return await done
    finally:
        limiter.release_on_behalf_of(borrower)


def _raised(error: BaseException) -> BaseException:
    """As a future can hold it."""
    return RuntimeError(f"StopIteration: {error}") if isinstance(error, StopIteration) else error
