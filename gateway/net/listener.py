"""Uvicorn's protocols with limits: deadlines of requests, rates of frames, and a way to drop a client that does
not read.

Uvicorn itself keeps silent connections and partial heads for ever, and sends a close frame only behind a full
buffer. It queues a pong for each ping though the peer reads none, and takes any number of empty fragments.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum, auto
from functools import lru_cache
from typing import Any, cast

import h11
from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import ClientDisconnected, get_client_addr
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State

from ...runtime.kv_placement.sizing import refusal
from ..errors import GatewayError, TooManyControlFrames, TooManyFragments, wire_error
from ..settings import ClientLimits
from .flag import Flag
from .rates import TokenBucket

log = logging.getLogger(__name__)

DROP = "holdfast.drop"
"""The ASGI extension by which the application drops a WebSocket without waiting for its buffer."""


def http_protocol(limits: ClientLimits) -> type[asyncio.Protocol]:
    """Make the protocol class of HTTP connections for uvicorn. It drops a connection if its request head is not
    complete after ``header_seconds``, or if it still sends a body so long after its request was answered."""

    class LimitedHTTP(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(cast(asyncio.Transport, transport))
            self._follow()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._follow()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def _follow(self) -> None:
            waits = self.conn.their_state is h11.IDLE or (
                self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE
            )
            if not waits or self.transport.is_closing():
                self._disarm()
            elif self._deadline is None:
                self._deadline = self.loop.call_later(limits.header_seconds, self.transport.abort)

        def _disarm(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return LimitedHTTP


REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
)
"""The answer to a connection for which no descriptor is left."""

BURST = "holdfast.burst"
"""The ASGI extension by which the application sends text frames without a task switch for each."""


SLICE_BYTES = 4096
"""The bytes that are parsed at once, so that a limit is noticed before a whole read of 256 KiB is parsed."""
RATE_PAUSE_SECONDS = 0.02
"""The shortest pause in reading a socket that sends too fast."""


class Hold(Enum):
    """A reason not to read from a socket. A socket is read while it has none."""

    APPLICATION = auto()
    """Messages wait for the application."""
    WRITES = auto()
    """The peer does not read: what is unsent is above the transport's mark."""
    RATE = auto()
    """Its frames come too fast."""
    BROKEN_OFF = auto()
    """It was closed for what it sent; nothing more is read. Never released."""


class _Received:
    """Messages for the application, in order. It has what uvicorn uses of `asyncio.Queue`: one task reads."""

    __slots__ = ("_came", "_messages")

    def __init__(self) -> None:
        self._messages: list[ASGIReceiveEvent] = []
        self._came = Flag()

    def empty(self) -> bool:
        """Whether no message waits."""
        return not self._messages

    def put_nowait(self, message: ASGIReceiveEvent) -> None:
        """Add a message."""
        self._messages.append(message)
        self._came.set()

    async def get(self) -> ASGIReceiveEvent:
        """Wait for the next message and remove it."""
        while not self._messages:
            self._came.clear()
            await self._came.wait()
        return self._messages.pop(0)


class LimitedWebSocket(WebSocketsSansIOProtocol):
    """Uvicorn's protocol of one WebSocket, with limits. It offers the application two extensions in its scope.

    ``[DROP]["drop"]()``: end the connection at once; what is unsent is lost. ``[BURST]["write"](frames)``, a
    coroutine: send UTF-8 text frames in one write; raises ``OSError`` if the connection is closed.
    ``[BURST]["write_now"](*frames)``: do that at once if all before is sent; returns whether it
    did.

    It limits what a peer can make the server keep or do. Of unanswered pings only the latest is answered (RFC
    6455, 5.5.3), and none while the peer does not read. Make it with `websocket_protocol`.

    An idle connection keeps little: once the application has accepted it, the request's headers are gone from
    the scope.
    """

    __slots__ = (
        "_control_rate",
        "_fragments",
        "_frame_rate",
        "_holds",
        "_rate_pause",
        "_unanswered",
        "_unparsed",
    )
    limits = ClientLimits()

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.queue: Any = _Received()  # in place of uvicorn's, which are 4 KiB larger
        self.writable: Any = Flag(on=True)
        self._frame_rate = TokenBucket(self.limits.frames, self.loop.time)
        self._control_rate = TokenBucket(self.limits.control_frames, self.loop.time)
        self.close_timeout = self.limits.close_seconds
        self._holds: list[Hold] = []
        self._unparsed = bytearray()
        self._fragments = 0  # of the message that is coming
        self._unanswered: bytes | None = None  # the latest ping
        self._rate_pause: asyncio.TimerHandle | None = None

    async def run_asgi(self) -> None:
        """Put the two extensions into the application's scope and run the application."""
        extensions = cast("dict[str, dict[str, object]]", self.scope["extensions"])
        extensions[DROP] = {"drop": self.transport.abort}
        extensions[BURST] = {"write": self.write_all, "write_now": self.write_now}
        await super().run_asgi()

    # --- reading --------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse what has come. If the socket is on hold, keep it for later; the transport is paused then, so
        that is at most one read."""
        self._unparsed += data
        self._parse()

    def _parse(self, *, rest: bool = False) -> None:
        """Parse what has come, and handle it, until a hold begins. ``rest``: all of it in spite of holds,
        because nothing comes after it."""
        while self._unparsed and (rest or not self._holds):
            piece = bytes(self._unparsed[:SLICE_BYTES])
            del self._unparsed[:SLICE_BYTES]
            self.conn.receive_data(piece)
            if self.conn.parser_exc is not None:
                self._unparsed.clear()
                self.handle_parser_exception()
                return
            self.handle_events()
            if not rest and (seconds := self._frame_rate.debt_seconds()):
                self._hold(Hold.RATE)
                seconds = max(seconds, RATE_PAUSE_SECONDS)
                self._rate_pause = self.loop.call_later(seconds, self._release, Hold.RATE)

    def handle_events(self) -> None:
        """Handle the frames that were parsed. The first one that breaks a limit closes the socket. Otherwise
        answer the latest ping."""
        for event in self.conn.events_received():
            if isinstance(event, Request):
                self.handle_connect(event)
            elif isinstance(event, Frame) and (excess := self._excess(event)):
                self._break_off(excess)
                return
            elif isinstance(event, Frame):
                self._handle_frame(event)
        if not self.conn.close_expected():
            self.conn.data_to_send()  # one pong for each ping; only the latest is answered
            self._answer_ping()

    def _handle_frame(self, frame: Frame) -> None:
        match frame.opcode:
            case Opcode.PING:
                self._unanswered = bytes(frame.data)
            case Opcode.PONG:
                self.handle_pong(frame)
            case Opcode.CLOSE:
                self.handle_close(frame)
            case Opcode.TEXT:
                self.handle_text(frame)
            case Opcode.BINARY:
                self.handle_bytes(frame)
            case _:
                self.handle_cont(frame)

    def _excess(self, frame: Frame) -> GatewayError | None:
        """Count a frame against the limits. Returns the error of a limit that it breaks, or None. Data frames
        that come too fast break none: they are read later."""
        if frame.opcode in (Opcode.PING, Opcode.PONG):
            return None if self._control_rate.spend() else TooManyControlFrames()
        if frame.opcode is Opcode.CLOSE:
            return None
        self._frame_rate.spend()
        self._fragments += 1
        if self._fragments > self.limits.fragments:
            return TooManyFragments()
        if frame.fin:
            self._fragments = 0
        return None

    def send_receive_event_to_app(self) -> None:
        """Queue a complete message for the application.

        Text that is not UTF-8 closes the socket with 1007; uvicorn would log a traceback. Reading is held only
        if another message waits already: uvicorn stops reading after each message, which costs two system
        calls.
        """
        frames, self.frames = self.frames, []
        if self.close_sent:
            return
        data = frames[0] if len(frames) == 1 else b"".join(frames)
        behind = not self.queue.empty()
        if self.curr_msg_data_type == "text":
            try:
                text = data.decode()
            except UnicodeDecodeError:
                self._unparsed.clear()
                self.conn.send_close(1007)
                self.handle_parser_exception()
                return
            self.queue.put_nowait({"type": "websocket.receive", "text": text})
        else:
            self.queue.put_nowait({"type": "websocket.receive", "bytes": bytes(data)})
        if behind:
            self._hold(Hold.APPLICATION)

    async def receive(self) -> ASGIReceiveEvent:
        """The next message, for the application; waits for it. When no other is queued, the socket is read
        again."""
        message: ASGIReceiveEvent = await self.queue.get()
        if self.queue.empty():
            self._release(Hold.APPLICATION)
        return message

    def _hold(self, why: Hold) -> None:
        if not self._holds:
            self.transport.pause_reading()
        if why not in self._holds:
            self._holds.append(why)

    def _release(self, why: Hold) -> None:
        if why not in self._holds:
            return
        self._holds.remove(why)
        if not self._holds:
            self.loop.call_soon(self._go_on)  # not at once: others have their turn between two slices

    def _go_on(self) -> None:
        self._parse()
        if not self._holds:
            self.transport.resume_reading()

    def keepalive_timeout(self) -> None:
        """No pong has come in time. While the socket is on hold, the pong may lie unread: wait as long again. A
        peer that is gone does not acknowledge the ping either, which ends the connection (TCP_USER_TIMEOUT, see
        `listen`). Without a hold, close the socket."""
        if self._holds and self.ping_timeout is not None:
            self.pong_timer = self.loop.call_later(self.ping_timeout, self.keepalive_timeout)
            return
        super().keepalive_timeout()

    # --- writing --------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """The buffer is full, because the peer does not read: do not read from the peer either."""
        super().pause_writing()
        self._hold(Hold.WRITES)

    def resume_writing(self) -> None:
        """The buffer has room again: answer the latest ping, and read from the peer again."""
        super().resume_writing()
        self._answer_ping()
        self._release(Hold.WRITES)

    def _answer_ping(self) -> None:
        open_now = self.handshake_complete and not self.close_sent and not self.transport.is_closing()
        if self._unanswered is not None and open_now and self.writable.is_set():
            payload, self._unanswered = self._unanswered, None
            self.conn.send_pong(payload)
            self.transport.write(b"".join(self.conn.data_to_send()))

    def _break_off(self, error: GatewayError) -> None:
        """Close the socket because of ``error``, with its code as the reason, and read nothing more. If the
        peer has not closed after ``close_seconds``, the connection is aborted."""
        wire = wire_error(error)
        code, reason = wire.close or 1008, wire.code
        self._unparsed.clear()
        if not self.handshake_complete or self.close_sent:
            self.transport.abort()
            return
        log.warning("the client at %s was closed: %s", get_client_addr(self.scope), reason)
        self._hold(Hold.BROKEN_OFF)
        self.stop_keepalive()
        self.conn.data_to_send()
        self.conn.fail(code, reason)
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.close_sent = True
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_timer = self.loop.call_later(self.limits.close_seconds, self.transport.abort)
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def shutdown(self) -> None:
        """The server ends: close the socket. One that was closed for breaking a limit is aborted, because TLS
        would wait for its peer."""
        if Hold.BROKEN_OFF in self._holds:
            self.transport.abort()
        else:
            super().shutdown()

    async def write_all(self, frames: Sequence[bytes]) -> None:
        """Send text frames in one write; wait first while the buffer is full. Raises ``ClientDisconnected``, an
        ``OSError``, if the socket is closed."""
        await self.writable.wait()
        if self.disconnected or self.close_sent:
            raise ClientDisconnected
        try:
            for frame in frames:
                self.conn.send_text(frame)
        except InvalidState as error:
            raise ClientDisconnected from error
        self.transport.write(b"".join(self.conn.data_to_send()))

    def write_now(self, frame: bytes, *more: bytes) -> bool:
        """Send text frames in one write, without waiting. Returns False, and sends nothing, if the transport
        has unsent bytes or the socket is closed."""
        conn, transport = self.conn, self.transport
        if self.disconnected or self.close_sent or transport.get_write_buffer_size():
            return False
        if conn.state is not State.OPEN or conn.expect_continuation_frame or conn.extensions:
            return False
        data = _text_header(len(frame)) + frame
        if more:
            data = b"".join((data, *(_text_header(len(one)) + one for one in more)))
        transport.write(data)
        return True

    async def send(self, message: ASGISendEvent) -> None:
        """Send an ASGI message of the application, as uvicorn does. After a complete HTTP refusal the handshake
        counts as done; otherwise uvicorn would log it as a mistake of the application."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True
        elif message["type"] == "websocket.accept":
            self.request.headers.clear()
            self.response.headers.clear()
            cast("list[tuple[bytes, bytes]]", self.scope["headers"]).clear()
            self._answer_ping()
        elif message["type"] == "websocket.close":  # the application takes no messages any more
            self._release(Hold.APPLICATION)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone. Give the application the messages that had come before, then the
        disconnect."""
        if self._rate_pause is not None:
            self._rate_pause.cancel()
        if not self.close_sent:
            self._parse(rest=True)
        super().connection_lost(exc)


@lru_cache(maxsize=4096)
def _text_header(length: int) -> bytes:
    """The header of a whole text frame from a server with a payload of ``length`` bytes (RFC 6455, 5.2)."""
    if length < 126:
        return struct.pack("!BB", 0x81, length)
    if length < 1 << 16:
        return struct.pack("!BBH", 0x81, 126, length)
    return struct.pack("!BBQ", 0x81, 127, length)


def websocket_protocol(limits: ClientLimits) -> type[LimitedWebSocket]:
    """Make the protocol class of WebSockets for uvicorn: `LimitedWebSocket` with these limits."""
    return type("BoundWebSocket", (LimitedWebSocket,), {"limits": limits})


class Listener(socket.socket):
    """A listening socket that answers with 503 when the process has no file descriptor left.

    Otherwise such a connection would stay in the kernel's queue and wake the event loop again and again. One
    descriptor is kept spare: it is closed so that the connection can be accepted, answered and closed. A line
    in the log says when that begins and when it ends.
    """

    _spare: int | None = None
    _refusing = False

    @classmethod
    def of(cls, sock: socket.socket) -> Listener:
        """Make a listener of a listening socket. ``sock`` gives up its descriptor and cannot be used any
        more."""
        listener = cls(fileno=sock.detach())
        listener._save()
        return listener

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept the next connection and return it with the peer's address. While there is no descriptor left,
        answer the waiting connections with 503. Raises ``OSError`` like any socket, ``BlockingIOError`` if no
        connection waits."""
        while True:
            try:
                accepted = super().accept()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._refuse(error):
                    raise
                continue
            if self._refusing:
                self._refusing = False
                log.warning("connections are accepted again")
            return accepted

    def close(self) -> None:
        """Close the socket and the spare descriptor."""
        self._spend()
        super().close()

    def _refuse(self, error: OSError) -> bool:
        """Answer one waiting connection with 503 and close it. Returns False if there is no spare descriptor,
        so that nothing could be done. ``error``: for the log. Raises ``BlockingIOError`` if no connection
        waits."""
        if self._spare is None:
            self._save()
        if self._spare is None:
            return False
        self._spend()
        try:
            refused, _ = super().accept()  # the kernel asks for a descriptor first: none may be waiting
            with refused, suppress(OSError):
                refused.setblocking(False)
                with suppress(BlockingIOError):
                    refused.recv(1 << 16)  # with unread data the kernel would discard the answer
                refused.send(REFUSAL)
        finally:
            self._save()
        if not self._refusing:
            self._refusing = True
            log.error("%s; connections are refused", refusal(error, "a connection"))
        return True

    def _save(self) -> None:
        with suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _spend(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            os.close(spare)


def listen(host: str, port: int, limits: ClientLimits) -> Listener:
    """Make a listening socket. Its connections have bounded send buffers, and end when their peer acknowledges
    nothing for ``stall_seconds``.

    They inherit TCP_NODELAY, which asyncio sets only on sockets that name their protocol. Without it a reply's
    first delta waits 40 ms for the peer's delayed acknowledgement of the event before it.

    Raises ``OSError`` (``EADDRINUSE`` if the port is taken).
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = Listener.of(socket.create_server((host, port), family=family, backlog=512))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.send_buffer_bytes)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limits.stall_seconds * 1000))
    return sock
