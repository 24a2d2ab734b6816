"""How long a connection may take, from its accept to its end, whatever library reads its bytes.

Each accepted socket has a `Deadline`, which is always in one `ConnectionStage`, and each stage ends in time::

    accepted ──▶ HEAD ──▶ BODY ──▶ SERVED ──▶ IDLE ──▶ HEAD …
                  │         └─────────────────▶ REST ──▶ IDLE …    answered before its body's end
                  └──────▶ SERVED ──▶ MESSAGE ──▶ SERVED …         a WebSocket
    CLOSING comes behind any of them

A TLS handshake is a part of HEAD, and so is the handshake of a WebSocket until it is answered. A stage ends
only when something has come of it: what a library drops without a word stays in HEAD, and is closed in time.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import OrderedDict
from contextlib import suppress
from enum import Enum, auto
from itertools import islice
from typing import Protocol

from ..settings import ClientLimits

log = logging.getLogger(__name__)

LEAST_TAKEN = 16 << 10
"""The bytes that a slow client must take in the time of SERVED or CLOSING."""
UNREAD = 64 << 10
"""With more bytes than this unsent, the client of a request that is served counts as slow. It is asyncio's
mark, above which nothing more is written."""
MOST_HELD = 32 << 20
"""The most bytes that are kept for all connections without a request: unread answers, and heads that are not
whole."""
MOST_UNFINISHED = 64 << 20
"""The most bytes that are kept of all messages on WebSockets that are not whole, or not parsed yet."""


class ConnectionStage(Enum):
    """What a connection does. Its time is a field of `ClientLimits`."""

    HEAD = auto()
    """A request's head comes, or a WebSocket's handshake is not answered: ``header_seconds``."""
    BODY = auto()
    """A request's body comes: ``body_seconds``."""
    SERVED = auto()
    """The application has a request, or an open WebSocket, for as long as it wants. The connection is looked at
    every ``stall_seconds``: a client that reads too slowly is dropped."""
    MESSAGE = auto()
    """A message on a WebSocket has begun, and has not ended or is not parsed: ``body_seconds``."""
    REST = auto()
    """The rest of a body comes after the answer, and is thrown away: ``header_seconds``."""
    IDLE = auto()
    """A request was answered, and nothing of a next one has come: ``idle_seconds``."""
    CLOSING = auto()
    """The server has closed the connection, and the client has not, or still reads: ``close_seconds``, and as
    long again if the client took `LEAST_TAKEN`."""


FREE = (ConnectionStage.IDLE, ConnectionStage.REST, ConnectionStage.CLOSING, ConnectionStage.HEAD)
"""Stages in which a connection has no request. Where descriptors are short, these are cut, in this order."""
BOUNDS = {FREE: MOST_HELD, (ConnectionStage.MESSAGE,): MOST_UNFINISHED}
"""The most bytes that are kept for all connections in these stages together."""
TOGETHER = {stage: stages for stages in BOUNDS for stage in stages}
"""Of each such stage, all stages that have its bound together."""


class TimedConnection(Protocol):
    """The asyncio protocol that reads a connection's bytes. ``transport``: the connection."""

    transport: asyncio.Transport

    def overdue(self, stage: ConnectionStage) -> None:
        """Called when the time of a stage is over, other than SERVED and CLOSING: ends the connection, or
        enters another stage."""


class Deadline:
    """The deadline of one connection. ``sock``: its socket, if there is one. ``ended``: the connection is
    gone, and nothing more is counted."""

    __slots__ = ("_all", "_connection", "due", "ended", "held", "sock", "stage")

    def __init__(self, deadlines: Deadlines, sock: socket.socket | None) -> None:
        self.sock = sock
        self.stage = ConnectionStage.HEAD
        self.due = 0.0
        self._all = deadlines
        self._connection: TimedConnection | None = None
        self.ended = False
        self.held = 0
        """Bytes that are kept for the connection: what was unsent when the stage began, and what has come of a
        head; in MESSAGE, what has come of messages that are not whole or not parsed."""

    def watch(self, connection: TimedConnection) -> None:
        """From now on ``connection`` reads the socket. The stage goes on."""
        self._connection = connection

    def enter(self, stage: ConnectionStage) -> None:
        """The connection does something else: the time of this stage begins."""
        if not self.ended:
            unsent = 0 if self._connection is None else _unsent(self._connection.transport)
            self._all.enter(self, stage, unsent)

    def hold(self, size: int) -> None:
        """So many bytes more are kept of what comes."""
        if not self.ended:  # it may have been cut for what it held before
            self._all.hold(self, size)

    def end(self) -> None:
        """The connection is gone."""
        self._all.forget(self)
        self.ended, self._connection = True, None

    def cut(self) -> None:
        """End the connection at once. What is unsent is lost."""
        connection = self._connection
        self.end()
        if connection is not None:
            connection.transport.abort()
        if self.sock is not None:  # for TLS, of which asyncio aborts no handshake and no second close
            with suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)

    def over(self, *, ending: bool) -> None:
        """Called when the time of the stage is over. ``ending``: the server ends, too."""
        connection, stage = self._connection, self.stage
        if connection is None or ending:
            self.cut()
        elif stage is not ConnectionStage.SERVED and stage is not ConnectionStage.CLOSING:
            self.enter(ConnectionStage.CLOSING)  # whatever the connection makes of it
            connection.overdue(stage)
        elif self._stalls(connection.transport):
            self.cut()
        else:
            self.enter(
                ConnectionStage.CLOSING if connection.transport.is_closing() else ConnectionStage.SERVED
            )

    def _stalls(self, transport: asyncio.Transport) -> bool:
        """Whether the client has taken too little since the stage began."""
        taken = self.held - _unsent(transport)
        return taken < LEAST_TAKEN and (self.stage is ConnectionStage.CLOSING or self.held > UNREAD)


def _unsent(transport: asyncio.Transport) -> int:
    """The bytes that were written and are not sent."""
    try:
        return transport.get_write_buffer_size()
    except AttributeError:  # of a TLS transport that was closed twice
        return 0


class Deadlines:
    """The deadlines of all connections of one server. The connections of one stage stand in the order in which
    its time is over, so no more than one timer runs. ``clock``: the event loop."""

    def __init__(self, limits: ClientLimits, clock: asyncio.AbstractEventLoop) -> None:
        self._clock = clock
        self._seconds = {
            ConnectionStage.HEAD: limits.header_seconds,
            ConnectionStage.BODY: limits.body_seconds,
            ConnectionStage.SERVED: limits.stall_seconds,
            ConnectionStage.MESSAGE: limits.body_seconds,
            ConnectionStage.REST: limits.header_seconds,
            ConnectionStage.IDLE: limits.idle_seconds,
            ConnectionStage.CLOSING: limits.close_seconds,
        }
        self._queues = {stage: OrderedDict[Deadline, None]() for stage in ConnectionStage}
        self._held = dict.fromkeys(BOUNDS, 0)  # bytes, by the same stages
        self._timer: asyncio.TimerHandle | None = None
        self._ending = False

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def begin(self, sock: socket.socket | None = None) -> Deadline:
        """Make the deadline of a connection that was accepted now."""
        deadline = Deadline(self, sock)
        self.enter(deadline, ConnectionStage.HEAD)
        return deadline

    def enter(self, deadline: Deadline, stage: ConnectionStage, unsent: int = 0) -> None:
        """Begin the time of this stage for one connection. ``unsent``: bytes that wait to be sent to it."""
        if self._ending and deadline.stage is ConnectionStage.CLOSING:
            return
        self.forget(deadline)
        deadline.held = 0
        deadline.stage, deadline.due = stage, self._clock.time() + self._seconds[stage]
        self._queues[stage][deadline] = None
        self._wake_at(deadline.due)
        self.hold(deadline, unsent)

    def hold(self, deadline: Deadline, size: int) -> None:
        """So many bytes more are kept for one connection. If those in its stages have too many together
        (`BOUNDS`), the longest waiting of them that have any are cut, until half as many are left."""
        deadline.held += size
        stages = TOGETHER.get(deadline.stage)
        if stages is None:
            return
        self._held[stages] += size
        if self._held[stages] > (most := BOUNDS[stages]):
            count = 0
            for one in [one for stage in stages for one in self._queues[stage] if one.held]:
                if self._held[stages] <= most // 2:
                    break
                one.cut()
                count += 1
            log.warning("%d connections were cut: all together had %d bytes that wait", count, most)

    def forget(self, deadline: Deadline) -> None:
        """The connection is gone, or is about to enter another stage."""
        queue = self._queues[deadline.stage]
        if deadline in queue:
            del queue[deadline]
            if (stages := TOGETHER.get(deadline.stage)) is not None:
                self._held[stages] -= deadline.held

    def close(self) -> None:
        """The server ends: each connection has ``close_seconds`` from now, whatever it does."""
        for deadline in [one for queue in self._queues.values() for one in queue]:
            self.enter(deadline, ConnectionStage.CLOSING, deadline.held)
        self._ending = True

    def shed(self, most: int) -> int:
        """Cut connections that have no request, at most so many: of each stage in `FREE` those that have waited
        longest. Returns their number."""
        found = [one for stage in FREE for one in islice(self._queues[stage], most)][:most]
        for deadline in found:
            deadline.cut()
        return len(found)

    def _wake_at(self, when: float) -> None:
        if self._timer is not None and self._timer.when() > when:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._clock.call_at(when, self._wake)

    def _wake(self) -> None:
        self._timer, now = None, self._clock.time()
        for queue in self._queues.values():
            while queue and (first := next(iter(queue))).due <= now:
                self.forget(first)
                first.over(ending=self._ending)
        for queue in self._queues.values():
            if queue:
                self._wake_at(next(iter(queue)).due)
