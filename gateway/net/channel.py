"""A connection that carries whole frames: over a WebSocket, or in memory to a client in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from anyio import (
    BrokenResourceError,
    ClosedResourceError,
    EndOfStream,
    WouldBlock,
    create_memory_object_stream,
)
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from starlette.websockets import WebSocket, WebSocketDisconnect

from ...sdk.frames.codec import MAX_FRAME_VALUES
from ...sdk.frames.packed import packed, unpacked
from .websocket_connection import BURST, DROP

SERVE = "holdfast.serve"
"""The key in the scope of an accepted WebSocket of the function that serves it to its end. The outermost
layer calls it, without arguments, when all others have returned: an open connection would otherwise keep the
frame of each, 6 KiB in all."""


class ChannelClosed(Exception):
    """The connection is closed, by either side. ``code``, ``reason``: those of the WebSocket's close frame."""

    def __init__(self, code: int = 1000, reason: str = "") -> None:
        super().__init__(f"{code} {reason}".rstrip())
        self.code = code
        self.reason = reason


class Channel(Protocol):
    """The server's end of a connection that carries frames. One task receives, another sends."""

    async def receive(self) -> bytes | str:
        """The next frame; waits for it. Raises ``ChannelClosed``, or a `FrameError` for one that is not in the
        channel's form."""

    async def send(self, frame: bytes) -> None:
        """Send one frame; wait while the other side does not read. Raises ``ChannelClosed``."""

    async def send_some(self, frames: Sequence[bytes]) -> int:
        """Send the first frame as `send` does, and later ones while none has to wait. Returns how many frames
        were sent, at least one. Raises ``ChannelClosed``."""

    def send_now(self, *frames: bytes) -> bool:
        """Send frames if that needs no wait at all. Returns whether they were sent: all or none."""

    async def close(self, code: int, reason: str) -> None:
        """Close the connection with a close code and a reason. Does nothing if it is closed already."""

    def drop(self) -> None:
        """End the connection at once: what is unsent is lost, and no close frame is sent."""


class SocketChannel:
    """An accepted WebSocket as a `Channel`. It sends text frames."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self._burst: dict[str, Any] = socket.scope.get("extensions", {}).get(BURST, {})
        self.send_now: Callable[..., bool] = self._burst.get("write_now", lambda *frames: False)
        """Sends text frames in one write if nothing sent before is still unsent, and the server offers that
        (`LimitedWebSocket`). Returns whether they were sent."""

    async def receive(self) -> bytes | str:
        """The next text or binary frame; waits for it. Raises ``ChannelClosed``."""
        message = await self._socket.receive()
        if message["type"] == "websocket.disconnect":
            raise ChannelClosed(message.get("code", 1005), message.get("reason") or "")
        text: str | None = message.get("text")
        if text is not None:
            return text
        data: bytes = message.get("bytes") or b""
        return data

    async def send(self, frame: bytes) -> None:
        """Send one frame. Raises ``ChannelClosed``."""
        try:
            await self._socket.send({"type": "websocket.send", **self._written(frame)})
        except (WebSocketDisconnect, RuntimeError, OSError) as error:
            raise ChannelClosed(1006, str(error)) from error

    def _written(self, frame: bytes) -> dict[str, str | bytes]:
        """A frame as the ASGI message has it."""
        return {"text": frame.decode()}

    async def send_some(self, frames: Sequence[bytes]) -> int:
        """Send all frames in one write if the server offers that (`LimitedWebSocket`), else the first alone.
        Returns how many were sent. Raises ``ChannelClosed``."""
        write = self._burst.get("write")
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
        """Abort the connection, if the server offers that (`LimitedWebSocket`); else do nothing."""
        drop = self._socket.scope.get("extensions", {}).get(DROP, {}).get("drop")
        if drop is not None:
            drop()


class PackedChannel(SocketChannel):
    """An accepted WebSocket with the subprotocol `sdk.frames.packed.PACKED`: frames are JSON here, and binary
    ones of MessagePack on the socket. ``frame_bytes``: the most bytes of a frame that is received."""

    def __init__(self, socket: WebSocket, frame_bytes: int) -> None:
        super().__init__(socket)
        self._frame_bytes = frame_bytes
        self._burst = {}  # it writes text frames
        self.send_now = lambda *frames: False

    async def receive(self) -> bytes | str:
        """The next frame as JSON; one that came as text is passed on. Raises ``ChannelClosed``, and what
        `unpacked` raises."""
        frame = await super().receive()
        return frame if isinstance(frame, str) else unpacked(frame, self._frame_bytes, MAX_FRAME_VALUES)

    def _written(self, frame: bytes) -> dict[str, str | bytes]:
        return {"bytes": packed(frame)}


class MemoryChannel:
    """One end of a connection inside this process, made in pairs by ``memory_pair``. ``incoming``,
    ``outgoing``: the streams of frames in each direction. ``endings``: the close codes and reasons of both
    ends, in the order in which they closed; both ends share this list, and its first entry counts. ``fault``
    makes the error that this end raises where others raise ``ChannelClosed``."""

    def __init__(
        self,
        incoming: MemoryObjectReceiveStream[bytes],
        outgoing: MemoryObjectSendStream[bytes],
        endings: list[ChannelClosed],
        fault: Callable[[ChannelClosed], Exception] = lambda closed: closed,
    ) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._endings = endings
        self._fault = fault

    async def receive(self) -> bytes:
        """The next frame; waits for it. Frames that were sent before a close still come. Raises
        ``ChannelClosed``."""
        try:
            return await self._incoming.receive()
        except (EndOfStream, ClosedResourceError):
            raise self._ended() from None

    async def send_some(self, frames: Sequence[bytes]) -> int:
        """Send the first frame, and later ones while the other end has room. Returns how many were sent. Raises
        ``ChannelClosed``."""
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

    def send_now(self, *frames: bytes) -> bool:
        """Send a single frame if the other end has room for it. Returns whether it was sent; false for
        several."""
        if len(frames) > 1:
            return False
        try:
            self._outgoing.send_nowait(frames[0])
        except (WouldBlock, BrokenResourceError, ClosedResourceError):
            return False
        return True

    async def send(self, frame: bytes) -> None:
        """Send one frame; wait while the other end has no room. Raises ``ChannelClosed``."""
        try:
            await self._outgoing.send(frame)
        except (BrokenResourceError, ClosedResourceError):
            raise self._ended() from None

    async def close(self, code: int, reason: str) -> None:
        """Close both directions. Either end that uses the connection afterwards gets ``ChannelClosed`` with
        this code and reason, unless it was closed before."""
        self._close(ChannelClosed(code, reason))

    async def aclose(self) -> None:
        """Close both directions, with the code 1000: nothing is wrong."""
        self._close(ChannelClosed())

    def drop(self) -> None:
        """Close both directions as `close` does, with the code 1006, which stands for a lost connection."""
        self._close(ChannelClosed(1006, "dropped"))

    def _close(self, closed: ChannelClosed) -> None:
        self._endings.append(closed)
        self._outgoing.close()
        self._incoming.close()

    def _ended(self) -> Exception:
        first = self._endings[0] if self._endings else ChannelClosed(1006)
        return self._fault(ChannelClosed(first.code, first.reason))


def memory_pair(
    depth: int = 64, fault: Callable[[ChannelClosed], Exception] = lambda closed: closed
) -> tuple[MemoryChannel, MemoryChannel]:
    """Make a connection inside this process and return its two ends. A sender waits while ``depth`` of its
    frames are unread. ``fault``: of the second end."""
    there_send, there = create_memory_object_stream[bytes](depth)
    back_send, back = create_memory_object_stream[bytes](depth)
    endings: list[ChannelClosed] = []
    return MemoryChannel(there, back_send, endings), MemoryChannel(back, there_send, endings, fault)
