"""One WebSocket: uvicorn's protocol, with limits on what a peer can make the server keep or do, and a way to
drop a client that does not read.

Uvicorn itself sends a close frame only behind a full buffer, queues a pong for each ping though the peer reads
none, takes any number of empty fragments, and waits for ever behind a head that the WebSocket library rejects.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Sequence
from enum import Enum, auto
from functools import lru_cache
from typing import Any, cast

import h11
from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.utils import ClientDisconnected, get_client_addr
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.datastructures import Headers
from websockets.exceptions import InvalidState
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

from ...kvstore.log_lines import about
from ..access.attribution import ATTRIBUTION, Attribution
from ..errors import GatewayError, SlowSender, TooManyControlFrames, TooManyFragments, wire_error
from ..settings import ClientLimits
from .cycles import let_go
from .deadlines import ConnectionStage, Deadline
from .flag import Flag
from .rates import TokenBucket

log = logging.getLogger(__name__)

DROP = "holdfast.drop"
"""The ASGI extension by which the application ends a WebSocket at once, without waiting until its buffer is
sent."""
BURST = "holdfast.burst"
"""The ASGI extension by which the application sends text frames without a task switch for each."""


SLICE_BYTES = 4096
"""The bytes that are parsed in one go, so that a broken limit is noticed before a whole read of 256 KiB is
parsed."""
FRAGMENT_BYTES = 64
"""What Python keeps of a fragment beside its payload."""
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
    HANDSHAKE = auto()
    """The handshake is not answered yet."""
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
        "_fragment_bytes",
        "_fragments",
        "_frame_rate",
        "_holds",
        "_rate_pause",
        "_unanswered",
        "_unparsed",
        "deadline",
    )
    limits = ClientLimits()

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.queue: Any = _Received()  # instead of uvicorn's, which are 4 KiB larger
        self.writable: Any = Flag(on=True)
        self.conn = ServerProtocol(  # the head of the handshake was parsed already: it begins with frames
            state=State.OPEN, max_size=self.config.ws_max_size, logger=self.logger
        )
        self.conn.state = State.CONNECTING
        self._frame_rate = TokenBucket(self.limits.frames, self.loop.time)
        self._control_rate = TokenBucket(self.limits.control_frames, self.loop.time)
        self.close_timeout = self.limits.close_seconds
        self._holds: list[Hold] = []
        self._unparsed = bytearray()
        self._fragments = self._fragment_bytes = 0  # of the message that is coming
        self._unanswered: bytes | None = None  # the latest ping
        self._rate_pause: asyncio.TimerHandle | None = None

    def take_over(
        self, transport: asyncio.Transport, deadline: Deadline, event: h11.Request, behind: bytes
    ) -> None:
        """Serve a connection on which ``event`` asked for a WebSocket, and ``behind`` has come already.
        ``deadline``: of the connection; what is left of the time for a head is the time to answer."""
        self.connection_made(transport)
        self.deadline = deadline
        deadline.watch(self)
        self._holds.append(Hold.HANDSHAKE)  # the transport is paused when something comes
        fields = [(name.decode("ascii"), value.decode("ascii", "ignore")) for name, value in event.headers]
        version = event.http_version.decode("ascii")
        target, method = event.target.decode("ascii"), event.method.decode("ascii")
        self.handle_connect(Request(target, Headers(fields), method, f"HTTP/{version}"))
        if self.transport.is_closing():  # it is no valid handshake, and was answered
            self.deadline.enter(ConnectionStage.CLOSING)
            return
        self.scope["headers"] = [(name.lower(), value) for name, value in event.headers]
        self._unparsed += behind

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
        if self._holds:
            self.transport.pause_reading()
            if Hold.HANDSHAKE in self._holds:
                self.deadline.hold(len(data))
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
            if not rest and (seconds := self._frame_rate.seconds_until(0.0)):
                self._hold(Hold.RATE)
                seconds = max(seconds, RATE_PAUSE_SECONDS)
                self._rate_pause = self.loop.call_later(seconds, self._release, Hold.RATE)
        if self.transport.is_closing():
            self.deadline.enter(ConnectionStage.CLOSING)
        elif self.handshake_complete and not self.close_sent:
            self._count_unfinished()

    def _count_unfinished(self) -> None:
        """Count what is kept of messages that are not whole, or not parsed; their time begins with the first
        byte."""
        size = len(self._unparsed) + len(self.conn.reader.buffer) + self._fragment_bytes
        if size:
            if self.deadline.stage is not ConnectionStage.MESSAGE:
                self.deadline.enter(ConnectionStage.MESSAGE)
            self.deadline.hold(size - self.deadline.held)

    def handle_events(self) -> None:
        """Called after bytes were parsed: handles their frames. The first one that breaks a limit closes the
        socket. Otherwise it answers the latest ping."""
        for event in self.conn.events_received():
            assert isinstance(event, Frame), "the parser began behind the head"
            if excess := self._excess(event):
                self._break_off(excess)
                return
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
        self._fragment_bytes += FRAGMENT_BYTES + len(frame.data)
        if frame.fin:
            self._fragments = self._fragment_bytes = 0
            if self.deadline.stage is ConnectionStage.MESSAGE:
                self.deadline.enter(ConnectionStage.SERVED)
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
            self.loop.call_soon(self._go_on)  # not at once: others run between two slices

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
        self.deadline.enter(ConnectionStage.CLOSING)

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

    def overdue(self, stage: ConnectionStage) -> None:
        """Called when the time of a stage is over (`TimedConnection`): ends the socket. A message that is not
        read, because of a `Hold`, may have ended long ago: it gets its time again."""
        if stage is not ConnectionStage.MESSAGE:
            self.transport.abort()
        elif self._holds:
            self.deadline.enter(ConnectionStage.MESSAGE)
        else:
            self._break_off(SlowSender())

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
        facts = cast("Attribution", self.scope.get(ATTRIBUTION, Attribution())).facts()
        client = get_client_addr(self.scope)
        log.warning("the client at %s was closed: %s", client, reason, extra=about("", **facts))
        self._hold(Hold.BROKEN_OFF)
        self.stop_keepalive()
        self.conn.data_to_send()
        self.conn.fail(code, reason)
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.close_sent = True
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.deadline.enter(ConnectionStage.CLOSING)
        self.close_timer = self.loop.call_later(self.limits.close_seconds, self.transport.abort)
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def shutdown(self) -> None:
        """Called by uvicorn when the server ends: closes the socket. One that was closed already for breaking a
        limit, or by its peer, is aborted, because TLS would wait for the peer; so is one without an answer."""
        if self.transport.is_closing() or not {Hold.BROKEN_OFF, Hold.HANDSHAKE}.isdisjoint(self._holds):
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
            self.deadline.enter(ConnectionStage.CLOSING)
        elif message["type"] == "websocket.accept":
            self.deadline.enter(ConnectionStage.SERVED)
            self.request.headers.clear()
            self.response.headers.clear()
            cast("list[tuple[bytes, bytes]]", self.scope["headers"]).clear()
            self._release(Hold.HANDSHAKE)
        elif message["type"] == "websocket.close":  # the application takes no messages any more
            self.deadline.enter(ConnectionStage.CLOSING)
            self._release(Hold.APPLICATION)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio when the connection is gone: gives the application the messages that had come
        before, then the disconnect."""
        if self._rate_pause is not None:
            self._rate_pause.cancel()
        if not self.close_sent and self.handshake_complete:
            self._parse(rest=True)
        super().connection_lost(exc)
        self.deadline.end()
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
