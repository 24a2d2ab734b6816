"""Frames on their way to one reader, bounded in events and bytes.

`post` does not wait, so frames leave in the order in which the session's state changed; its caller then waits
for `room`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..settings import ClientLimits

BURST_BYTES = 16 << 10
"""The most bytes that are written at once."""
PATIENCE = 0.25
"""Seconds that patient frames wait for others to be written with."""


@dataclass(frozen=True, slots=True)
class OutboxStatistics:
    """The frames and bytes that wait now, and the frames that have left so far."""

    events: int
    bytes: int
    sent: int


class Outbox:
    """A queue with one reader. It exceeds its bounds by one batch at most."""

    def __init__(self, limits: ClientLimits) -> None:
        self._limits = limits
        self._frames: deque[bytes] = deque()
        self._bytes = 0
        self._sent = 0
        self._filled = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._patient: asyncio.TimerHandle | None = None

    def post(self, frames: Iterable[bytes], *, patient: bool = False) -> None:
        """Queue frames in order, without waiting. ``patient``: they may wait for later ones."""
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
        """The next frames, up to `BURST_BYTES` and one at least. They count as queued until ``left``."""
        await self._filled.wait()
        size, burst = 0, list[bytes]()
        for frame in self._frames:
            size += len(frame)
            if burst and size > BURST_BYTES:
                break
            burst.append(frame)
        return burst

    def left(self, frames: int) -> None:
        """So many of the frames that were taken last have left."""
        for _ in range(frames):
            self._bytes -= len(self._frames.popleft())
        self._sent += frames
        self._mark()

    def statistics(self) -> OutboxStatistics:
        """The lengths now."""
        return OutboxStatistics(len(self._frames), self._bytes, self._sent)

    def _mark(self) -> None:
        if self._patient is not None:
            self._patient.cancel()
            self._patient = None
        limits = self._limits
        if len(self._frames) < limits.outbox_events and self._bytes < limits.outbox_bytes:
            self._room.set()
        else:
            self._room.clear()
        for event, holds in ((self._filled, bool(self._frames)), (self._empty, not self._frames)):
            if holds:
                event.set()
            else:
                event.clear()


class SessionOutbox:
    """One session's way into a socket's outbox. While the socket is ``shared``, frames name their session."""

    def __init__(
        self, outbox: Outbox, shared: Callable[[], bool] = lambda: False, session_id: str = ""
    ) -> None:
        self.session_id = session_id
        self._outbox = outbox
        self._shared = shared
        self._left = asyncio.Event()

    def post(self, frames: Iterable[bytes], *, patient: bool = False) -> None:
        """Queue frames in order, without waiting. ``patient``: see `Outbox.post`."""
        if self._shared():
            name = b'{"session_id":"%s",' % self.session_id.encode()
            frames = [name + frame[1:] for frame in frames]
        self._outbox.post(frames, patient=patient)

    async def room(self) -> None:
        """Wait until the socket takes more, or the session has left it."""
        if self._outbox.free or self._left.is_set():
            return
        waits = [asyncio.ensure_future(self._outbox.room()), asyncio.ensure_future(self._left.wait())]
        try:
            await asyncio.wait(waits, return_when="FIRST_COMPLETED")
        finally:
            for wait in waits:
                wait.cancel()

    async def emptied(self) -> None:
        """Wait until all that was posted has left."""
        await self._outbox.emptied()

    def abandon(self) -> None:
        """The session has left the socket: stop waiting for room."""
        self._left.set()
