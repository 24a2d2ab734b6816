"""One running generation, as the gateway sees it: an async iterator of its rows.

Its queue is bounded: a step gives a sequence at most one row, and a generation has ``max_tokens`` tokens. While
its reader waits, a row can be dealt with as it arrives, in no task (`Generation.next_row`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TypeAlias

import anyio

from ..errors import EngineGone
from ..verbs import Row, SequenceState

Take: TypeAlias = Callable[[Row], bool]
"""A function that gets a row as it arrives, and returns whether it has dealt with it; if not, the row goes to
the reader."""


class Generation:
    """One running generation: an async iterator of its rows. It yields each row once, in order, and ends
    after the row with ``finish``, or where the generation was stopped.

    ``stop``: sends the verb that stops it: (sequence id, tokens to keep or None). ``state`` is the sequence
    when the generation began; the rows' tokens follow behind ``state.length``. If the engine dies, the rows
    that have arrived are yielded, then ``EngineDied`` is raised. It has one reader. ``leave`` stops a
    generation that still runs.
    """

    def __init__(self, stop: Callable[[int, int | None], Coroutine[None, None, SequenceState]]) -> None:
        self.state: SequenceState
        self._stop = stop
        self._rows: deque[Row] = deque()
        self._over = False
        self._fault: EngineGone | None = None
        self._reader: asyncio.Future[None] | None = None
        self._take: Take | None = None  # while the reader waits

    @property
    def running(self) -> bool:
        """Whether more rows may come."""
        return not self._over

    @property
    def queued(self) -> int:
        """How many rows have arrived and are unread."""
        return len(self._rows)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Row:
        row = await self.next_row()
        if row is None:
            raise StopAsyncIteration
        return row

    async def next_row(self, take: Take | None = None) -> Row | None:
        """Wait for the next row and return it; None behind the last one.

        ``take`` is called with each row that comes while this waits, except the last one, as the row arrives.
        It returns whether it has dealt with the row: then this goes on waiting; if not, the row is returned
        here. What it raises is raised here.
        """
        while not self._rows:
            if self._fault is not None:
                raise self._fault.copy()
            if self._over:
                return None
            await self._wait(take)
        return self._rows.popleft()

    async def _wait(self, take: Take | None) -> None:
        if self._reader is not None and not self._reader.done():
            raise anyio.BusyResourceError("reading from this generation")
        self._reader, self._take = asyncio.get_running_loop().create_future(), take
        try:
            await self._reader
        finally:
            self._take = None

    def leave(self, keep: int) -> asyncio.Future[SequenceState] | None:
        """Stop the generation if it still runs, and end the iterator now. Returns the future of the engine's
        answer; None if the generation had ended. ``keep``: to how many tokens the sequence is cut, if it has
        more."""
        if self._over:
            return None
        stopping = asyncio.ensure_future(self._stop(self.state.seq, keep))
        stopping.add_done_callback(lambda told: told.cancelled() or told.exception())  # it may go unread
        self.end()
        return stopping

    # --- for the gateway end --------------------------------------------------------------------------------

    def put(self, row: Row) -> None:
        """Give the reader a row of this generation, or queue it. A row with ``finish`` is the last.

        The caller has checked that the row's epoch is the one of ``state``: it is not from an earlier
        generation of the same sequence.
        """
        take, reader = self._take, self._reader
        if take is not None and reader is not None and row.finish is None and not reader.done():
            try:
                if take(row):
                    return
            except Exception as mistake:  # it ends this reader and not the link
                reader.set_exception(mistake)
                return
        self._rows.append(row)
        self._over = self._over or row.finish is not None
        self._wake()

    def end(self, fault: EngineGone | None = None) -> None:
        """Note that no more rows will come, as the generation was stopped, or as the engine is gone. Rows that
        have arrived can still be read; then the reader gets ``fault`` raised, if there is one."""
        if not self._over:
            self._fault, self._over = fault, True
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
