"""How whole frames reach one client and come from it: over a WebSocket, or in memory to a client of this
process.

Knows nothing of what the frames say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from anyio import (
    BrokenResourceError,
    ClosedResourceError,
    EndOfStream,
    WouldBlock,
    create_memory_object_stream,
)
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from starlette.websockets import WebSocket, WebSocketDisconnect

from .listener import BURST, DROP


class ChannelClosed(Exception):
    """The other side has gone, or this one has closed."""

    def __init__(self, code: int = 1000, reason: str = "") -> None:
        super().__init__(f"{code} {reason}".rstrip())
        self.code = code
        self.reason = reason


class Channel(Protocol):
    """The server's end of one connection. One task receives, another sends."""

    async def receive(self) -> bytes | str:
        """The next frame. Raises ``ChannelClosed``."""

    async def send(self, frame: bytes) -> None:
        """Hand one frame on; waits while the other side does not read. Raises ``ChannelClosed``."""

    async def send_some(self, frames: Sequence[bytes]) -> int:
        """Hand on the first, as `send` does, and those after it that need no waiting; says how many."""

    async def close(self, code: int, reason: str) -> None:
        """Say goodbye; harmless when the connection has ended."""

    def drop(self) -> None:
        """End it at once: what is unsent is lost, and no goodbye waits behind it."""


class SocketChannel:
    """Text frames over an accepted WebSocket."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket

    async def receive(self) -> bytes | str:
        """The next frame. Raises ``ChannelClosed``."""
        message = await self._socket.receive()
        if message["type"] == "websocket.disconnect":
            raise ChannelClosed(message.get("code", 1005), message.get("reason") or "")
        text: str | None = message.get("text")
        if text is not None:
            return text
        data: bytes = message.get("bytes") or b""
        return data

    async def send(self, frame: bytes) -> None:
        """Send one text frame. Raises ``ChannelClosed``."""
        try:
            await self._socket.send({"type": "websocket.send", "text": frame.decode()})
        except (WebSocketDisconnect, RuntimeError, OSError) as error:
            raise ChannelClosed(1006, str(error)) from error

    async def send_some(self, frames: Sequence[bytes]) -> int:
        """Send all in one write where the server offers it, else the first. Raises ``ChannelClosed``."""
        write = self._socket.scope.get("extensions", {}).get(BURST, {}).get("write")
        if write is None:
            await self.send(frames[0])
            return 1
        try:
            await write(frames)
        except OSError as error:
            raise ChannelClosed(1006, str(error)) from error
        return len(frames)

    async def close(self, code: int, reason: str) -> None:
        """Send a close frame, if the socket is still open."""
        try:
            await self._socket.close(code, reason)
        except (WebSocketDisconnect, RuntimeError, OSError):
            return

    def drop(self) -> None:
        """Abort the transport, where the server offers it."""
        drop = self._socket.scope.get("extensions", {}).get(DROP, {}).get("drop")
        if drop is not None:
            drop()


class MemoryChannel:
    """One end of a connection inside this process, made in pairs by ``memory_pair``."""

    def __init__(
        self,
        incoming: MemoryObjectReceiveStream[bytes],
        outgoing: MemoryObjectSendStream[bytes],
        endings: list[ChannelClosed],
    ) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._endings = endings  # shared by both ends; the first one counts

    async def receive(self) -> bytes:
        """The next frame, also of those sent before a close. Raises ``ChannelClosed``."""
        try:
            return await self._incoming.receive()
        except (EndOfStream, ClosedResourceError):
            raise self._ended() from None

    async def send_some(self, frames: Sequence[bytes]) -> int:
        """Hand on as many as there is room for, one at least. Raises ``ChannelClosed``."""
        await self.send(frames[0])
        sent = 1
        try:
            for frame in frames[1:]:
                self._outgoing.send_nowait(frame)
                sent += 1
        except WouldBlock:
            return sent
        except (BrokenResourceError, ClosedResourceError):
            raise self._ended() from None
        return sent

    async def send(self, frame: bytes) -> None:
        """Hand one frame on. Raises ``ChannelClosed``."""
        try:
            await self._outgoing.send(frame)
        except (BrokenResourceError, ClosedResourceError):
            raise self._ended() from None

    async def close(self, code: int, reason: str) -> None:
        """Close both ways."""
        self._endings.append(ChannelClosed(code, reason))
        self._outgoing.close()
        self._incoming.close()

    def drop(self) -> None:
        """Close both ways."""
        self._endings.append(ChannelClosed(1006, "dropped"))
        self._outgoing.close()
        self._incoming.close()

    def _ended(self) -> ChannelClosed:
        first = self._endings[0] if self._endings else ChannelClosed(1006)
        return ChannelClosed(first.code, first.reason)


def memory_pair(depth: int = 64) -> tuple[MemoryChannel, MemoryChannel]:
    """Two ends of one connection; a sender waits while ``depth`` frames are unread."""
    there_send, there = create_memory_object_stream[bytes](depth)
    back_send, back = create_memory_object_stream[bytes](depth)
    endings: list[ChannelClosed] = []
    return MemoryChannel(there, back_send, endings), MemoryChannel(back, there_send, endings)
