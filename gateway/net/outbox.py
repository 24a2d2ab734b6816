"""Frames on their way to one reader, bounded in events and bytes.

The conversation posts without waiting, so frames leave in the order in which its state changed; whoever posts
then waits for room. It knows nothing of what a frame says, nor of sockets.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from ..settings import Limits

BURST_BYTES = 16 << 10
"""That are written at once."""
PATIENCE = 0.25
"""Seconds that frames may wait for those they are to be written with."""


@dataclass(frozen=True, slots=True)
class OutboxStatistics:
    """What waits now, and what has left so far."""

    events: int
    bytes: int
    sent: int


class FrameSink(Protocol):
    """Where a session's frames go: an outbox, or a line into one."""

    def post(self, frames: Iterable[bytes], *, patient: bool = False) -> None:
        """Queue frames in order, without waiting. ``patient``: they may wait for what follows them."""

    async def room(self) -> None:
        """Wait until more can be taken."""

    async def emptied(self) -> None:
        """Wait until all that was posted has left."""

    def abandon(self) -> None:
        """Nobody will post any more, and nobody shall wait for room."""


class Outbox:
    """A queue with one reader. Overshoots its bounds by one batch at most."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._frames: deque[bytes] = deque()
        self._bytes = 0
        self._sent = 0
        self._filled = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._abandoned = False
        self._patient: asyncio.TimerHandle | None = None

    def abandon(self) -> None:
        """Nobody will post any more, and nobody shall wait for room."""
        self._abandoned = True
        self._mark()

    def post(self, frames: Iterable[bytes], *, patient: bool = False) -> None:
        """Queue frames in order, without waiting. ``patient``: they may wait for what follows them."""
        for frame in frames:
            self._frames.append(frame)
            self._bytes += len(frame)
        if patient and not self._filled.is_set():
            if self._patient is None:
                self._patient = asyncio.get_running_loop().call_later(PATIENCE, self._mark)
            self._empty.clear()
        else:
            self._mark()

    @property
    def free(self) -> bool:
        """Whether less than the bounds is queued."""
        return self._room.is_set()

    async def room(self) -> None:
        """Wait until less than the bounds is queued."""
        await self._room.wait()

    async def emptied(self) -> None:
        """Wait until all that was posted has left."""
        await self._empty.wait()

    async def take(self) -> list[bytes]:
        """What waits, up to `BURST_BYTES` of it, one frame at least; it counts as queued until ``left``."""
        await self._filled.wait()
        size, burst = 0, list[bytes]()
        for frame in self._frames:
            size += len(frame)
            if burst and size > BURST_BYTES:
                break
            burst.append(frame)
        return burst

    def left(self, frames: int) -> None:
        """So many of those taken last have left."""
        for _ in range(frames):
            self._bytes -= len(self._frames.popleft())
        self._sent += frames
        self._mark()

    def statistics(self) -> OutboxStatistics:
        """Its lengths now."""
        return OutboxStatistics(len(self._frames), self._bytes, self._sent)

    def _mark(self) -> None:
        if self._patient is not None:
            self._patient.cancel()
            self._patient = None
        limits = self._limits
        fits = len(self._frames) < limits.outbox_events and self._bytes < limits.outbox_bytes
        if fits or self._abandoned:
            self._room.set()
        else:
            self._room.clear()
        for event, holds in ((self._filled, bool(self._frames)), (self._empty, not self._frames)):
            if holds:
                event.set()
            else:
                event.clear()
