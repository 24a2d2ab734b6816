"""What uvicorn leaves open: a deadline for request heads, and a way to drop a reader that stalls.

Uvicorn keeps silent connections and partial heads for ever, and a close frame waits behind a full buffer.
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
from typing import Any, cast

import h11
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState

from ..runtime.sizing import refusal
from .settings import Limits

log = logging.getLogger(__name__)

DROP = "holdfast.drop"
"""The ASGI extension through which the application drops a WebSocket without waiting for its buffer."""


def http_protocol(limits: Limits) -> type[asyncio.Protocol]:
    """A protocol class that drops a connection whose request head is not whole after ``header_seconds``."""

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
            if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
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


class DroppableWebSocket(WebSocketsSansIOProtocol):
    """Offers the application two extensions of its scope.

    ``[DROP]["drop"]()``: discard what is unsent and be gone. ``[BURST]["write"](frames)``, a coroutine: send
    UTF-8 text frames in one write; raises ``OSError`` once the connection closes.
    """

    async def run_asgi(self) -> None:
        """Run the application with the extension in its scope."""
        extensions = cast("dict[str, dict[str, object]]", self.scope["extensions"])
        extensions[DROP] = {"drop": self.transport.abort}
        extensions[BURST] = {"write": self.write_all}
        await super().run_asgi()

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

    def send_receive_event_to_app(self) -> None:
        """Close with 1007 on text that is no UTF-8, which uvicorn would log with a traceback; and stop reading
        only where a message waits behind another: uvicorn stops after each, which costs two system calls.
        """
        if self.curr_msg_data_type != "text" or self.close_sent:
            super().send_receive_event_to_app()
            return
        frames, self.frames = self.frames, []
        try:
            text = b"".join(frames).decode()
        except UnicodeDecodeError:
            self.conn.send_close(1007)
            self.handle_parser_exception()
            return
        behind = not self.queue.empty()
        self.queue.put_nowait({"type": "websocket.receive", "text": text})
        if behind and not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()


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
