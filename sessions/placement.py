"""Where a session's KV is while no turn runs: leases, `stage` (bring it up) and `settle` (send it down).

None of it changes the tokens: KV that is elsewhere costs a restore or a recompute. A lease outlives the engine
process and ends with the server. Knows nothing of frames.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ..runtime.errors import EngineGone, SequenceBusy, SequenceUnknown
from ..runtime.link.client import EngineLink
from ..runtime.link.messages import Moved, Receipt
from .engine_copy import EngineCopy
from .errors import ConversationBusy, EngineUnavailable
from .history import History
from .token_ids import NONE, Ids

_Answer = TypeVar("_Answer")

MOST = 1e9
"""Larger numbers are cut to this before they cross the link; the engine clips them further."""


class Placement:
    """One session's placement.

    ``leaves`` is called with the seconds until the session is expected back. A verb outlives the engine
    process: it waits up to ``recovery_seconds`` for the next one, and asks that. Each verb raises
    ``EngineUnavailable`` if none came in time, the runtime's ``EngineGone`` if none will come or one died in a
    step of this session alone, ``SequencePoisoned`` if many died in such steps, and ``VerbRefused``.
    """

    def __init__(
        self,
        link: EngineLink,
        history: History,
        sequence: EngineCopy,
        recovery_seconds: float,
        leaves: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._link = link
        self._history = history
        self._sequence = sequence
        self._recovery_seconds = recovery_seconds
        self._leaves = leaves

    async def lease(self, priority: int | None, ttl: float | None, returns_in: float | None) -> Receipt:
        """Keep the session's KV longest and restore it first, within the budget, for ``ttl`` seconds.

        With a ``ttl`` of 0 only ``returns_in`` counts: in how many seconds the session is expected back.
        """
        number = None if priority is None else int(min(max(priority, -MOST), MOST))
        seconds = [None if value is None else _bounded(value) for value in (ttl, returns_in)]
        if returns_in is not None:
            self._leaves(max(0.0, _bounded(returns_in)))
        return await self._outliving(lambda: self._sequence.lease(self._ids(), number, *seconds))

    async def stage(self) -> Moved:
        """Bring the KV up, and wait for it. Raises ``ConversationBusy`` while a response writes."""
        return await self._moved(lambda: self._sequence.stage(self._ids()))

    async def settle(self, *, disk: bool) -> Moved:
        """Send the KV down, and wait for it. Raises ``ConversationBusy`` while a response writes."""
        return await self._moved(lambda: self._sequence.settle(self._ids(), disk=disk))

    async def _moved(self, move: Callable[[], Awaitable[Moved]]) -> Moved:
        async def idle() -> Moved:
            if self._history.busy:
                raise _busy()
            return await move()

        try:
            return await self._outliving(idle)
        except (SequenceBusy, SequenceUnknown):
            raise _busy() from None

    async def _outliving(self, verb: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Ask the engine; if it is gone or goes meanwhile, ask the next one."""
        while True:
            asked = self._link.engine_number
            try:
                return await verb()
            except EngineGone as gone:
                try:
                    await asyncio.wait_for(self._link.wait_ready(), self._recovery_seconds)
                except TimeoutError:
                    raise EngineUnavailable(gone.message) from gone
                if self._link.engine_number == asked:  # the engine is there and refuses this session
                    raise

    def _ids(self) -> Ids:
        """The tokens that stay as they are, whatever is said next."""
        base = self._history.script().base
        return NONE if base is None else base.tokens()


def _busy() -> ConversationBusy:
    return ConversationBusy("A response writes the conversation: its KV cannot be moved meanwhile")


def _bounded(value: float) -> float:
    return 0.0 if math.isnan(value) else min(max(value, -MOST), MOST)
