"""A session as a file: JSON lines that another server can begin a session with. The first line is an
`ExportHeader`, each further line an `ExportEntry`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..errors import ExportInvalid
from .items import AdapterName, AnyItem
from .sampling import TokenId

VERSION = 1
"""The version of the form. A server reads no other."""
KIND = "holdfast.session"
JSON_LINES = "application/jsonl"
"""The media type of an exported session."""
SESSIONS = "/v1/sessions"
"""The route to which an exported session is posted."""


class ExportedAdapter(msgspec.Struct, kw_only=True, frozen=True):
    """The adapter (LoRA) of a session. `digest`: of its configuration and weights, in hexadecimal."""

    name: AdapterName
    digest: Annotated[str, Meta(pattern="^([0-9a-f]{2})+$", max_length=128)]


class ExportHeader(msgspec.Struct, kw_only=True, frozen=True):
    """The first line. `entries`: how many lines follow. `session`: the configuration in force, in the fields of
    `session.updated`; of a session that was no Realtime client's only `instructions` and `tools`.

    `model`: its name. `tokenizer`: a digest of the model's tokenizer and chat template: only a server with the
    same one uses the `tokens` of the entries, another one reads their text. `clock`: the date that the chat
    template shows (ISO 8601). `id`, `name`, `created`: of the session that was exported. `adapter`: the one
    that it is computed with, which a server must have loaded, with the same weights; null: none."""

    type: str = KIND
    version: int = VERSION
    entries: Annotated[int, Meta(ge=0)]
    session: dict[str, Any]
    model: str = ""
    tokenizer: str = ""
    clock: str
    id: str = ""
    name: str = ""
    created: str = ""
    adapter: ExportedAdapter | None = None


class ExportEntry(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """One line behind the header: an item, or the items that one reply has made.

    `tokens`: the ids of a reply as the model sampled them, its reasoning too. `ended`: the last of them is an
    end token. `left_after`: only of what is out of the context: the id of the item behind which it left; empty
    if that is gone.
    """

    items: Annotated[list[AnyItem], Meta(min_length=1)]
    tokens: list[TokenId] = []
    ended: bool = False
    left_after: str | None = None


class ImportedSession(msgspec.Struct, kw_only=True, frozen=True):
    """The answer to an exported session: the session that begins with it. `handle`: a secret that opens it, as
    those of `session.created`."""

    id: str
    handle: str
    object: str = "session"


class _Kind(msgspec.Struct):
    type: str = ""
    version: int = 0


_KIND: msgspec.json.Decoder[_Kind] = msgspec.json.Decoder(_Kind)
_HEADER: msgspec.json.Decoder[ExportHeader] = msgspec.json.Decoder(ExportHeader)
_ENTRY: msgspec.json.Decoder[ExportEntry] = msgspec.json.Decoder(ExportEntry)
_ENCODER = msgspec.json.Encoder()


def export_lines(header: ExportHeader, entries: Iterable[ExportEntry]) -> bytes:
    """The exported session as JSON lines, with a line feed behind each."""
    return b"".join(_ENCODER.encode(one) + b"\n" for one in (header, *entries))


def read_export(data: bytes) -> tuple[ExportHeader, list[ExportEntry]]:
    """The exported session in ``data``. Raises `ExportInvalid` for anything else, for one of another version,
    and for one that was cut off."""
    first, *lines = _lines(data)
    kind = _decoded(_KIND, first, 1)
    if kind.type != KIND:
        raise ExportInvalid("This is no exported session: its first line has no `type` of one")
    if kind.version != VERSION:
        raise ExportInvalid(
            f"This session was exported in form {kind.version}; this version of Holdfast reads form {VERSION}"
        )
    header = _decoded(_HEADER, first, 1)
    if len(lines) != header.entries:
        cut = "is cut off" if len(lines) < header.entries else "has too many lines"
        raise ExportInvalid(
            f"The exported session {cut}: behind its first line {header.entries} must follow, not {len(lines)}"
        )
    return header, [_decoded(_ENTRY, line, at) for at, line in enumerate(lines, 2)]


def _lines(data: bytes) -> Iterator[bytes]:
    """The lines, one by one, so that other threads run meanwhile."""
    begin, last = 0, len(data) - data.endswith(b"\n")
    while (end := data.find(b"\n", begin, last)) >= 0:
        yield data[begin:end]
        begin = end + 1
    yield data[begin:last]


def _decoded(decoder: msgspec.json.Decoder[Any], line: bytes, at: int) -> Any:
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        told = " ".join(str(error).split())[:256]
        raise ExportInvalid(f"Line {at} is not one of an exported session: {told}", f"line {at}") from None
