"""Writes ``gateway/PROTOCOL.md`` from the types of the frames, the error table and the table of quotas; and the
table of the fields that have no effect into ``gateway/README.md``.

Run ``python -m holdfast.gateway.cli.protocol`` after any of these, or a docstring of theirs, has changed. A
test fails if a file is out of date.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec.inspect import Field, StructType

from ...sdk.frames import unserved
from ...sdk.frames.client import ClientEvent, ClientFrame
from ...sdk.frames.server import OwnFrame, ServerEvent, ServerFrame
from .. import clients
from ..access.quotas import CLIENT_QUOTAS, TENANT_QUOTAS, Quota, written
from ..documents.schemas import (
    description_of,
    fields_of,
    in_words,
    members_of,
    summary_of,
    tag_of,
    text_of,
)
from ..errors import TABLE, WireError
from ..realtime import response

PATH = Path(__file__).resolve().parents[1] / "PROTOCOL.md"
README = PATH.parent / "README.md"
_FIELDS = "<!-- Generated from `gateway/clients.py` by `python -m holdfast.gateway.cli.protocol`. -->"

_BEGINNING = """\
# The Realtime face on the wire

*Generated from the types of the frames by `python -m holdfast.gateway.cli.protocol`: do not edit.*

A client opens a WebSocket at `/v1/realtime` and exchanges JSON objects in text frames. Each has a `type`. The
protocol is OpenAI's Realtime interface for text; what is marked "ours" no standard has. A client that knows the
standard alone may ignore server events and fields that it does not know. Unknown fields of client events are
refused.

Parameters of the URL:

- `model`: a name of the served model, which the session carries; any other name is refused with 404, naming
  those that are served. Without it the session carries the first one.
- `resumable=true` (ours): the client can come back with `handle`. Its replies go on while it is away, and an
  event with an `event_id` that the server has seen is not served twice.
- `resume=true` (ours): the client comes back. The socket gets no new session, and its first event is
  `session.resume`.

With the WebSocket subprotocol `holdfast.msgpack` (ours) each frame, both ways, is binary and holds the same
object as MessagePack: maps with string keys, arrays, strings, numbers, booleans and nil. Binary data,
extensions and numbers that are not finite are refused. A frame's limit of bytes holds for both of its forms.

An event is acknowledged by its answer, and the answer leaves when the journal has what it acknowledges. An
event that is refused changes nothing and is answered by `error`, which repeats its `event_id`.

Events of one session are served, and answered, in the order in which they come. `response.create` is answered
by its `response.created`, or by an `error`. `response.cancel`, `input_text_buffer.append` and `.replace` have
no answer of their own unless they are refused. A `response.cancel` acts at once; any other event is served
after the `response.created` before it, or the `error` instead. Four events (ours) are answered when the
engine has done what they ask, whatever came after them: `session.lease`, `session.stage`, `session.settle` and
`session.blocks`.

All server events of a session come in the order in which it changed, those of responses among them: what waits
for the journal holds back all that follows. So `conversation.item.truncated` comes after the `response.done`
of the reply that it cut, and an item is always where its `previous_item_id` says. Only `server.going_away` and
the `error` which says that the journal cannot write come ahead of events that wait.
"""


_ENDS = """\
## How a reply ends that neither model nor client ends

- `max_output_tokens` of a new session is the server's `--default-max-tokens` (4096), or what the context holds
  if that is less; `session.created` tells it. A session or a response may set another number, or `"inf"`:
  as many as the context holds. The reply ends `incomplete`, for the reason `max_output_tokens`.
- A reply that goes round in a circle ends `incomplete`, for the reason `repetition` (ours). The rule: for one
  period of 1 to 128 tokens, each of the last 512 tokens equals the token one period before it, and
  `min_output_tokens` are there. A server that is started with `--no-end-cycles` lets such replies go on.
- A reply that is JSON by a format or a required call has one blank between its parts and no other white space
  outside of strings. A string ends after 32 KiB, unless a `maxLength` of its schema allows more.
"""


def document() -> str:
    """The whole text of ``PROTOCOL.md``, made from the types as they are now."""
    sections = [
        [_BEGINNING],
        _order(),
        [_ENDS],
        _events("Client events", ClientFrame, ClientEvent),
        _events("Server events", ServerFrame, ServerEvent),
        _objects(),
        _unserved(),
        _errors(),
        _quotas(),
    ]
    return "\n".join(line for section in sections for line in section).rstrip() + "\n"


def _order() -> Iterator[str]:
    yield "## The order of a response's events\n"
    yield text_of(response) + "\n"
    yield "A client that was away gets the events after `last_event` again, in the same order.\n"


def _events(title: str, frame: type, union: Any) -> Iterator[str]:
    yield f"## {title}\n"
    yield text_of(frame) + "\n"
    yield from _table(fields_of(frame))
    common = {field.encode_name for field in fields_of(frame)}
    for event in members_of(union):
        yield f"### `{tag_of(event)}`" + (" (ours)" if issubclass(event, OwnFrame) else "") + "\n"
        yield text_of(event) + "\n"
        yield from _table(field for field in fields_of(event) if field.encode_name not in common)


def _objects() -> Iterator[str]:
    """The lines of the part about structs that occur inside events, with a section for each, sorted by name."""
    events = [*get_args(ClientEvent), *get_args(ServerEvent)]
    found: dict[str, type[msgspec.Struct]] = {}
    waiting: list[type[msgspec.Struct]] = list(events)
    while waiting:
        for field in fields_of(waiting.pop()):
            new = {struct.__name__: struct for struct in _structs(field.type)}
            waiting += [struct for name, struct in new.items() if name not in found]
            found |= new
    yield "## Objects in events\n"
    for name in sorted(found):
        yield f"### {name}\n"
        tag = found[name].__struct_config__.tag
        yield text_of(found[name]) + (f" Its `type` is `{tag}`." if tag else "") + "\n"
        yield from _table(fields_of(found[name]))


def _unserved() -> Iterator[str]:
    yield "## What of the standard is not served\n"
    yield "Ignored, because the rest of the frame means the same without them. The answer lists those that the"
    yield "client gave, as `session.updated.session.unserved` or `response.created.response.unserved`, and"
    yield "echoes none.\n"
    yield f"- {_named(unserved.IGNORED)}."
    as_served = (
        f"`{name}` {msgspec.json.encode(it).decode()}" for name, it in unserved.SERVED_VALUES.items()
    )
    yield f"- Served anyway, and so not listed: {', '.join(as_served)}.\n"
    yield "Refused as `unsupported_field`, because without them the frame would mean something else: the model"
    yield "would read other text, have other tools or be another one. `[]` stands for any index. Another"
    yield "`session.model` that is not served is refused, too, as `invalid_value`.\n"
    yield f"- Events: {_named(unserved.REFUSED_EVENTS)}."
    yield f"- Fields: {_named(unserved.REFUSED_FIELDS)}."
    for path, values in sorted(unserved.REFUSED_VALUES.items()):
        yield f"- `{path}` with {', '.join(f'`{value}`' for value in sorted(values))}."
    yield ""


def _named(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _errors() -> Iterator[str]:
    yield "## Error codes\n"
    yield "`status` is that of an HTTP answer; `close` is the close code where the error ends the socket.\n"
    yield "| code | type | status | close | when |"
    yield "|---|---|---|---|---|"
    rows: dict[WireError, list[str]] = {}
    for kind, wire in TABLE.items():
        rows.setdefault(wire, []).append(summary_of(kind).removesuffix("."))
    for wire, meanings in sorted(rows.items(), key=lambda row: (row[0].code, row[0].status)):
        told = "a mistake of the server, which its log tells" if wire.code == "internal_error" else None
        meaning = told or " / ".join(dict.fromkeys(meanings))
        yield f"| `{wire.code}` | `{wire.type}` | {wire.status} | {wire.close or ''} | {_cell(meaning)} |"
    yield ""


def _quotas() -> Iterator[str]:
    yield "## Quotas\n"
    yield "Of one socket, or of one session on it. Bytes and seconds as the names say.\n"
    yield from _quota_rows(CLIENT_QUOTAS)
    yield "Of one tenant, in the keys file. Without a number a tenant takes what there is.\n"
    yield from _quota_rows(TENANT_QUOTAS)


def _quota_rows(quotas: tuple[Quota, ...]) -> Iterator[str]:
    yield "| quota | default | enforced in | beyond it | what makes room |"
    yield "|---|---|---|---|---|"
    for quota in quotas:
        code = f"`{quota.code}`" if quota.code else ""
        yield f"| `{quota.name}` | {written(quota.default)} | `{quota.enforced}` | {code} | {quota.refill} |"
    yield ""


# --- types --------------------------------------------------------------------------------------------------


def _table(fields: Any) -> Iterator[str]:
    told = [(field, description_of(field.type)) for field in fields]
    meaning = any(text for _, text in told)
    rows = [
        f"| `{field.encode_name}` | {_cell(in_words(field.type))} | {_default(field)} |"
        + (f" {_cell(text)} |" if meaning else "")
        for field, text in told
    ]
    if meaning:
        yield from ("| field | type | default | |", "|---|---|---|---|", *rows, "")
    elif rows:
        yield from ("| field | type | default |", "|---|---|---|", *rows, "")


def _default(field: Field) -> str:
    if field.required:
        return "required"
    value = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    return "absent" if value is msgspec.NODEFAULT else f"`{msgspec.json.encode(value).decode()}`"


def _structs(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """The structs that occur in a type of `msgspec.inspect`, also as elements or alternatives."""
    if isinstance(kind, StructType):
        yield kind.cls
    for name in ("item_type", "key_type", "value_type"):
        if (inner := getattr(kind, name, None)) is not None:
            yield from _structs(inner)
    for inner in getattr(kind, "types", ()):
        yield from _structs(inner)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def readme(text: str) -> str:
    """The ``text`` of ``README.md`` with the table of fields without effect as it is now."""
    head, mark, rest = text.partition(_FIELDS)
    return "\n".join([head + mark, "", *clients.table(), rest[rest.index("\n\n", len("\n\n")) + 1 :]])


if __name__ == "__main__":
    PATH.write_text(document())
    README.write_text(readme(README.read_text()))
