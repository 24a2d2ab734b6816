"""Bytes to events and back. Frames are JSON text in UTF-8. For an invalid one, `decode_client`, `decode_server`
and `framed` raise a `FrameError` and nothing else.
`packed.py` has their other form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

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

T = TypeVar("T")
MAX_FRAME_BYTES = 1 << 20
MAX_FRAME_VALUES = 1 << 15
MAX_EVENT_ID = 512
MAX_QUOTED = 256
PART = 1 << 17
"""Bytes of a long body that are looked at without a pause."""

_CLIENT: msgspec.json.Decoder[ClientEvent] = msgspec.json.Decoder(ClientEvent)
_SERVER: msgspec.json.Decoder[ServerEvent] = msgspec.json.Decoder(ServerEvent)
_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_ENCODER = msgspec.json.Encoder()


class _Named(msgspec.Struct):
    event_id: str | None = None


_NAMED: msgspec.json.Decoder[_Named] = msgspec.json.Decoder(_Named)

# A message of msgspec: "Object contains unknown field `x` - at `$.session.tools[0]`". It may quote a megabyte
# of the frame, so it is split by plain searches and shortened first.
_UNKNOWN = "Object contains unknown field `"
_MISSING = "Object missing required field `"
_CUT_OFF = "Input data was truncated"
_NEAR_END = 64
_HALF_PAIR = "a string holds one half of a surrogate pair (an escape \\ud800 to \\udfff alone)"
_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\\\")
_HALF = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


def decode_client(frame: bytes | str, max_bytes: int = MAX_FRAME_BYTES) -> ClientEvent:
    """The client event in `frame`. Raises `FrameTooLarge` above `max_bytes`, else the `FrameError` that fits;
    its `param` is the path of the field at fault, and its `event_id` the event's own id, each None if it cannot
    be told."""
    return decode_body(checked(frame, max_bytes), _CLIENT, is_unserved, "frame")


def decode_body(
    data: bytes,
    decoder: msgspec.json.Decoder[T],
    unserved: Callable[[str, Any], bool] = lambda path, value: False,
    named: str = "body",
) -> T:
    """Decode ``data``, the JSON body of an HTTP request, by ``decoder``. ``unserved``: called with the path of
    a field that was refused and its value; returns whether the body's standard has it and this server does not
    serve it. ``named``: what errors call the data. Raises a `FrameError` that names the field."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        return _without_nulls(_lenient(data), str(error), decoder, unserved)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise FrameMalformed(_quoted(f"The {named} is not valid JSON: {_cause(error, data)}")) from None


def decode_prepared(
    data: bytes,
    form: type[T],
    prepare: Callable[[Any], None],
    unserved: Callable[[str, Any], bool] = lambda path, value: False,
) -> T:
    """Decode ``data``, the JSON body of an HTTP request or a frame, as the type ``form``, after ``prepare`` has
    changed the decoded JSON in place, for example added the tags that clients may leave out. ``unserved``:
    called with the path of a field that was refused and its value; returns whether the body's standard has it
    and this server does not serve it. Raises a `FrameError` that names the field."""
    whole = decode_body(data, _ANY)
    prepare(whole)
    try:
        return msgspec.convert(whole, form, str_keys=True)
    except msgspec.ValidationError as error:
        return _without_nulls(whole, str(error), msgspec.json.Decoder(form), unserved)


def decode_server(frame: bytes | str) -> ServerEvent | None:
    """The server event in `frame`; None if its `type` is one that this version does not know. Raises
    `FrameMalformed` for what is not JSON, and `FieldInvalid` for a wrong field."""
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
    """The event as JSON in UTF-8, of any size. Raises `UnicodeError` for a lone surrogate and `TypeError` for a
    value that is no JSON."""
    return _ENCODER.encode(event)


def framed(event: ClientEvent) -> bytes:
    """The event as JSON in UTF-8, checked before it is sent. Raises `FrameMalformed` if it cannot be encoded,
    and `FrameTooLarge` if it has more than `MAX_FRAME_BYTES` bytes."""
    try:
        frame = encode(event)
    except UnicodeError:
        raise FrameMalformed("The text holds a lone surrogate, which is no character") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise FrameMalformed(_quoted(f"The event cannot be written as JSON: {error}")) from None
    return checked(frame, MAX_FRAME_BYTES)


def has_more_values(data: bytes, most: int) -> bool:
    """Whether JSON text holds more than `most` values: lists and objects, and entries beyond the first one of
    each. It is found without decoding them, which takes up to a microsecond for each."""
    if len(data) <= most or sum(map(_marks_in, _parts(data))) <= most:
        return False
    quotes = marks = 0
    for part in _parts(data):
        bare = part.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote left begins or ends a text
        quotes += bare.count(b'"')
        if quotes > 4 * most:  # of a name and a text for each comma
            return True
        marks += _marks_in(b"".join(bare.split(b'"')[::2]))  # those in texts do not count
    return marks > most


def _parts(data: bytes) -> Iterator[bytes]:
    """`data` in parts that end with a line, of `PART` bytes or more: between two of them other threads run. In
    JSON no text has a line feed, so none is cut."""
    begin = 0
    while begin < len(data):
        end = data.find(b"\n", begin + PART) + 1 or len(data)
        yield data[begin:end]
        begin = end


def _marks_in(data: bytes) -> int:
    return data.count(b",") + data.count(b"[") + data.count(b"{")


def _cause(error: Exception, data: bytes) -> str:
    """Why JSON text could not be decoded. msgspec says that the text was cut off also if the escape of one half
    of a surrogate pair, such as `\\ud83d`, stands near its end."""
    text = str(error)
    end = data[-_NEAR_END:] if text == _CUT_OFF else b""
    half = isinstance(error, msgspec.DecodeError) and "surrogate" in text
    return _HALF_PAIR if half or _HALF.search(_PAIR.sub(b" ", end)) else text


def checked(frame: bytes | str, max_bytes: int) -> bytes:
    """The bytes of a frame that is small enough to be decoded. Raises `FrameTooLarge` above `max_bytes`, or
    above `MAX_FRAME_VALUES` values, and `FrameMalformed` for text that cannot be encoded."""
    try:
        data = frame.encode() if isinstance(frame, str) else frame
    except UnicodeEncodeError:
        raise FrameMalformed("The frame is not valid text: it holds lone surrogates") from None
    if len(data) > max_bytes:
        message = f"The frame has {len(data)} bytes; at most {max_bytes} are allowed"
        raise FrameTooLarge(message, event_id=_event_id_alone(data))
    if has_more_values(data, MAX_FRAME_VALUES):
        raise FrameTooLarge(f"The frame has more than {MAX_FRAME_VALUES} values: send less in one frame")
    return data


def _event_id_alone(data: bytes) -> str | None:
    """The `event_id` of a frame that is too large to be decoded whole: its other fields are skipped. None if it
    has none, too long a one, or is not JSON."""
    try:
        found = _NAMED.decode(data).event_id
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return found if found is not None and len(found) <= MAX_EVENT_ID else None


def _without_nulls(
    whole: Any, text: str, decoder: msgspec.json.Decoder[T], unserved: Callable[[str, Any], bool]
) -> T:
    """Decode a frame or body again if a field is at fault that the standard has, this server does not serve,
    and the client set to null: all such fields are left out, as if they were absent. `whole`: the frame or
    body as JSON; `text`: msgspec's error message; `unserved`: called with the path of a field and its value,
    returns whether it is such a field. Raises the `FrameError` that fits."""
    path, _ = _fault(text)
    before, _, name = path.rpartition(".")
    holder = _at(whole, before)
    if isinstance(holder, dict) and holder.get(name, "") is None and unserved(path, None):
        _drop_nulls(whole, unserved)
        try:
            return decoder.decode(msgspec.json.encode(whole))
        except msgspec.ValidationError as error:
            text = str(error)
    raise _refusal(whole, text, unserved)


def _drop_nulls(whole: Any, unserved: Callable[[str, Any], bool]) -> None:
    """Remove all fields from decoded JSON that are null and not served. It keeps its own stack, as JSON may
    nest deep."""
    waiting = [("", whole)]
    while waiting:
        path, node = waiting.pop()
        if isinstance(node, list):
            waiting += [(f"{path}[]", child) for child in node if isinstance(child, dict | list)]
        elif isinstance(node, dict):
            under = f"{path}." if path else ""
            for name in [
                name for name, value in node.items() if value is None and unserved(under + name, None)
            ]:
                del node[name]
            waiting += [
                (under + name, child) for name, child in node.items() if isinstance(child, dict | list)
            ]


def _refusal(whole: Any, text: str, unserved: Callable[[str, Any], bool]) -> FrameError:
    """The `FrameError` that fits. `whole`: a frame or an HTTP body as JSON, which does not have the right
    fields; `text`: msgspec's error message; `unserved`: as for `_without_nulls`."""
    told = whole.get("event_id") if isinstance(whole, dict) else None
    event_id = told if isinstance(told, str) and len(told) <= MAX_EVENT_ID else None
    path, cause = _fault(text)
    field = cause.startswith((_UNKNOWN, _MISSING))
    param = path if path or field else None  # a field may have the empty name
    value = _at(whole, path)
    if unserved(path, value):
        shown = f" {_quoted(value)!r}" if isinstance(value, str) else ""
        return FieldUnsupported(f"`{param}`{shown} is in the standard, but not served here", param, event_id)
    if not field:
        return _kind(cause)(_quoted(cause) + (f" at '{param}'" if param else ""), param, event_id)
    if cause.startswith(_UNKNOWN):
        return FieldUnknown(f"Unknown parameter: '{param}'", param, event_id)
    return FieldMissing(f"Missing required parameter: '{param}'", param, event_id)


def _fault(text: str) -> tuple[str, str]:
    """The path of the field at fault by a message of msgspec, such as `session.tools[0]`, and the cause; the
    path is "" if the message names no field."""
    cause, _, where = text.rpartition(" - at `")
    where = where.removeprefix("key` in `")
    if not cause or not where.startswith("$"):
        cause, where = text, "$"
    path = _quoted(where[1:].removesuffix("`").removeprefix("."))
    if cause.startswith((_UNKNOWN, _MISSING)):
        path = f"{path}.{_quoted(cause.split('`', 1)[1].removesuffix('`'))}".removeprefix(".")
    return path, cause


def _kind(cause: str) -> type[FrameError]:
    bounds = ("` >", "` <", " of length", " matching ")
    mistyped = cause.startswith("Expected `") and not any(word in cause for word in bounds)
    return FieldMistyped if mistyped else FieldInvalid


def _lenient(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def _at(whole: Any, path: str) -> Any:
    """The value at `path` (such as `a.b[0]`) in decoded JSON; None if there is no such field or entry."""
    for name, index in _STEP.findall(path):
        if name:
            whole = whole.get(name) if isinstance(whole, dict) else None
        elif isinstance(whole, list) and int(index) < len(whole):
            whole = whole[int(index)]
        else:
            return None
    return whole


def _quoted(text: str) -> str:
    """Text of a peer as an error may repeat it: cut to `MAX_QUOTED` characters and an ellipsis, with `?` for
    each lone surrogate."""
    shown = text[:MAX_QUOTED].encode(errors="replace").decode()
    return shown if len(text) <= MAX_QUOTED else shown + "…"
