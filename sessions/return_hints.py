"""Return hints: the engine is told when an idle session is likely to go on; and how long pauses were.

A reply that ends in tool calls waits for tools, any other for a person. If the tools have not answered after
`PATIENCE`, the engine is told that the session may go on at any moment, and keeps its KV longer than that of a
session which waits for a person. A client that knows how long a tool takes says so with a lease's
``returns_in``, which replaces the hint. Knows nothing of frames.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from ..runtime.errors import EngineGone, VerbRefused
from .engine_copy import EngineCopy
from .history import History
from .items import FunctionCall

PATIENCE = 0.05
"""Seconds before the hint is sent: most tools answer sooner."""


class ReturnHints:
    """The return hints of one session."""

    def __init__(self, history: History, sequence: EngineCopy) -> None:
        self._history = history
        self._sequence = sequence
        self._sending: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def response_ended(self) -> None:
        """A response has ended: a hint is due if it ended in calls."""
        self.cancel()
        head = self._history.head
        calls = head is not None and any(isinstance(item, FunctionCall) for item in head.reply.items)
        if calls and not self._history.busy:
            self._timer = asyncio.get_running_loop().call_later(PATIENCE, self._begin)

    def cancel(self) -> None:
        """Cancel the hint: the session goes on, was leased, or is closed."""
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
    """How many seconds sessions were expected to be away, as their leases said, and how many they were."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._away: dict[str, tuple[float, float]] = {}  # since when, and for how long
        self._count = self._early = 0
        self._expected = self._real = 0.0

    def leaves(self, session: str, expected: float) -> None:
        """The session is expected back in ``expected`` seconds; a later call replaces an earlier one."""
        self._away[session] = (self._clock(), expected)

    def returns(self, session: str) -> None:
        """The session's next turn begins. Without an expectation this does nothing."""
        if session in self._away:
            since, expected = self._away.pop(session)
            real = self._clock() - since
            self._count, self._early = self._count + 1, self._early + (real < expected)
            self._expected, self._real = self._expected + expected, self._real + real

    def ends(self, session: str) -> None:
        """The session is closed: drop its expectation."""
        self._away.pop(session, None)

    def statistics(self) -> dict[str, float]:
        """Counts of ended pauses and of those shorter than expected, their seconds, and pauses that last."""
        return {
            "waits_ended": self._count,
            "waits_early": self._early,
            "waits_expected_seconds": self._expected,
            "waits_real_seconds": self._real,
            "waiting": len(self._away),
        }
