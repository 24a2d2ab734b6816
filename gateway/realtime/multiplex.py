"""Several sessions on one socket: each has a line into its outbox, and every frame says whose it is.

Knows nothing of what a frame says beyond that it is a JSON object.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from .live_session import LiveSession
from .outbox import Outbox


class Line:
    """One session's way into a socket's outbox. Its frames are named once ``shared`` says so."""

    def __init__(self, outbox: Outbox, shared: Callable[[], bool], session_id: str = "") -> None:
        self.session_id = session_id
        self._outbox = outbox
        self._shared = shared
        self._gone = asyncio.Event()

    def post(self, frames: Iterable[bytes], *, patient: bool = False) -> None:
        """Queue frames in order, without waiting; ``patient``: see `Outbox.post`."""
        if self._shared():
            name = b'{"session_id":"%s",' % self.session_id.encode()
            frames = [name + frame[1:] for frame in frames]
        self._outbox.post(frames, patient=patient)

    async def room(self) -> None:
        """Wait until the socket takes more, or the session has left it."""
        if self._outbox.free or self._gone.is_set():
            return
        waits = [asyncio.ensure_future(self._outbox.room()), asyncio.ensure_future(self._gone.wait())]
        try:
            await asyncio.wait(waits, return_when="FIRST_COMPLETED")
        finally:
            for wait in waits:
                wait.cancel()

    async def emptied(self) -> None:
        """Wait until all that was posted has left."""
        await self._outbox.emptied()

    def abandon(self) -> None:
        """The session has left the socket: nobody shall wait for room."""
        self._gone.set()


class MultiplexedSession:
    """A further session's hold on a socket; ``gone`` is told when it goes on elsewhere."""

    def __init__(self, line: Line, gone: Callable[[MultiplexedSession], None]) -> None:
        self.line = line
        self.live: LiveSession | None = None
        self._gone = gone

    def moved(self) -> None:
        """The session goes on elsewhere."""
        self._gone(self)
