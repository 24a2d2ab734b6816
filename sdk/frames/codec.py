"""Bytes to events and back. Frames are JSON text; each invalid one raises a `FrameError` and nothing else."""

from __future__ import annotations

import re
from typing import Any, NoReturn

import msgspec

from ..errors import (
    FieldInvalid,
    FieldMissing,
    FieldMistyped,
    FieldUnknown,
    FieldUnsupported,
    FrameError,
    FrameMalformed,
    FrameTooLarge,
)
from .client import ClientEvent
from .server import ServerEvent
from .unserved import is_unserved

MAX_FRAME_BYTES = 1 << 20
MAX_EVENT_ID = 512
MAX_QUOTED = 256

_CLIENT: msgspec.json.Decoder[ClientEvent] = msgspec.json.Decoder(ClientEvent)
_SERVER: msgspec.json.Decoder[ServerEvent] = msgspec.json.Decoder(ServerEvent)
_ENCODER = msgspec.json.Encoder()


class _Named(msgspec.Struct):
    event_id: str | None = None


_NAMED: msgspec.json.Decoder[_Named] = msgspec.json.Decoder(_Named)

# A message of msgspec: "Object contains unknown field `x` - at `$.session.tools[0]`". It may quote a megabyte
# of the frame, so it is split by plain searches and shortened first.
_UNKNOWN = "Object contains unknown field `"
_MISSING = "Object missing required field `"
_HALF_PAIR = "a string holds one half of a surrogate pair (an escape \\ud800 to \\udfff alone)"
_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\\\")
_HALF = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


def decode_client(frame: bytes | str, max_bytes: int = MAX_FRAME_BYTES) -> ClientEvent:
    """The client event in `frame`. Raises a `FrameError` that names the field and the event's own id."""
    data = _checked(frame, max_bytes)
    try:
        return _CLIENT.decode(data)
    except msgspec.ValidationError as error:
        _refuse(data, str(error))
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        cause = _HALF_PAIR if _has_half_pair(data) else str(error)
        raise FrameMalformed(_quoted(f"The frame is not valid JSON: {cause}")) from None


def decode_server(frame: bytes | str) -> ServerEvent | None:
    """The server event in `frame`; None for a type this version does not know. Raises `FrameError`."""
    try:
        return _SERVER.decode(frame)
    except msgspec.ValidationError as error:
        cause = str(error)
        if cause.startswith("Invalid value") and cause.endswith(" - at `$.type`"):
            return None
        raise FieldInvalid(_quoted(cause)) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise FrameMalformed(_quoted(f"The frame is not valid JSON: {error}")) from None


def encode(event: ClientEvent | ServerEvent) -> bytes:
    """The event as JSON, in UTF-8."""
    return _ENCODER.encode(event)


def framed(event: ClientEvent) -> bytes:
    """The event as a checked frame. Raises a `FrameError` where it cannot be encoded or is too large."""
    try:
        frame = encode(event)
    except UnicodeError:
        raise FrameMalformed("The text holds a lone surrogate, which is no character") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise FrameMalformed(_quoted(f"The event is no JSON: {error}")) from None
    return _checked(frame, MAX_FRAME_BYTES)


def _has_half_pair(data: bytes) -> bool:
    """Whether the data holds an escape such as `\\ud83d` without its other half."""
    return _HALF.search(_PAIR.sub(b" ", data)) is not None


def _checked(frame: bytes | str, max_bytes: int) -> bytes:
    try:
        data = frame.encode() if isinstance(frame, str) else frame
    except UnicodeEncodeError:
        raise FrameMalformed("The frame is not valid text: it holds lone surrogates") from None
    if len(data) > max_bytes:
        message = f"The frame has {len(data)} bytes; at most {max_bytes} are allowed"
        raise FrameTooLarge(message, event_id=_event_id_alone(data))
    return data


def _event_id_alone(data: bytes) -> str | None:
    """The event id of a large frame; the rest is not decoded."""
    try:
        found = _NAMED.decode(data).event_id
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return found if found is not None and len(found) <= MAX_EVENT_ID else None


def _refuse(data: bytes, text: str) -> NoReturn:
    """Raise the typed error for msgspec's message about a frame that is JSON, but no valid event."""
    whole = _lenient(data)
    event_id = _event_id(whole)
    cause, path = _located(text)
    field = cause.startswith((_UNKNOWN, _MISSING))
    if field:
        path = f"{path}.{_quoted(cause.split('`', 1)[1].removesuffix('`'))}".removeprefix(".")
    param = path or None
    value = _at(whole, path)
    if is_unserved(path, value):
        shown = f" {_quoted(value)!r}" if isinstance(value, str) else ""
        raise FieldUnsupported(f"`{param}`{shown} is in the standard, but not served here", param, event_id)
    if not field:
        raise _kind(cause)(_quoted(cause) + (f" at '{param}'" if param else ""), param, event_id)
    if cause.startswith(_UNKNOWN):
        raise FieldUnknown(f"Unknown parameter: '{param}'", param, event_id)
    raise FieldMissing(f"Missing required parameter: '{param}'", param, event_id)


def _located(text: str) -> tuple[str, str]:
    """The parts of a message of msgspec: the cause, and the path (`session.tools[0]`)."""
    cause, _, place = text.rpartition(" - at `")
    place = place.removeprefix("key` in `")
    if not cause or not place.startswith("$"):
        return text, ""
    return cause, _quoted(place[1:].removesuffix("`").removeprefix("."))


def _kind(cause: str) -> type[FrameError]:
    bounds = ("` >", "` <", " of length", " matching ")
    mistyped = cause.startswith("Expected `") and not any(word in cause for word in bounds)
    return FieldMistyped if mistyped else FieldInvalid


def _lenient(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def _event_id(whole: Any) -> str | None:
    found = whole.get("event_id") if isinstance(whole, dict) else None
    return found if isinstance(found, str) and len(found) <= MAX_EVENT_ID else None


def _at(whole: Any, path: str) -> Any:
    """The value at `path` (`a.b[0]`), or None where there is none."""
    for name, index in _STEP.findall(path):
        if name:
            whole = whole.get(name) if isinstance(whole, dict) else None
        elif isinstance(whole, list) and int(index) < len(whole):
            whole = whole[int(index)]
        else:
            return None
    return whole


def _quoted(text: str) -> str:
    """Text that a peer may have written, shortened and encodable."""
    shown = text[:MAX_QUOTED].encode(errors="replace").decode()
    return shown if len(text) <= MAX_QUOTED else shown + "…"
