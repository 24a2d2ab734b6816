"""Threads for work on long texts and bodies, which would block the event loop. It is done in pieces of a few
milliseconds, or by libraries that leave the interpreter to others. The threads have the priority of the event
loop: one with a lower priority would keep the interpreter from it while other processes run.

A tenant has one thread at a time, so that many long texts of one tenant do not delay the others.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import msgspec

THREADS = 4
Stopped = Callable[[], bool]
"""Returns whether the caller was cancelled. Long work calls it from time to time, to end early."""

_T = TypeVar("_T")


@cache
def read_types() -> None:
    """Let msgspec read the annotations of all struct types that are imported. By itself it reads them when it
    first decodes a type, and two threads that do so at once can crash the process. Takes some 20 ms, once."""

    def below(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
        for one in kind.__subclasses__():
            yield one
            yield from below(one)

    for kind in below(msgspec.Struct):
        msgspec.msgpack.Decoder(kind)


class Workers:
    """The pool of threads that all tenants share. The threads start with the first work."""

    def __init__(self, threads: int = THREADS) -> None:
        read_types()
        self._threads = ThreadPoolExecutor(threads, "holdfast-text")
        self._running: set[asyncio.Future[Any]] = set()

    async def aclose(self) -> None:
        """Wait for running work and refuse new work."""
        if self._running:
            await asyncio.wait(self._running)
        self._threads.shutdown(wait=False)

    def begin(self, work: Callable[[], _T]) -> asyncio.Future[_T]:
        """Begin to run ``work`` on one of the threads. Returns the future of its result."""
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return running


class WorkerSlot:
    """One tenant's slot at the threads: it runs one piece of work at a time, in the order of the calls."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._free = asyncio.Lock()

    async def run(self, work: Callable[[Stopped], _T]) -> _T:
        """Run ``work`` on a thread and return its result.

        ``work`` gets a function that returns true once the caller was cancelled. It keeps the slot until it
        ends, also then.
        """
        await self._free.acquire()
        gone = threading.Event()
        try:
            running = self._workers.begin(lambda: work(gone.is_set))
        except BaseException:
            self._free.release()
            raise
        running.add_done_callback(self._ended)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            gone.set()
            raise
        finally:
            del running  # breaks the cycle of frame and exception

    def _ended(self, running: asyncio.Future[_T]) -> None:
        self._free.release()
        if not running.cancelled():
            running.exception()  # marks it as retrieved: the caller may be gone
