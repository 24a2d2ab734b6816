"""Frames in MessagePack. On a socket with the subprotocol `PACKED` each frame is binary, and holds the same
object as the JSON text of `codec`. Both ends change one form into the other at the socket."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from ..errors import FrameMalformed, FrameTooLarge

PACKED = "holdfast.msgpack"


def packed(frame: bytes) -> bytes:
    """The same object in MessagePack. ``frame``: the JSON text of an event that was encoded here."""
    return msgspec.msgpack.encode(msgspec.json.decode(frame))


def unpacked(frame: bytes, max_bytes: int, max_values: int | None = None) -> bytes:
    """The same object as JSON text. ``frame``: one in MessagePack, from a peer. Raises `FrameTooLarge` above
    ``max_bytes``, or above ``max_values`` values, names included (None: there may be any number); and
    `FrameMalformed` for what is no MessagePack or holds what JSON has not: binary data, extensions, numbers
    that are not finite, keys that are no strings."""
    if len(frame) > max_bytes:
        raise FrameTooLarge(f"The frame has {len(frame)} bytes; at most {max_bytes} are allowed")
    if max_values is not None and _has_more_values(frame, max_values):
        raise FrameTooLarge(f"The frame has more than {max_values} values: send less in one frame")
    try:
        whole = msgspec.msgpack.decode(frame)
        if _is_json(whole):
            return msgspec.json.encode(whole)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, TypeError, ValueError) as error:
        raise FrameMalformed(f"The frame is not valid MessagePack: {str(error)[:256]}") from None
    raise FrameMalformed("The frame holds what JSON has not, such as binary data")


def _has_more_values(frame: bytes, most: int) -> bool:
    """Whether MessagePack holds more than ``most`` values, names included. Only the first byte of each is read:
    decoding them takes up to a microsecond for each, and memory."""
    if len(frame) <= most:
        return False
    at, end = 0, len(frame)
    for _ in range(most):
        head = frame[at]
        at += 1 + _BEHIND[head]
        if 0xA0 <= head < 0xC0:
            at += head & 0x1F
        elif (width := _SIZES.get(head)) is not None:
            at += int.from_bytes(frame[at - width : at])
        if at >= end:
            return False
    return True


_BEHIND = (
    bytes(0xC4)
    + bytes.fromhex("010204 020305 0408 01020408 01020408 0203050911 010204 02040204")
    + bytes(0x20)
)
"""By its first byte, how many bytes of a value come before its text or its entries: its size, or itself."""
_SIZES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""The first bytes of values of which the size, in so many bytes, follows."""


def _is_json(value: Any) -> bool:
    level = [value]
    while level:
        below: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                if not all(isinstance(key, str) for key in node):
                    return False
                below += node.values()
            elif isinstance(node, list):
                below += node
            elif isinstance(node, float):
                if not math.isfinite(node):
                    return False
            elif not isinstance(node, str | int | None):
                return False
        level = below
    return True
