"""The frames between gateway and engine: verbs down; replies, rows of steps and heartbeats up.

Both ends share these definitions. A frame is a 4-byte little-endian length and one MessagePack object.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from enum import StrEnum
from typing import Generic, TypeAlias, TypeVar

import msgspec

from ..errors import FrameInvalid, LengthInvalid, LinkClosed
from ..verbs import AnyVerb, LoadedAdapter, Refusal, SamplingDefaults, Step, VerbReply


class Phase(StrEnum):
    """What the engine is doing: loading a model, compiling kernels, computing steps, or nothing."""

    LOADING = "loading"
    COMPILING = "compiling"
    STEPPING = "stepping"
    IDLE = "idle"


COMPILING = "compiling "
"""How the ``detail`` of a heartbeat begins that reports a kernel being compiled; the kernel's name follows."""


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="heartbeat"):
    """The engine is in ``phase`` and sends its next heartbeat within ``deadline`` seconds.

    ``detail`` and ``fraction`` (0 to 1) report the progress of loading.
    """

    phase: Phase
    deadline: float
    detail: str = ""
    fraction: float = 0.0


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The first message of a loaded engine: what it serves.

    ``kernels``: the name of the backend that computes. ``dtype``: of the weights and of computing;
    ``parameters``: numbers of the weights; ``weights``: their bytes. ``kv_dtype``: of the KV cache.
    ``quantisation``: how weights are quantised, in words; empty: they are not.
    ``max_context``: in tokens; ``block_bytes``: of one block; ``room``: how many tokens the blocks hold, if
    all KV groups keep all of them. ``notes``: what an operator should know of the model, each one line.
    ``max_sequences``: turns that may run at once. ``memory``: what the device's own memory is for, one line;
    empty: it has none. ``adapters``: those that are loaded.
    """

    model: str
    device: str
    dtype: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_context: int
    block_tokens: int
    blocks: int
    block_bytes: int
    parameters: int
    defaults: SamplingDefaults = SamplingDefaults()
    kernels: str = "reference"
    kv_dtype: str = ""
    quantisation: str = ""
    notes: tuple[str, ...] = ()
    max_sequences: int = 64
    memory: str = ""
    weights: int = 0
    adapters: tuple[LoadedAdapter, ...] = ()
    room: int = 0


class Fatal(msgspec.Struct, frozen=True, array_like=True, tag="fatal"):
    """The engine cannot start or go on; its process ends after this message. ``code`` names a class of
    ``runtime.errors``."""

    code: str
    message: str


AnyReport: TypeAlias = VerbReply | Refusal | Step | Heartbeat | Hello | Fatal


# --- framing ------------------------------------------------------------------------------------------------

MAX_FRAME_BYTES = 16 * 1024 * 1024  # a verb with three million token ids
_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()

M = TypeVar("M")


def frame(message: msgspec.Struct) -> bytes:
    """Encode ``message`` as one frame.

    Raises ``LengthInvalid`` for one that is larger than the other end reads, or has an integer of more than
    64 bits.
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
    """Decodes messages from bytes as they arrive. After ``FrameInvalid`` it must not be fed again."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[M]:
        """The messages that ``data`` completes, in order. The caller must read the iterator to its end.

        Raises ``FrameInvalid`` after the valid messages, if a frame's length is out of bounds or it is no
        message.
        """
        self._buffer += data
        at = 0
        while (start := at + _LENGTH.size) <= len(self._buffer):
            end = start + _checked_length(self._buffer, at)
            if end > len(self._buffer):
                break
            yield _decoded(self._decoder, bytes(self._buffer[start:end]))
            at = end
        del self._buffer[:at]


def _checked_length(buffer: bytes | bytearray, at: int = 0) -> int:
    """The frame length that ``buffer`` has at offset ``at``. Raises ``FrameInvalid`` if no message can have
    it."""
    (length,) = _LENGTH.unpack_from(buffer, at)
    if not 0 < length <= MAX_FRAME_BYTES:
        raise FrameInvalid(f"a frame of {length} bytes; the link carries 1 to {MAX_FRAME_BYTES}")
    return int(length)


def _decoded(decoder: msgspec.msgpack.Decoder[M], body: bytes) -> M:
    """The message in ``body``. Raises ``FrameInvalid`` if it is none."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise FrameInvalid(f"a frame that is no message: {error}") from error


def verb_reader() -> FrameReader[AnyVerb]:
    """A reader of verbs, for the engine's end."""
    return FrameReader(msgspec.msgpack.Decoder(AnyVerb))


def report_reader() -> FrameReader[AnyReport]:
    """A reader of reports, for the gateway's end."""
    return FrameReader(msgspec.msgpack.Decoder(AnyReport))


def receive_one(sock: socket.socket, kind: type[M]) -> M:
    """Read one frame from a blocking socket, and no byte beyond it.

    Raises ``LinkClosed`` at the end of the stream, ``FrameInvalid`` if the frame is not a ``kind``.
    """
    length = _checked_length(_exactly(sock, _LENGTH.size))
    return _decoded(msgspec.msgpack.Decoder(kind), _exactly(sock, length))


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = sock.recv(count, socket.MSG_WAITALL)
    if len(data) < count:
        raise LinkClosed("the link ended before a whole frame came")
    return data
