"""When a session that nobody speaks in is likely to go on: what its engine is told of that unasked.

A reply that ends in calls waits for tools, and goes on as soon as they have answered; any other waits for a
person. So, unless the answers come at once, the engine is told that they may come any moment: then it keeps
this session's KV before that of one which a person left at the same time. How long a tool that takes longer
will take, only whoever runs it knows, and says by a lease or its ``returns_in``: from then on that counts.
Knows nothing of frames.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from ..runtime.errors import EngineGone, VerbRefused
from .engine_copy import EngineCopy
from .history import History
from .items import FunctionCall

PATIENCE = 0.05
"""Seconds: most tools answer sooner, and nothing need be said of their sessions."""


class ReturnHints:
    """One session's."""

    def __init__(self, history: History, sequence: EngineCopy) -> None:
        self._history = history
        self._sequence = sequence
        self._telling: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def left(self) -> None:
        """A response is over."""
        self.known()
        head = self._history.tree.head
        calls = head is not None and any(isinstance(item, FunctionCall) for item in head.reply.items)
        if calls and not self._history.busy:
            self._timer = asyncio.get_running_loop().call_later(PATIENCE, self._tell)

    def known(self) -> None:
        """It goes on, or was told when it will, or it is over: there is nothing to guess."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def aclose(self) -> None:
        """Say nothing more."""
        self.known()
        if self._telling is not None:
            await asyncio.gather(self._telling, return_exceptions=True)

    def _tell(self) -> None:
        self._timer = None
        if self._history.busy:
            return
        self._telling = asyncio.create_task(self._told(), name="holdfast-foresight")

    async def _told(self) -> None:
        with suppress(VerbRefused, EngineGone):
            await self._sequence.hint_return(0.0)
