"""The listening socket: what it refuses before a connection is made of it, and where each connection's time
begins."""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.responses import JSONResponse

from ...runtime.kv_placement.sizing import refusal
from ..access.turn_queue import Place
from ..errors import NoDescriptors, http_answer
from ..settings import ClientLimits
from .deadlines import Deadline, Deadlines
from .heads import whole_answer

log = logging.getLogger(__name__)

FIRST_BYTES = 1 << 16
"""The most bytes of a request about which the listening socket decides; a longer one is decided on later."""
PASS = 64
"""Connections that are accepted or refused in one pass of the event loop."""
BACKLOG = 2048
"""Connections that the kernel keeps until they are accepted."""
KEPT = 32
"""Descriptors that no connection gets, for the server's own files, sockets and processes."""
SHED = 16
"""Connections without a request that are cut at a time, where no descriptor is left for another one."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The whole answer to a request that is refused when it comes. ``close``: the connection ends with it."""

    answer: bytes
    close: bool


class Decide(Protocol):
    """Decides about the first bytes of a request, of ``peer``: a place in the queue, a refusal, or None, which
    decides nothing. ``close``: a refusal ends the connection in any case."""

    def __call__(
        self, data: bytes, peer: tuple[str, int] | None, *, close: bool
    ) -> Place | Refused | None: ...


class Door:
    """What the listening socket and the connections that it accepts share. ``deadlines``: of all connections.
    ``decide``: about each request."""

    def __init__(self, deadlines: Deadlines, decide: Decide = lambda data, peer, *, close: None) -> None:
        self.deadlines = deadlines
        self.decide = decide
        self._accepted: dict[int, tuple[Deadline, Place | None]] = {}

    def accept(self, sock: socket.socket, place: Place | None = None) -> None:
        """A socket is accepted: its time begins. ``place``: in the queue, of the request that has come on it.
        The place of an earlier socket with its number, which was closed before its connection was made, is
        given up."""
        if (before := self._accepted.pop(sock.fileno(), None)) is not None:
            before[0].end()
            if before[1] is not None:
                before[1].abandon()
        self._accepted[sock.fileno()] = self.deadlines.begin(sock), place

    def pick_up(self, sock: socket.socket) -> tuple[Deadline, Place | None]:
        """The deadline of a connection that is made now, and the place of the request that has come on it; None
        if none has come yet."""
        return self._accepted.pop(sock.fileno(), None) or (self.deadlines.begin(sock), None)


class Listener(socket.socket):
    """A listening socket that answers what is refused before a connection is made of it: requests that its
    `Door` refuses, and all when the process has no file descriptor left.

    Where descriptors are short, connections that have no request are cut first (`Deadlines.shed`). Without a
    descriptor a connection would stay in the kernel's queue and wake the event loop again and again. So one is
    kept spare: it is closed so that the connection can be accepted, answered and closed. A line in the log says
    when that begins and when it ends.
    """

    _spare: int | None = None
    _refusing = False
    _door: Door | None = None
    _looks = True
    _most = sys.maxsize
    _cut = 0  # the last time
    _full = False

    @classmethod
    def of(cls, sock: socket.socket, door: Door | None = None, *, looks: bool = True) -> Listener:
        """Make a listener of a listening socket. ``sock`` gives up its descriptor and cannot be used any more.
        ``door``: knows the connections, and decides about requests that are there when theirs is accepted.
        ``looks``: false if their bytes cannot be read, as with TLS."""
        listener = cls(fileno=sock.detach())
        listener._door, listener._looks = door, looks
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        listener._most = sys.maxsize if soft == resource.RLIM_INFINITY else max(KEPT, soft - KEPT)
        listener._save()
        return listener

    def listen(self, backlog: int = BACKLOG) -> None:
        """Begin to listen. The event loop accepts ``backlog`` connections in one pass; the kernel keeps
        `BACKLOG` of them."""
        super().listen(BACKLOG)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept the next connection that is not refused, and return it with the peer's address. Raises
        ``OSError`` like any socket, ``BlockingIOError`` if no connection waits, or after `PASS` refusals, so
        that the event loop does other things between them."""
        for _ in range(PASS):
            if self._full:  # descriptors of those that were cut are free in the next pass
                self._full = False
                break
            try:
                sock, peer = super().accept()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                if not self._shed() and not self._refuse(error):
                    raise
                continue
            if sock.fileno() >= self._most and not self._shed():
                self._answer(sock, f"{self._most} files and connections are open")
                continue
            if self._refusing:
                self._refusing = False
                log.warning("connections are accepted again")
            if self._door is None or not self._turn_away(self._door, sock, peer):
                return sock, peer
        raise BlockingIOError

    def detach(self) -> int:
        """Give up the descriptor of the listening socket, and close the spare one."""
        self._spend()
        return super().detach()

    def close(self) -> None:
        """Close the socket and the spare descriptor."""
        self._spend()
        super().close()

    def _turn_away(self, door: Door, sock: socket.socket, peer: Any) -> bool:
        """Have the door decide about what has come on an accepted socket. A refused one is answered and closed.
        Returns whether it was refused."""
        place = None
        if self._looks:
            with suppress(OSError):  # nothing has come yet, or the peer has gone
                data = sock.recv(FIRST_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
                place = door.decide(data, peer[:2], close=True)
        if isinstance(place, Refused):
            _close_behind(sock, place.answer)
            return True
        door.accept(sock, place)
        return False

    def _shed(self) -> bool:
        """Cut some connections that have no request. Returns whether descriptors will be free for that, or for
        those that were cut before."""
        before, self._cut = self._cut, 0 if self._door is None else self._door.deadlines.shed(SHED)
        if self._cut:
            log.warning("descriptors are short: %d connections without a request were closed", self._cut)
        self._full = bool(before or self._cut)
        return self._full

    def _refuse(self, error: OSError) -> bool:
        """Answer one waiting connection with 503 and close it, by means of the spare descriptor. Returns False
        if there is no spare descriptor, so that nothing could be done. ``error``: why the connection could not
        be accepted. Raises ``BlockingIOError`` if no connection waits."""
        if self._spare is None:
            self._save()
        if self._spare is None:
            return False
        self._spend()
        try:
            sock, _ = super().accept()  # the kernel asks for a descriptor first: none may be waiting
            self._answer(sock, refusal(error, "a connection"))
        finally:
            self._save()
        return True

    def _answer(self, sock: socket.socket, cause: object) -> None:
        """Answer an accepted connection with 503 and close it. ``cause``: for the log, which gets a line for
        the first of several."""
        busy = NoDescriptors("The server has no file descriptor left for a connection: try again soon")
        _close_behind(sock, whole_answer(JSONResponse(*http_answer(busy)), close=True))
        if not self._refusing:
            self._refusing = True
            log.error("%s; connections are refused", cause)

    def _save(self) -> None:
        with suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _spend(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            os.close(spare)


def _close_behind(sock: socket.socket, answer: bytes) -> None:
    """Send an answer on a socket, as far as it takes it at once, and close it."""
    with sock, suppress(OSError):
        with suppress(BlockingIOError):
            sock.recv(
                FIRST_BYTES, socket.MSG_DONTWAIT
            )  # with unread data the kernel would discard the answer
        sock.send(answer, socket.MSG_DONTWAIT)


def listen(host: str, port: int, limits: ClientLimits) -> socket.socket:
    """Make a listening socket, for a `Listener`. Its connections have bounded send buffers, and end when their
    peer acknowledges nothing for ``stall_seconds``.

    They inherit TCP_NODELAY, which asyncio sets only on sockets that name their protocol. Without it a reply's
    first delta waits 40 ms for the peer's delayed acknowledgement of the event before it.

    Raises ``OSError`` (``EADDRINUSE`` if the port is taken).
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, port), family=family, backlog=BACKLOG)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.send_buffer_bytes)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limits.stall_seconds * 1000))
    return sock
