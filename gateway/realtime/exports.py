"""A session outside of memory: its configuration in the journal, and sessions as JSON lines
(`sdk.frames.exported`): what is written of one, and what a new one begins with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ...sdk.errors import ExportInvalid
from ...sdk.frames.exported import ExportedAdapter, ExportEntry, ExportHeader, export_lines
from ...sdk.frames.response import ResponseParams
from ...sdk.frames.session import SessionPatch, SessionResource
from ...sessions.conversation.history import History
from ...sessions.conversation.items import FunctionCallOutput, Item, new_id
from ...sessions.errors import RequestInvalid
from ...sessions.exports import ExportedEntry, exported
from ...sessions.journal.records import SessionRecord
from ...sessions.turn.request import RequestBounds
from .translate import KEPT, frame_of, item_of, request_of


class RealtimeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the journal keeps of a new session for this protocol: ``session``, its first configuration, and
    ``conversation``, the id of its conversation."""

    session: SessionResource
    conversation: str


def resource_of(record: SessionRecord, latest: bytes | None) -> SessionResource | None:
    """The configuration of a session: the ``latest`` that the journal has, or else that of its ``record``. None
    for a session of another protocol."""
    try:
        if latest:
            return msgspec.msgpack.decode(latest, type=SessionResource)
        return msgspec.msgpack.decode(record.config, type=RealtimeConfig).session
    except msgspec.MsgspecError:
        return None


def export_of(
    record: SessionRecord,
    history: History,
    resource: SessionResource | None,
    tokenizer: bytes,
    model: str = "",
) -> bytes:
    """A session as JSON lines. ``history``: its history; no turn runs in it. ``resource``: its configuration;
    None if it was no Realtime client's. ``tokenizer``: the digest of tokenizer and template
    (`Language.digest`). ``model``: its name, if the configuration has none."""
    if resource is None:
        preamble = history.preamble
        tools = [{"type": "function", **msgspec.to_builtins(tool)} for tool in preamble.tools]
        fields: dict[str, Any] = {"instructions": preamble.instructions, "tools": tools}
    else:
        fields = {name: getattr(resource, name) for name in sorted(KEPT)}
    entries = [
        ExportEntry(
            items=[frame_of(item) for item in one.items],
            tokens=list(one.tokens),
            ended=one.ended,
            left_after=one.left_after,
        )
        for one in exported(history)
    ]
    header = ExportHeader(
        entries=len(entries),
        session=fields,
        model=model if resource is None else resource.model,
        tokenizer=tokenizer.hex(),
        clock=record.clock,
        id=record.id,
        name=record.name,
        created=record.created,
        adapter=None
        if record.adapter is None
        else ExportedAdapter(name=record.adapter.name, digest=record.adapter.digest.hex()),
    )
    return export_lines(header, entries)


def imported_resource(header: ExportHeader, usual: SessionResource, bounds: RequestBounds) -> SessionResource:
    """The configuration of a session that begins with an export: what the ``header`` has of it, and the rest of
    ``usual``, that of new sessions here. ``bounds``: what the model allows. Raises ``ExportInvalid``."""
    given = {name: value for name, value in header.session.items() if name in KEPT}
    try:
        patch = {name: value for name, value in given.items() if value is not None}
        msgspec.convert(patch, SessionPatch, str_keys=True)  # it has the bounds of each field
        resource = msgspec.convert({**msgspec.to_builtins(usual), **given}, SessionResource, str_keys=True)
        request_of(ResponseParams(), resource, _unknown, bounds)
    except (msgspec.ValidationError, ValueError) as error:
        told = " ".join(str(error).split())[:256]
        raise ExportInvalid(
            f"The settings of the exported session are not valid here: {told}", "session"
        ) from None
    return resource


def _unknown(item: object) -> Item:
    raise RequestInvalid("It refers to an item")


def entries_of(entries: Iterable[ExportEntry], *, tokens: bool) -> Sequence[ExportedEntry]:
    """The entries of an export as the sessions have them. ``tokens``: whether those of the replies mean the
    same here."""
    return [
        ExportedEntry(
            tuple(_item_of(frame) for frame in one.items),
            tuple(one.tokens) if tokens else (),
            one.ended,
            one.left_after,
        )
        for one in entries
    ]


def _item_of(frame: Any) -> Item:
    item = item_of(frame, new_id)
    if frame.status != "incomplete" or isinstance(item, FunctionCallOutput):
        return item
    return msgspec.structs.replace(item, complete=False)
