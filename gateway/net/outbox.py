"""Encoded events on their way to one socket, bounded in number and bytes.

`post` does not wait, so that frames leave in the order in which the session's state changed. Its caller then
waits for `room` before it makes more of them. A frame that finds the queue empty, or only patient frames in it,
may be written at once, which saves a switch to the socket's writing task and back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..settings import ClientLimits
from .flag import Flag

BURST_BYTES = 16 << 10
"""The most bytes that the writing task gives to the socket in one write, unless one frame alone has more."""
PATIENCE = 0.25
"""The most seconds for which frames that were posted with ``patient`` wait for later ones, to be written with
them."""


@dataclass(frozen=True, slots=True)
class OutboxStatistics:
    """The state of a socket's queue: how many frames (``events``) and ``bytes`` wait now."""

    events: int
    bytes: int


class Outbox:
    """The queue of frames for one socket. Its one reader, the socket's writing task, writes them. `post`
    refuses nothing, so the queue may exceed the bounds in ``limits`` by what its callers post before they wait
    for `room`. ``send_now``: writes frames if that needs no wait, and returns whether it did; by default it
    never does."""

    def __init__(self, limits: ClientLimits, send_now: Callable[..., bool] = lambda *frames: False) -> None:
        self._limits = limits
        self._send_now = send_now
        self._frames: list[bytes] = []
        self._bytes = 0
        self.free = True
        """Whether the queue is below its bounds."""
        self.shared = False
        """Whether several sessions use the socket, or have used it: their frames name them. The socket sets
        it."""
        self._filled = Flag()
        self._room = Flag(on=True)
        self._empty = Flag(on=True)
        self._patient: asyncio.TimerHandle | None = None

    def post(self, frames: Iterable[bytes], *, patient: bool = False) -> None:
        """Queue frames in order, without waiting. ``patient``: they may wait up to `PATIENCE` seconds for later
        frames, so that all go in one write."""
        for frame in frames:
            self._frames.append(frame)
            self._bytes += len(frame)
        if patient and not self._filled.is_set():
            if self._patient is None:
                self._patient = asyncio.get_running_loop().call_later(PATIENCE, self._mark)
            self._empty.clear()
        else:
            self._mark()

    def post_now(self, frame: bytes) -> None:
        """Write a frame at once, behind patient ones, if no other waits and the socket takes it; otherwise
        queue it. For a frame that no other follows in the same pass: `post` writes those that do together."""
        if not self._frames and self._send_now(frame):
            return
        if self._patient is not None and self._send_now(*self._frames, frame):
            self.left(len(self._frames))
        else:
            self.post((frame,))

    async def room(self) -> None:
        """Wait until the queue is below its bounds."""
        await self._room.wait()

    async def emptied(self) -> None:
        """Wait until every frame that was posted has been written."""
        await self._empty.wait()

    async def take(self) -> list[bytes]:
        """The next frames to write: at least one, and as many as fit into `BURST_BYTES`. Waits until there is
        one. They stay queued until `left` is called."""
        await self._filled.wait()
        size, burst = 0, list[bytes]()
        for frame in self._frames:
            size += len(frame)
            if burst and size > BURST_BYTES:
                break
            burst.append(frame)
        return burst

    def left(self, frames: int) -> None:
        """Remove the first ``frames`` frames from the queue: they have been written."""
        self._bytes -= sum(map(len, self._frames[:frames]))
        del self._frames[:frames]
        self._mark()

    def statistics(self) -> OutboxStatistics:
        """How much is queued now."""
        return OutboxStatistics(len(self._frames), self._bytes)

    def _mark(self) -> None:
        if self._patient is not None:
            self._patient.cancel()
            self._patient = None
        limits = self._limits
        waiting = len(self._frames)
        self.free = waiting < limits.outbox_events and self._bytes < limits.outbox_bytes
        for event, holds in (
            (self._room, self.free),
            (self._filled, waiting > 0),
            (self._empty, not waiting),
        ):
            if holds:
                event.set()
            else:
                event.clear()


class SessionOutbox:
    """One session's access to the queue of its socket. If that is shared (`Outbox.shared`), the field
    ``session_id`` is added to each frame. `abandon` ends the session's use of the socket."""

    def __init__(self, outbox: Outbox, session_id: str = "") -> None:
        self.session_id = session_id
        self._outbox = outbox
        self._left = Flag()

    def post(self, frames: Iterable[bytes], *, patient: bool = False) -> None:
        """Queue the session's frames in order, without waiting. ``patient``: they may wait up to `PATIENCE`
        seconds for later frames, so that all go in one write."""
        if self._outbox.shared:
            name = b'{"session_id":"%s",' % self.session_id.encode()
            frames = [name + frame[1:] for frame in frames]
        self._outbox.post(frames, patient=patient)

    def post_now(self, frame: bytes) -> None:
        """Write one frame of the session within the call if no frame is queued and the socket takes it;
        otherwise queue it."""
        if self._outbox.shared:
            frame = b'{"session_id":"%s",' % self.session_id.encode() + frame[1:]
        self._outbox.post_now(frame)

    @property
    def free(self) -> bool:
        """Whether the socket's queue is below its bounds."""
        return self._outbox.free

    async def room(self) -> None:
        """Wait until the socket's queue is below its bounds, or `abandon` is called."""
        if self._outbox.free or self._left.is_set():
            return
        waits = [asyncio.ensure_future(self._outbox.room()), asyncio.ensure_future(self._left.wait())]
        try:
            await asyncio.wait(waits, return_when="FIRST_COMPLETED")
        finally:
            for wait in waits:
                wait.cancel()

    async def emptied(self) -> None:
        """Wait until every frame in the socket's queue has been written, those of its other sessions
        included."""
        await self._outbox.emptied()

    def abandon(self) -> None:
        """Called when the session has left the socket: calls of `room` that wait return, and later ones do not
        wait."""
        self._left.set()
