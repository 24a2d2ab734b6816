"""Several sessions on one connection: each has a line, which is a transport like any other.

Whoever reads on one line reads for all, and leaves to the others what is theirs; what nobody reads is kept.
Knows of a frame whose it is, nothing else.
"""

from __future__ import annotations

import itertools
from collections import deque

import anyio
import msgspec

from .errors import ConnectionLost
from .frames import codec
from .frames.verbs import SessionAttach, SessionDetach
from .transport import Transport


class _Error(msgspec.Struct):
    event_id: str | None = None


class _Frame(msgspec.Struct):
    """What must be known of a frame: whose it is, or which attempt to attach it refuses."""

    session_id: str | None = None
    error: _Error | None = None


class SharedConnection:
    """One transport under the sessions of a process; ``first`` is the one it was opened for."""

    def __init__(self, transport: Transport, first: str) -> None:
        self._transport = transport
        self._first = first
        self._lines: dict[str, Line] = {}
        self._attaching: dict[str, str] = {}  # sessions, by the event that asks for them
        self._numbers = itertools.count(1)
        self._pumping = False
        self._turned = anyio.Event()
        self._lost: ConnectionLost | None = None

    def line(self, session_id: str) -> Line:
        """A session's way."""
        return self._lines.setdefault(session_id, Line(self, session_id))

    async def attach(self, session_id: str, handle: str) -> Line:
        """Ask for a session that the server has; its answer is the first to be read from the line."""
        event_id = f"attach_{next(self._numbers)}"
        self._attaching[event_id] = session_id
        line = self.line(session_id)
        await self._transport.send(codec.encode(SessionAttach(event_id=event_id, session=handle)))
        return line

    async def send(self, frame: bytes) -> None:
        """Send one frame as it is."""
        await self._transport.send(frame)

    async def pump(self, waiting: deque[bytes]) -> None:
        """Read until ``waiting`` has something, here or in the task that reads now. Raises `ConnectionLost`."""
        while not waiting:
            if self._lost is not None:
                raise ConnectionLost(self._lost.message, self._lost.close_code)
            if self._pumping:
                await self._turned.wait()
            else:
                await self._read()

    async def leave(self, session_id: str) -> None:
        """A line is closed; with the last one the connection ends."""
        if self._lines.pop(session_id, None) is not None and self._lines:
            await self._transport.send(codec.encode(SessionDetach(session_id=session_id)))
        elif not self._lines:
            await self._transport.aclose()

    async def _read(self) -> None:
        self._pumping = True
        try:
            self._route(await self._transport.receive())
        except ConnectionLost as lost:
            self._lost = lost
        finally:
            self._pumping = False
            self._turned.set()
            self._turned = anyio.Event()

    def _route(self, frame: bytes) -> None:
        told = msgspec.json.decode(frame, type=_Frame)
        session_id = told.session_id or self._first
        if told.error is not None and told.error.event_id in self._attaching:
            session_id = self._attaching.pop(told.error.event_id)
        line = self._lines.get(session_id)
        if line is not None:
            line.waiting.append(frame)


class Line:
    """One session on the connection."""

    def __init__(self, connection: SharedConnection, session_id: str) -> None:
        self.waiting: deque[bytes] = deque()
        self.connection = connection
        self._session_id = session_id
        self._closed = False

    async def send(self, frame: bytes) -> None:
        """Send one frame for this session. Raises `ConnectionLost`."""
        self._check()
        await self.connection.send(b'{"session_id":"%s",' % self._session_id.encode() + frame[1:])

    async def receive(self) -> bytes:
        """Its next frame. Raises `ConnectionLost`."""
        self._check()
        await self.connection.pump(self.waiting)
        return self.waiting.popleft()

    async def aclose(self) -> None:
        """The session leaves the connection."""
        self._closed = True
        try:
            await self.connection.leave(self._session_id)
        except ConnectionLost:
            return

    def _check(self) -> None:
        """Others may go on with the connection: who has left it may not."""
        if self._closed:
            raise ConnectionLost("This session has left the connection")
