"""Frames: a 4-byte little-endian length, then one MessagePack object; the same on both ends.

Knows bytes and message types only: no socket, no engine. Whatever is too large, cut or malformed is refused
with one typed error, after which the stream cannot be trusted and the link is given up.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from ..errors import FrameInvalid, LengthInvalid, LinkClosed
from .messages import AnyReport, AnyVerb

MAX_FRAME_BYTES = 16 * 1024 * 1024  # a verb of three million token ids
_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()

M = TypeVar("M")


def frame(message: msgspec.Struct) -> bytes:
    """The bytes of ``message`` on the link.

    Raises ``LengthInvalid`` where it would be larger than the other end reads, or holds an integer over 64
    bits.
    """
    buffer = bytearray(_LENGTH.size)
    try:
        _encoder.encode_into(message, buffer, _LENGTH.size)
    except OverflowError as error:
        raise LengthInvalid(f"{type(message).__name__} cannot cross the link: {error}") from error
    length = len(buffer) - _LENGTH.size
    if length > MAX_FRAME_BYTES:
        raise LengthInvalid(
            f"{type(message).__name__} takes {length} bytes, the link carries at most {MAX_FRAME_BYTES}"
        )
    _LENGTH.pack_into(buffer, 0, length)
    return bytes(buffer)


class FrameReader(Generic[M]):
    """Bytes as they arrive in, whole messages out. After ``FrameInvalid`` it must not be fed again."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    @property
    def held_bytes(self) -> int:
        """Bytes of a frame that has not arrived whole."""
        return len(self._buffer)

    def feed(self, data: bytes | memoryview) -> Iterator[M]:
        """The messages that ``data`` completes, in order, to be read to the end.

        Raises ``FrameInvalid`` after the good ones: as soon as a length is out of bounds, whatever follows.
        """
        self._buffer += data
        at = 0
        while (body := self._body(at)) is not None:
            at += _LENGTH.size + len(body)
            yield decoded(self._decoder, body)
        del self._buffer[:at]

    def _body(self, at: int) -> bytes | None:
        start = at + _LENGTH.size
        if len(self._buffer) < start:
            return None
        length = checked_length(self._buffer, at)
        return bytes(self._buffer[start : start + length]) if len(self._buffer) >= start + length else None


def checked_length(buffer: bytes | bytearray, at: int = 0) -> int:
    """The length that stands at ``at``; raises ``FrameInvalid`` where no message is that long."""
    (length,) = _LENGTH.unpack_from(buffer, at)
    if not 0 < length <= MAX_FRAME_BYTES:
        raise FrameInvalid(f"a frame of {length} bytes; the link carries 1 to {MAX_FRAME_BYTES}")
    return int(length)


def decoded(decoder: msgspec.msgpack.Decoder[M], body: bytes) -> M:
    """The message in ``body``; raises ``FrameInvalid`` where it is none."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise FrameInvalid(f"a frame that is no message: {error}") from error


def verb_reader() -> FrameReader[AnyVerb]:
    """Reads what comes down to the engine."""
    return FrameReader(msgspec.msgpack.Decoder(AnyVerb))


def report_reader() -> FrameReader[AnyReport]:
    """Reads what comes up to the gateway."""
    return FrameReader(msgspec.msgpack.Decoder(AnyReport))


def receive_one(sock: socket.socket, kind: type[M]) -> M:
    """Wait for one frame on a blocking socket and read not a byte beyond it.

    Raises ``LinkClosed`` at the end of the stream, ``FrameInvalid`` where the frame is not a ``kind``.
    """
    length = checked_length(_exactly(sock, _LENGTH.size))
    return decoded(msgspec.msgpack.Decoder(kind), _exactly(sock, length))


def _exactly(sock: socket.socket, count: int) -> bytes:
    buffer = bytearray()
    while len(buffer) < count:
        piece = sock.recv(count - len(buffer))
        if not piece:
            raise LinkClosed("the link ended before a whole frame came")
        buffer += piece
    return bytes(buffer)
