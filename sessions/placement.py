"""Where a session's KV is to be while nobody speaks: leases, and the ways up and down.

None of it changes what is said: KV that is elsewhere costs a restore or a recompute, never a token. A lease
ends with the server; it outlives its engine. Knows nothing of frames.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ..runtime.errors import EngineGone, SequenceBusy, SequenceUnknown
from ..runtime.link.messages import Moved, Receipt
from .errors import ConversationBusy, EngineUnavailable
from .token_ids import NONE, Ids
from .turn.response import Branch

_Answer = TypeVar("_Answer")

MOST = 1e9
"""Numbers beyond are cut to it before they cross the link; the engine clips them further."""


class Placement:
    """One session's. ``leaves`` is told of how many tokens' KV, and in how many seconds it is expected back.

    Every verb outlives its engine, as a reply does: it waits for the next one, for ``recovery_seconds``, and
    is asked again of that. Raises ``EngineUnavailable`` where none came in time, the runtime's ``EngineGone``
    where none ever will or one died by itself in a step of this session, ``SequencePoisoned`` where many were
    killed in such steps, and the runtime's ``VerbRefused``.
    """

    def __init__(self, branch: Branch, leaves: Callable[[int, float], None] = lambda tokens, s: None) -> None:
        self._branch = branch
        self._leaves = leaves

    async def lease(self, priority: int | None, ttl: float | None, returns_in: float | None) -> Receipt:
        """Keep the session's KV first and bring it back first, as far as the budget goes; with a ``ttl`` of 0
        only say when it comes back."""
        number = None if priority is None else int(min(max(priority, -MOST), MOST))
        seconds = [None if value is None else _bounded(value) for value in (ttl, returns_in)]
        if returns_in is not None:
            self._leaves(len(self._ids()), max(0.0, _bounded(returns_in)))
        sequence = self._branch.sequence
        return await self._outliving(lambda: sequence.lease(self._ids(), number, *seconds))

    async def stage(self) -> Moved:
        """Bring its KV up, and wait for it. Raises ``ConversationBusy`` while a response writes."""
        return await self._moved(lambda: self._branch.sequence.stage(self._ids()))

    async def settle(self, *, disk: bool) -> Moved:
        """Send its KV down, and wait for it. Raises ``ConversationBusy`` while a response writes."""
        return await self._moved(lambda: self._branch.sequence.settle(self._ids(), disk=disk))

    async def _moved(self, move: Callable[[], Awaitable[Moved]]) -> Moved:
        async def idle() -> Moved:
            self._check_idle()
            return await move()

        try:
            return await self._outliving(idle)
        except (SequenceBusy, SequenceUnknown):
            raise _busy() from None

    async def _outliving(self, verb: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Ask the engine, and the next one where it is gone, or goes meanwhile."""
        link, seconds = self._branch.link, self._branch.settings.recovery_seconds
        while True:
            asked = link.engine_number
            try:
                return await verb()
            except EngineGone as gone:
                try:
                    await asyncio.wait_for(link.wait_ready(), seconds)
                except TimeoutError:
                    raise EngineUnavailable(gone.message) from gone
                if link.engine_number == asked:  # it is there, and will not have this session
                    raise

    def _ids(self) -> Ids:
        """The tokens that stay as they are, whatever is said next."""
        base = self._branch.history.script().base
        return NONE if base is None else base.tokens()

    def _check_idle(self) -> None:
        if self._branch.history.busy:
            raise _busy()


def _busy() -> ConversationBusy:
    return ConversationBusy("A response writes the conversation, whose KV cannot be moved meanwhile")


def _bounded(value: float) -> float:
    return 0.0 if math.isnan(value) else min(max(value, -MOST), MOST)
