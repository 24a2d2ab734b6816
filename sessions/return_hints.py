"""When a session that nobody speaks in is likely to go on: what its engine is told of that unasked.

A reply that ends in calls waits for tools, and goes on as soon as they have answered; any other waits for a
person. So, unless the answers come at once, the engine is told that they may come any moment: then it keeps
this session's KV before that of one which a person left at the same time. How long a tool that takes longer
will take, only whoever runs it knows, and says by a lease or its ``returns_in``: from then on that counts.
Knows nothing of frames.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

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


KEPT = 4096


@dataclass(frozen=True, slots=True)
class Wait:
    """One pause of a session, in seconds; ``tokens``: its KV that waited."""

    session: str
    tokens: int
    expected: float
    real: float


class Waits:
    """Those of all sessions of one server."""

    def __init__(self, keep: int = KEPT, clock: Callable[[], float] = time.monotonic) -> None:
        self.records: deque[Wait] = deque(maxlen=keep)
        self._clock = clock
        self._away: dict[str, tuple[float, int, float]] = {}
        self._count = self._early = 0
        self._expected = self._real = 0.0

    def leaves(self, session: str, tokens: int, expected: float) -> None:
        """It is said to come back in so many seconds; said again, the last word counts from then on."""
        self._away[session] = (self._clock(), tokens, expected)

    def returns(self, session: str) -> None:
        """Its next turn begins; harmless where nothing was said."""
        if session in self._away:
            since, tokens, expected = self._away.pop(session)
            wait = Wait(session, tokens, expected, self._clock() - since)
            self.records.append(wait)
            self._count, self._early = self._count + 1, self._early + (wait.real < expected)
            self._expected, self._real = self._expected + expected, self._real + wait.real

    def ends(self, session: str) -> None:
        """It is over, and does not come back."""
        self._away.pop(session, None)

    def statistics(self) -> dict[str, float]:
        """Pauses that are over, those that were shorter than said, their seconds; and those that last."""
        return {
            "waits_ended": self._count,
            "waits_early": self._early,
            "waits_expected_seconds": self._expected,
            "waits_real_seconds": self._real,
            "waiting": len(self._away),
        }
