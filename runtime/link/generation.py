"""One running generation, as the gateway sees it: an async iterator of its rows.

Its queue is bounded by nature: a step gives a sequence one row at most, and a generation ``max_tokens``
tokens. Knows its rows and how it ended; not the wire they came by.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import TracebackType

import anyio

from ..errors import EngineGone
from .messages import Row, SequenceState


class Generation:
    """Rows in order, each once; ends after one with ``finish``, or where the generation was stopped.

    ``state`` is the sequence as the generation began: row tokens follow on ``state.length``. ``last`` is the
    row with ``finish``, as soon as it is known; rows that came before are still delivered. If the engine dies
    the rows that came are delivered, then ``EngineDied`` is raised. For one reader; leaving ``async with``, or
    ``aclose``, stops what still runs.
    """

    def __init__(self, stop: Callable[[int, int | None], Coroutine[None, None, SequenceState]]) -> None:
        self.state: SequenceState
        self.last: Row | None = None
        self._stop = stop
        self._rows: deque[Row] = deque()
        self._over = False
        self._fault: EngineGone | None = None
        self._reader: asyncio.Future[None] | None = None

    @property
    def running(self) -> bool:
        """Whether more rows may come."""
        return not self._over

    @property
    def queued(self) -> int:
        """Rows that have come and were not read."""
        return len(self._rows)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Row:
        while not self._rows:
            if self._fault is not None:
                raise type(self._fault)(self._fault.message)
            if self._over:
                raise StopAsyncIteration
            await self._news()
        return self._rows.popleft()

    async def _news(self) -> None:
        if self._reader is not None and not self._reader.done():
            raise anyio.BusyResourceError("reading from this generation")
        self._reader = asyncio.get_running_loop().create_future()
        await self._reader

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop it if it runs. The stop is sent at once: it holds even where the wait for its reply is cut."""
        if not self._over:
            with suppress(EngineGone):
                await self._stop(self.state.seq, None)

    def leave(self, keep: int) -> asyncio.Future[SequenceState] | None:
        """Stop it if it runs, and end here without the engine's answer, which may be a step away: that is
        returned. None: it was over.

        ``keep``: so many tokens of the sequence stay at most.
        """
        if self._over:
            return None
        stopping = asyncio.ensure_future(self._stop(self.state.seq, keep))
        stopping.add_done_callback(_heard)
        self.end()
        return stopping

    # --- for the wire ---------------------------------------------------------------------------------------

    def put(self, row: Row) -> None:
        """A row of this generation's epoch has come."""
        self._rows.append(row)
        if row.finish is not None:
            self.last = row
            self._over = True
        self._tell()

    def end(self) -> None:
        """No more rows will come: it was stopped."""
        self._over = True
        self._tell()

    def fail(self, fault: EngineGone) -> None:
        """No more rows will come: the engine is gone."""
        if not self._over:
            self._fault = fault
            self._over = True
        self._tell()

    def _tell(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _heard(stopping: asyncio.Future[SequenceState]) -> None:
    """A failure is nobody's who does not wait for it."""
    if not stopping.cancelled():
        stopping.exception()
