"""Keyword arguments as `response.create` and `session.update` events, checked as the server checks them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from .errors import FieldInvalid, FieldUnknown
from .frames.client import ItemCreate, ResponseCreate, ResponseSteer
from .frames.items import AnyItem, FunctionCallItem, FunctionCallOutputItem, MessageItem
from .frames.response import ResponseParams
from .frames.session import SessionPatch
from .tools.tool import tools_of

TOGETHER = 64 << 10
"""Characters of items that go into one frame with a `response.create`; six bytes each at most."""

_Params = TypeVar("_Params", SessionPatch, ResponseParams)
_Create = TypeVar("_Create", ResponseCreate, ResponseSteer)


@dataclass(slots=True)
class SentOutputs:
    """Outputs of tools that were sent before the response which builds on them.

    ``events``: ids of all events; ``items``: ids of the items in them; ``commits``: for each streamed output,
    by call id, the event that committed it.
    """

    events: list[str] = field(default_factory=list)
    items: list[str] = field(default_factory=list)
    commits: dict[str, str] = field(default_factory=dict)


def create_of(overrides: dict[str, Any]) -> ResponseCreate:
    """`response.create` with these fields of `ResponseParams`. Raises `FrameError`, `ToolInvalid`."""
    if not overrides:
        return ResponseCreate()
    if overrides.get("tools") is not None:
        overrides["tools"] = [tool.definition for tool in tools_of(overrides["tools"]).values()]
    return ResponseCreate(response=converted(overrides, ResponseParams, "response"))


def in_brief(create: _Create) -> _Create:
    """The same with brief events, in which the server sends each thing once, unless `events` is set already."""
    params = create.response or ResponseParams()
    if params.events is not msgspec.UNSET:
        return create
    return msgspec.structs.replace(create, response=msgspec.structs.replace(params, events="brief"))


def together(create: ResponseCreate, first: Sequence[ItemCreate]) -> ResponseCreate | None:
    """The response and the items before it in one event; None where that would be large."""
    items = [event.item for event in first]
    if sum(map(_characters, items)) > TOGETHER:
        return None
    return msgspec.structs.replace(create, items=items)


def converted(fields: dict[str, Any], kind: type[_Params], name: str) -> _Params:
    """Keyword arguments as a frame's object; `name` is its field in the frame. Raises `FrameError`."""
    unknown = set(fields) - set(kind.__struct_fields__)
    if unknown:
        raise FieldUnknown(f"Unknown parameter: '{name}.{min(unknown)}'", f"{name}.{min(unknown)}")
    try:
        return msgspec.convert(msgspec.to_builtins(fields), kind)
    except (msgspec.ValidationError, TypeError) as error:
        raise FieldInvalid(f"{name}: {error}", name) from None


def output_of(call: FunctionCallItem, output: str) -> ItemCreate:
    return ItemCreate(item=named(FunctionCallOutputItem(call_id=call.call_id or "", output=output)))


def named(item: AnyItem) -> AnyItem:
    """The item with an id, new where it has none. The server's answer repeats it."""
    return item if item.id else msgspec.structs.replace(item, id=f"item_{secrets.token_hex(12)}")


def _characters(item: AnyItem) -> int:
    match item:
        case MessageItem():
            return len(item.text)
        case FunctionCallItem():
            return len(item.arguments)
        case FunctionCallOutputItem():
            return len(item.output)
