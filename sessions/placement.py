"""Where a session's KV is: leases, `stage` (up), `settle` (down), return hints, and a map of its blocks.

None of it changes the tokens: KV that is elsewhere costs a restore or a recompute. A lease outlives the engine
process and ends with the server. Knows nothing of frames.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from ..runtime.errors import EngineGone, SequenceBusy, SequenceUnknown, VerbRefused
from ..runtime.link.client import EngineLink
from ..runtime.verbs import BlockMap, Moved, Receipt
from .conversation.history import History
from .conversation.items import FunctionCall
from .engine_copy import EngineCopy
from .errors import ConversationBusy, EngineUnavailable
from .token_ids import NONE, Ids

_Answer = TypeVar("_Answer")

MOST = 1e9
"""A priority or a number of seconds beyond this is cut to it before it is sent to the engine, which clips it
further."""
PATIENCE = 0.05
"""Seconds after a reply with tool calls before a return hint is sent; most tools answer sooner, and then none
is."""


class Placement:
    """Where one session's KV is, and the verbs that move or keep it.

    ``leaves`` is called with the seconds until the session is expected back. If the engine process dies during
    a verb, the verb waits up to ``recovery_seconds`` for the next engine, and asks that. Each verb raises
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
        """Lease the session's KV: it is kept longest and restored first, within a budget, for ``ttl`` seconds.
        Returns what the engine granted.

        ``priority``: of the session's turns meanwhile; higher goes first. ``returns_in``: in how many seconds
        the session is expected back. None: the engine's default. A ``ttl`` of 0 ends the lease; then
        ``returns_in`` is only a hint for eviction.
        """
        number = None if priority is None else int(min(max(priority, -MOST), MOST))
        seconds = [None if value is None else _bounded(value) for value in (ttl, returns_in)]
        if returns_in is not None:
            self._leaves(max(0.0, _bounded(returns_in)))
        return await self._outliving(lambda: self._sequence.lease(self._ids(), number, *seconds))

    async def stage(self) -> Moved:
        """Bring the session's KV from the lower tiers to the device, and wait for it. Returns how many tokens
        came from each tier. Raises ``ConversationBusy`` while a response writes the conversation."""
        return await self._moved(lambda: self._sequence.stage(self._ids()))

    async def settle(self, *, disk: bool) -> Moved:
        """Send the session's KV from the device to the host tier, or to ``disk``, and wait for it. Returns how
        many tokens were in each tier. Raises ``ConversationBusy`` while a response writes the conversation."""
        return await self._moved(lambda: self._sequence.settle(self._ids(), disk=disk))

    async def locate(self) -> BlockMap:
        """Which tier each block of the session lies in, also while a response writes. Moves nothing."""
        return await self._outliving(lambda: self._sequence.locate(self._ids()))

    async def _moved(self, move: Callable[[], Awaitable[Moved]]) -> Moved:
        busy = ConversationBusy("A response writes the conversation: its KV cannot be moved meanwhile")

        async def idle() -> Moved:
            if self._history.busy:
                raise busy
            return await move()

        try:
            return await self._outliving(idle)
        except (SequenceBusy, SequenceUnknown):
            raise busy from None

    async def _outliving(self, verb: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Return what ``verb`` returns. If the engine is gone or dies meanwhile, wait for the next one and
        call ``verb`` again."""
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
        """The token ids with which the next prompt begins: those up to the end of the last turn with tokens
        that can be used again; empty if there is no such turn."""
        base = self._history.script().base
        return NONE if base is None else base.tokens()


def _bounded(value: float) -> float:
    return 0.0 if math.isnan(value) else min(max(value, -MOST), MOST)


class ReturnHints:
    """Return hints of one session: they tell the engine that the session is likely to go on soon.

    If a reply ends in tool calls, and the tools have not answered after `PATIENCE`, a hint is sent: the session
    may go on at any moment, so its KV is kept longer than that of one that waits for a person. A lease replaces
    the hint.
    """

    def __init__(self, history: History, sequence: EngineCopy) -> None:
        self._history = history
        self._sequence = sequence
        self._sending: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def response_ended(self) -> None:
        """Called when a response has ended. If it ended in tool calls, sends a hint to the engine after
        `PATIENCE`, unless `cancel` is called before."""
        self.cancel()
        head = self._history.head
        calls = head is not None and any(isinstance(item, FunctionCall) for item in head.reply.items)
        if calls and not self._history.busy:
            self._timer = asyncio.get_running_loop().call_later(PATIENCE, self._begin)

    def cancel(self) -> None:
        """Cancel the hint that waits to be sent. Called when the session goes on, was leased, or is closed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def aclose(self) -> None:
        """Cancel the hint and wait for one that is being sent."""
        self.cancel()
        if self._sending is not None:
            await asyncio.gather(self._sending, return_exceptions=True)

    def _begin(self) -> None:
        self._timer = None
        if self._history.busy:
            return
        self._sending = asyncio.create_task(self._send(), name="holdfast-return-hint")

    async def _send(self) -> None:
        with suppress(VerbRefused, EngineGone):
            await self._sequence.hint_return(0.0)


class Waits:
    """Statistics of the pauses between turns: how many seconds the sessions were expected to be away, by the
    ``returns_in`` of their leases, and how many they were. ``clock``: gives the time in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._away: dict[str, tuple[float, float]] = {}  # since when, and for how long
        self._count = self._early = 0
        self._expected = self._real = 0.0

    def leaves(self, session: str, expected: float) -> None:
        """Called when a session is expected back in ``expected`` seconds: its pause begins now. A later call
        replaces an earlier one."""
        self._away[session] = (self._clock(), expected)

    def returns(self, session: str) -> None:
        """Called when the session's next turn begins: adds the length of the pause to the counts. Does nothing
        if `leaves` was not called for it."""
        if session in self._away:
            since, expected = self._away.pop(session)
            real = self._clock() - since
            self._count, self._early = self._count + 1, self._early + (real < expected)
            self._expected, self._real = self._expected + expected, self._real + real

    def ends(self, session: str) -> None:
        """Called when the session is closed: drops its expectation, so that its pause is not counted."""
        self._away.pop(session, None)

    def statistics(self) -> dict[str, float]:
        """How many pauses have ended, how many of them were shorter than expected, the sums of their expected
        and real seconds, and how many pauses still last."""
        return {
            "waits_ended": self._count,
            "waits_early": self._early,
            "waits_expected_seconds": self._expected,
            "waits_real_seconds": self._real,
            "waiting": len(self._away),
        }
