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


def unpacked(frame: bytes, max_bytes: int) -> bytes:
    """The same object as JSON text. ``frame``: one in MessagePack, from a peer. Raises `FrameTooLarge` above
    ``max_bytes``, and `FrameMalformed` for what is no MessagePack or holds what JSON has not: binary data,
    extensions, numbers that are not finite, keys that are no strings."""
    if len(frame) > max_bytes:
        raise FrameTooLarge(f"The frame has {len(frame)} bytes; at most {max_bytes} are allowed")
    try:
        whole = msgspec.msgpack.decode(frame)
        if _is_json(whole):
            return msgspec.json.encode(whole)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, TypeError, ValueError) as error:
        raise FrameMalformed(f"The frame is not valid MessagePack: {str(error)[:256]}") from None
    raise FrameMalformed("The frame holds what JSON has not, such as binary data")


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
