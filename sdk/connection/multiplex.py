"""Several sessions on one connection: a `SharedTransport` carries a `SessionTransport` for each.

One task receives all frames and puts each into the bounded queue of its session. Of a frame it reads only which
session that is.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from contextlib import suppress

import msgspec

from ..errors import ConnectionLost
from ..frames.client import SessionAttach, SessionDetach
from .transport import Transport

MAX_QUEUED = 4096
"""At most so many frames wait for a slow session. One with more is detached, so that it does not hold up the
others."""

PATIENT_PASSES = 8


class _Error(msgspec.Struct):
    event_id: str | None = None


class _Frame(msgspec.Struct):
    """The part of a server frame that is read here, to find its session: the session's id, and in an `error`
    the client event that it is about."""

    session_id: str | None = None
    error: _Error | None = None


class SharedTransport:
    """One transport that carries several sessions. ``first``: the id of the session that it was opened for; a
    frame that names no session is of that one."""

    def __init__(self, transport: Transport, first: str) -> None:
        self.transport = transport
        self._first = first
        self._sessions: dict[str, SessionTransport] = {}
        self._attaching: dict[str, str] = {}  # sessions, by the event that attaches them
        self._numbers = itertools.count(1)
        self._task: asyncio.Task[None] | None = None

    def session(self, session_id: str) -> SessionTransport:
        """The transport of the session with this id, which is made at the first call."""
        return self._sessions.setdefault(session_id, SessionTransport(self, session_id))

    async def attach(self, session_id: str, handle: str) -> SessionTransport:
        """Ask the server to add the session that `handle` opens, and return its transport without waiting: the
        answer is the first frame there. Raises `ConnectionLost`."""
        event_id = f"attach_{next(self._numbers)}"
        self._attaching[event_id] = session_id
        session = self.session(session_id)
        await self.transport.send(msgspec.json.encode(SessionAttach(event_id=event_id, session=handle)))
        return session

    def start(self) -> None:
        """Start the receive task, if no earlier call did."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._receive_all(), name="holdfast-receive")

    async def leave(self, session_id: str) -> None:
        """Detach a session from the connection. With the last one the connection is closed. Raises
        `ConnectionLost`."""
        if self._sessions.pop(session_id, None) is not None and self._sessions:
            await self.transport.send(msgspec.json.encode(SessionDetach(session_id=session_id)))
        elif not self._sessions:
            if self._task is not None and self._task is not asyncio.current_task():
                self._task.cancel()
            await self.transport.aclose()

    async def _receive_all(self) -> None:
        try:
            while True:
                session = self._session_of(frame := await self.transport.receive())
                if session is not None:
                    await self._put(session, frame)
        except ConnectionLost as lost:
            cause, code = lost.message, lost.close_code
        except Exception as error:
            cause, code = f"A frame of the server cannot be given to its session: {error}", None
        for session in self._sessions.values():
            session.end(cause, code)

    async def _put(self, session: SessionTransport, frame: bytes) -> None:
        """Queue a frame for a session. If its queue stays full for `PATIENT_PASSES` passes of the event loop,
        detach it."""
        for _ in range(PATIENT_PASSES):
            if session.put(frame):
                return
            await asyncio.sleep(0)
        session.end("This session read too slowly on a shared connection, and was detached from it")
        await self.leave(session.id)

    def _session_of(self, frame: bytes) -> SessionTransport | None:
        read = msgspec.json.decode(frame, type=_Frame)
        session_id = read.session_id or self._first
        if read.error is not None and read.error.event_id in self._attaching:
            session_id = self._attaching.pop(read.error.event_id)
        return self._sessions.get(session_id)


class SessionTransport:
    """The `Transport` of one session on a shared connection.

    A session that does not read `MAX_QUEUED` frames in time is detached: after these frames its connection
    counts as lost, and is made again for it alone.
    """

    def __init__(self, connection: SharedTransport, session_id: str) -> None:
        self.connection = connection
        self.id = session_id
        self._frames: deque[bytes] = deque()
        self._arrival = asyncio.Event()  # set when there is a frame, or no more come
        self._end: tuple[str, int | None] | None = None

    def put(self, frame: bytes) -> bool:
        """Queue a frame for `receive`. Returns False, and drops it, if `MAX_QUEUED` frames wait."""
        if len(self._frames) >= MAX_QUEUED:
            return False
        self._frames.append(frame)
        self._arrival.set()
        return True

    def end(self, cause: str, close_code: int | None = None) -> None:
        """End the session's connection: it still gets the queued frames, then `ConnectionLost` with this cause
        and code."""
        self._end = self._end or (cause, close_code)
        self._arrival.set()

    async def send(self, frame: bytes) -> None:
        self._check()
        await self.connection.transport.send(b'{"session_id":"%s",' % self.id.encode() + frame[1:])

    async def receive(self) -> bytes:
        while not self._frames:
            self._check()
            self._arrival.clear()
            self.connection.start()
            await self._arrival.wait()
        return self._frames.popleft()

    async def aclose(self) -> None:
        """Detach the session from the connection; its other sessions go on."""
        self.end("This session was detached from its connection")
        with suppress(ConnectionLost):
            await self.connection.leave(self.id)

    def _check(self) -> None:
        if self._end is not None:
            raise ConnectionLost.closed(*self._end)
