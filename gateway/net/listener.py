"""Uvicorn's protocols with limits: deadlines of requests, rates of frames, and a way to drop a client that does
not read. Requests can be refused before any of these protocols is made.

Uvicorn itself keeps silent connections and partial heads for ever, and sends a close frame only behind a full
buffer. It queues a pong for each ping though the peer reads none, and takes any number of empty fragments.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from typing import Any, Protocol, cast

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
from ..access.turn_queue import PLACE, Place
from ..errors import GatewayError, TooManyControlFrames, TooManyFragments, wire_error
from ..settings import ClientLimits
from .flag import Flag
from .rates import TokenBucket
from .transports import let_go

log = logging.getLogger(__name__)

DROP = "holdfast.drop"
"""The ASGI extension by which the application ends a WebSocket at once, without waiting until its buffer is
sent."""


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
    """What the listening socket and the connections that it accepts share. ``decide``: about each request."""

    def __init__(self, decide: Decide = lambda data, peer, *, close: None) -> None:
        self.decide = decide
        self._places: dict[int, Place] = {}

    def accept(self, fd: int) -> None:
        """The socket ``fd`` is accepted. The place of an earlier one with this number, which was closed before
        its connection was made, is given up."""
        if (left := self._places.pop(fd, None)) is not None:
            left.abandon()

    def hold(self, fd: int, place: Place) -> None:
        """A request has come on the accepted socket ``fd``, and has this place in the queue."""
        self._places[fd] = place

    def pick_up(self, fd: int) -> Place | None:
        """The place of the request on a new connection; None if none has come yet."""
        return self._places.pop(fd, None)


def http_protocol(limits: ClientLimits, door: Door | None = None) -> type[asyncio.Protocol]:
    """Make the protocol class of HTTP connections for uvicorn. It drops a connection if its request head is not
    complete after ``header_seconds``, or if it still sends a body so long after its request was answered.
    ``door``: decides about requests before they are parsed, and gives them their places in the queue."""
    entry = door or Door()

    class LimitedHTTP(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None
        _place: Place | None = None
        _head: bytearray | None = None  # the first part of a request's head, until its end has come

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(cast(asyncio.Transport, transport))
            self._place = entry.pick_up(transport.get_extra_info("socket").fileno())
            self._follow()

        def data_received(self, data: bytes) -> None:
            idle = self.conn.their_state is h11.IDLE  # no request is served
            begins = idle and not self.conn.trailing_data[0]
            if begins:
                whole = self._whole(data)
                if whole is None:
                    self._unset_keepalive_if_required()
                    self._follow()
                    return
                data = whole
            if self._place is None and begins:
                found = entry.decide(data, self.client, close=False)
                if isinstance(found, Refused):
                    self._refuse(found)
                    return
                self._place = found
            before = self.scope
            super().data_received(data)
            if idle and self._place is not None:
                if self.scope is before:  # it was no valid request
                    self._abandon()
                else:
                    cast("dict[str, object]", self.scope)[PLACE] = self._place
            self._follow()

        def _whole(self, data: bytes) -> bytes | None:
            """What the parser gets now: all that has come of a request, or None while its head has no end."""
            if self._head is None:
                if data[0] <= 0x20 or len(data) > HEAD_BYTES or HEAD_END.search(data):
                    return data
                self._head = bytearray(data)
                return None
            behind = max(0, len(self._head) - 2)
            self._head += data
            if len(self._head) <= HEAD_BYTES and not HEAD_END.search(self._head, behind):
                return None
            data, self._head = bytes(self._head), None
            return data

        def on_response_complete(self) -> None:
            self._abandon()
            super().on_response_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._abandon()
            self._disarm()
            super().connection_lost(exc)
            let_go(self.transport)

        def _refuse(self, refused: Refused) -> None:
            self.transport.write(refused.answer)
            if refused.close or self.transport.get_write_buffer_size():  # or the client reads no answers
                self.transport.close()
                return
            self._disarm()  # from now on the connection is as idle as after any answer
            self._unset_keepalive_if_required()
            closing = self.timeout_keep_alive_handler
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, closing)

        def _abandon(self) -> None:
            place, self._place = self._place, None
            if place is not None:
                place.abandon()

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
HEAD_BYTES = 8192
"""A head that is longer reaches the parser in parts, which refuses one that is too long."""
HEAD_END = re.compile(rb"\n\r?\n")
"""The end of a request's head, as h11 finds it. A head that comes byte by byte must not cost a parser's run for
each of them: two thousand connections can send such bytes for nothing."""
FIRST_BYTES = 1 << 16
"""The most bytes of a request about which the listening socket decides; a longer one is decided on later."""
PASS = 64
"""Connections that are refused in one pass of the event loop."""

BURST = "holdfast.burst"
"""The ASGI extension by which the application sends text frames without a task switch for each."""


SLICE_BYTES = 4096
"""The bytes that are parsed in one go, so that a broken limit is noticed before a whole read of 256 KiB is
parsed."""
RATE_PAUSE_SECONDS = 0.02
"""The shortest pause in reading a socket that sends too fast."""


class Hold(Enum):
    """A reason not to read from a socket. A socket is read while it has none."""

    APPLICATION = auto()
    """The application has not yet taken the messages that were read."""
    WRITES = auto()
    """The peer does not read: what is unsent is above the transport's mark."""
    RATE = auto()
    """The peer's frames come too fast."""
    BROKEN_OFF = auto()
    """The server has closed the socket because it broke a limit; nothing more is read. This reason is never
    removed."""


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
    """Uvicorn's protocol of one WebSocket, with limits on what a peer can make the server keep or do. It offers
    the application two extensions in its scope.

    ``[DROP]["drop"]()``: end the connection at once; what is unsent is lost. ``[BURST]["write"](frames)``, a
    coroutine: send UTF-8 text frames in one write; raises ``OSError`` if the connection is closed.
    ``[BURST]["write_now"](*frames)``: do that at once if all before is sent; returns whether it
    did.

    Of several unanswered pings only the latest is answered (RFC 6455, 5.5.3), and none while the peer does not
    read. An idle connection keeps little: once the application has accepted it, the request's headers are gone
    from the scope. `websocket_protocol` makes a class of it that has the server's limits.
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
        """Called by asyncio with bytes from the peer: parses them. While reading is on hold (`Hold`), keeps
        them for later; the transport is paused then, so that is at most one read."""
        self._unparsed += data
        self._parse()

    def _parse(self, *, rest: bool = False) -> None:
        """Parse the bytes that have come and are not parsed yet, and handle their frames, until there is a
        reason not to read (`Hold`). ``rest``: parse all of them in spite of such reasons, because nothing comes
        after them."""
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
        """Called after bytes were parsed: handles their frames. The first one that breaks a limit closes the
        socket. Otherwise it answers the latest ping."""
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
        """Count a frame against the limits. Returns the error of the limit that it breaks, or None. Data frames
        that come too fast break none: reading pauses instead."""
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
        """Queue a complete message for the application, which takes it by `receive`.

        Text that is not UTF-8 closes the socket with 1007; uvicorn would log a traceback. Reading pauses only
        if another message waits already: uvicorn pauses it after each message, which costs two system calls.
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
        """The next message, for the application; waits for it. If no other message is queued, reading from the
        socket goes on."""
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
        """Called by uvicorn when no pong has come in time. Without a reason not to read (`Hold`), closes the
        socket. With one, the pong may lie unread: waits as long again. A peer that is gone does not acknowledge
        the ping's bytes either, which ends the connection (TCP_USER_TIMEOUT, see `listen`)."""
        if self._holds and self.ping_timeout is not None:
            self.pong_timer = self.loop.call_later(self.ping_timeout, self.keepalive_timeout)
            return
        super().keepalive_timeout()

    # --- writing --------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """Called by asyncio when the write buffer is full, because the peer does not read: stops reading from
        the peer, too."""
        super().pause_writing()
        self._hold(Hold.WRITES)

    def resume_writing(self) -> None:
        """Called by asyncio when the write buffer has room again: answers the latest ping, and reads from the
        peer again."""
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
        """Close the socket because of ``error``, which breaks a limit, with the error's wire code as the reason
        of the close frame, and read nothing more. If the peer has not closed after ``close_seconds``, the
        connection is aborted."""
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
        """Called by uvicorn when the server ends: closes the socket. One that was closed already for breaking a
        limit is aborted, because TLS would wait for its peer."""
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
        """Called by asyncio when the connection is gone: gives the application the messages that had come
        before, then the disconnect."""
        if self._rate_pause is not None:
            self._rate_pause.cancel()
        if not self.close_sent:
            self._parse(rest=True)
        super().connection_lost(exc)
        let_go(self.transport)


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
    """A listening socket that answers what is refused before a connection is made of it: requests that its
    `Door` refuses, and all when the process has no file descriptor left.

    Without a descriptor such a connection would stay in the kernel's queue and wake the event loop again and
    again. One descriptor is kept spare: it is closed so that the connection can be accepted, answered and
    closed. A line in the log says when that begins and when it ends.
    """

    _spare: int | None = None
    _refusing = False
    _door: Door | None = None

    @classmethod
    def of(cls, sock: socket.socket, door: Door | None = None) -> Listener:
        """Make a listener of a listening socket. ``sock`` gives up its descriptor and cannot be used any more.
        ``door``: decides about requests that are there when their connection is accepted; None if their bytes
        cannot be read, as with TLS."""
        listener = cls(fileno=sock.detach())
        listener._door = door
        listener._save()
        return listener

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept the next connection that is not refused, and return it with the peer's address. Raises
        ``OSError`` like any socket, ``BlockingIOError`` if no connection waits, or after `PASS` refusals, so
        that the event loop does other things between them."""
        for _ in range(PASS):
            try:
                accepted = super().accept()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._refuse(error):
                    raise
                continue
            if self._refusing:
                self._refusing = False
                log.warning("connections are accepted again")
            if self._door is None or not self._turn_away(self._door, *accepted):
                return accepted
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
        door.accept(sock.fileno())
        try:
            data = sock.recv(FIRST_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:  # nothing has come yet, or the peer has gone
            return False
        found = door.decide(data, peer[:2], close=True)
        if isinstance(found, Refused):
            with sock, suppress(OSError):
                sock.recv(
                    FIRST_BYTES, socket.MSG_DONTWAIT
                )  # with unread data the kernel would discard the answer
                sock.send(found.answer, socket.MSG_DONTWAIT)
            return True
        if found is not None:
            door.hold(sock.fileno(), found)
        return False

    def _refuse(self, error: OSError) -> bool:
        """Answer one waiting connection with 503 and close it, by means of the spare descriptor. Returns False
        if there is no spare descriptor, so that nothing could be done. ``error``: why the connection could not
        be accepted, for the log. Raises ``BlockingIOError`` if no connection waits."""
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


def listen(host: str, port: int, limits: ClientLimits) -> socket.socket:
    """Make a listening socket, for a `Listener`. Its connections have bounded send buffers, and end when their
    peer acknowledges nothing for ``stall_seconds``.

    They inherit TCP_NODELAY, which asyncio sets only on sockets that name their protocol. Without it a reply's
    first delta waits 40 ms for the peer's delayed acknowledgement of the event before it.

    Raises ``OSError`` (``EADDRINUSE`` if the port is taken).
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, port), family=family, backlog=512)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.send_buffer_bytes)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limits.stall_seconds * 1000))
    return sock
