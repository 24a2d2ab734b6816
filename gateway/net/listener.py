"""What uvicorn leaves open: deadlines of requests, limits of what one socket may send, and a way to drop a
reader that stalls.

Uvicorn keeps silent connections and partial heads for ever, and a close frame waits behind a full buffer. It
queues a pong for each ping, whether or not the peer reads them, and takes any number of empty fragments.
Knows nothing of routes or sessions.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum, auto
from typing import Any, cast

import h11
from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import ClientDisconnected, get_client_addr
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState
from websockets.frames import Frame, Opcode
from websockets.http11 import Request

from ...runtime.kv_placement.sizing import refusal
from ..errors import GatewayError, TooManyControlFrames, TooManyFragments, wire_error
from ..settings import Limits
from .rates import TokenBucket

log = logging.getLogger(__name__)

DROP = "holdfast.drop"
"""The ASGI extension through which the application drops a WebSocket without waiting for its buffer."""


def http_protocol(limits: Limits) -> type[asyncio.Protocol]:
    """A protocol class that drops a connection whose request head is not whole after ``header_seconds``, or
    that sends a body for so long after its request was answered.
    """

    class PunctualHTTP(H11Protocol):
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

    return PunctualHTTP


REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
)
"""For a connection that finds no descriptor left."""

BURST = "holdfast.burst"
"""The ASGI extension through which the application sends several text frames in one write."""


SLICE_BYTES = 4096
"""What is parsed at once, so that a limit is noticed before a whole read of 256 KiB is worked through."""
RATE_PAUSE_SECONDS = 0.02
"""The shortest pause of a socket whose frames come too fast."""


class Hold(Enum):
    """Why a socket is not read."""

    APPLICATION = auto()
    """Messages wait for the application."""
    WRITES = auto()
    """The peer does not read: what is unsent is above the transport's mark."""
    RATE = auto()
    """Its frames come too fast."""
    BROKEN_OFF = auto()
    """It is closed for what it sent, and nothing it sends counts any more. Never released."""


class DroppableWebSocket(WebSocketsSansIOProtocol):
    """Offers the application two extensions of its scope.

    ``[DROP]["drop"]()``: discard what is unsent and be gone. ``[BURST]["write"](frames)``, a coroutine: send
    UTF-8 text frames in one write; raises ``OSError`` once the connection closes.

    Bounds what a peer can make the server keep or do. Of unanswered pings only the latest is answered
    (RFC 6455, 5.5.3), and none while the peer does not read. Make it with `websocket_protocol`.
    """

    limits = Limits()

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self._frame_rate = TokenBucket(self.limits.frames, self.loop.time)
        self._control_rate = TokenBucket(self.limits.control_frames, self.loop.time)
        self.close_timeout = self.limits.close_seconds
        self._holds: set[Hold] = set()
        self._unparsed = bytearray()
        self._fragments = 0  # of the message that is coming
        self._unanswered: bytes | None = None  # the latest ping
        self._rate_pause: asyncio.TimerHandle | None = None

    async def run_asgi(self) -> None:
        """Run the application with the extensions in its scope."""
        extensions = cast("dict[str, dict[str, object]]", self.scope["extensions"])
        extensions[DROP] = {"drop": self.transport.abort}
        extensions[BURST] = {"write": self.write_all}
        await super().run_asgi()

    # --- reading --------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse it, or keep it while the socket is on hold: at most one read."""
        self._unparsed += data
        self._parse()

    def _parse(self, *, rest: bool = False) -> None:
        """Parse what has come until a hold; ``rest``: all of it, nothing comes after it."""
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
        """Hand on what was parsed, within the limits."""
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
        """Count a frame; the error of the limit that it breaks."""
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
        """Close with 1007 on text that is no UTF-8, which uvicorn would log with a traceback; and stop reading
        only where a message waits behind another: uvicorn stops after each, which costs two system calls.
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
        """The next message."""
        message = await self.queue.get()
        if self.queue.empty():
            self._release(Hold.APPLICATION)
        return message

    def _hold(self, why: Hold) -> None:
        if not self._holds:
            self.transport.pause_reading()
        self._holds.add(why)

    def _release(self, why: Hold) -> None:
        if why not in self._holds:
            return
        self._holds.discard(why)
        if not self._holds:
            self.loop.call_soon(self._go_on)  # not at once: others have their turn between two slices

    def _go_on(self) -> None:
        self._parse()
        if not self._holds:
            self.transport.resume_reading()

    def keepalive_timeout(self) -> None:
        """The peer's pong may lie unread behind a hold: wait on. A peer that is gone does not acknowledge the
        ping either, which ends the connection (TCP_USER_TIMEOUT, see `listen`).
        """
        if self._holds and self.ping_timeout is not None:
            self.pong_timer = self.loop.call_later(self.ping_timeout, self.keepalive_timeout)
            return
        super().keepalive_timeout()

    # --- writing --------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """The peer does not read: do not read it either."""
        super().pause_writing()
        self._hold(Hold.WRITES)

    def resume_writing(self) -> None:
        """It reads again."""
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
        """Close and say why, and read no more; the peer has ``close_seconds`` to take it."""
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
        """The server goes: say so, but to one that was broken off, whose TLS would wait for its goodbye."""
        if Hold.BROKEN_OFF in self._holds:
            self.transport.abort()
        else:
            super().shutdown()

    async def write_all(self, frames: Sequence[bytes]) -> None:
        """Send text frames, each whole, in one write; waits, as `send`, while the buffer is full."""
        await self.writable.wait()
        if self.disconnected or self.close_sent:
            raise ClientDisconnected
        try:
            for frame in frames:
                self.conn.send_text(frame)
        except InvalidState as error:
            raise ClientDisconnected from error
        self.transport.write(b"".join(self.conn.data_to_send()))

    async def send(self, message: ASGISendEvent) -> None:
        """As uvicorn does; a refusal that was sent whole is no unfinished handshake, which it would log."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True
        elif message["type"] == "websocket.accept":
            self._answer_ping()
        elif message["type"] == "websocket.close":  # messages are passed over now: nobody takes them
            self._release(Hold.APPLICATION)

    def connection_lost(self, exc: Exception | None) -> None:
        """What had come is still handed on."""
        if self._rate_pause is not None:
            self._rate_pause.cancel()
        if not self.close_sent:
            self._parse(rest=True)
        super().connection_lost(exc)


def websocket_protocol(limits: Limits) -> type[DroppableWebSocket]:
    """The protocol class of WebSockets with these limits."""
    return type("LimitedWebSocket", (DroppableWebSocket,), {"limits": limits})


class Listener(socket.socket):
    """A listening socket that refuses connections this process has no descriptor for.

    Left in the queue they would hang there, and wake the loop for as long as they do. One descriptor is kept
    spare: with its number a connection is accepted, answered with 503, and closed. A line in the log when that
    begins, and one when it ends.
    """

    _spare: int | None = None
    _refusing = False

    @classmethod
    def of(cls, sock: socket.socket) -> Listener:
        """Takes over ``sock``."""
        listener = cls(fileno=sock.detach())
        listener._save()
        return listener

    def accept(self) -> tuple[socket.socket, Any]:
        """As ``socket.socket``; those that are refused are not returned."""
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
        """Let go of the spare descriptor, too."""
        self._spend()
        super().close()

    def _refuse(self, error: OSError) -> bool:
        """Answer one that waits; False: there is no spare descriptor."""
        if self._spare is None:
            self._save()
        if self._spare is None:
            return False
        self._spend()
        try:
            refused, _ = super().accept()  # the kernel asks for a descriptor first: perhaps none waits
            with refused, suppress(OSError):
                refused.setblocking(False)
                with suppress(BlockingIOError):
                    refused.recv(1 << 16)  # unread it would have the kernel throw the answer away
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


def listen(host: str, port: int, limits: Limits) -> Listener:
    """A listening socket whose connections have bounded buffers and end when a peer takes nothing for long.

    They inherit TCP_NODELAY, which asyncio sets only on sockets that name their protocol: without it a
    reply's first delta waits 40 ms behind the peer's delayed acknowledgement of the event before it.

    Raises ``OSError`` (``EADDRINUSE`` where the port is taken).
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = Listener.of(socket.create_server((host, port), family=family, backlog=512))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.send_buffer_bytes)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limits.stall_seconds * 1000))
    return sock
