"""Keyword arguments as what the wire asks for, checked as the server will. Knows nothing of chats."""

from __future__ import annotations

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
_Asks = TypeVar("_Asks", ResponseCreate, ResponseSteer)


@dataclass(slots=True)
class Sent:
    """What was sent before a response that builds on it: ids of all ``events``, of ``items`` they brought, and
    of the ``commits`` among them, by the call whose output they made an item."""

    events: list[str] = field(default_factory=list)
    items: list[str] = field(default_factory=list)
    commits: dict[str, str] = field(default_factory=dict)


def create_of(overrides: dict[str, Any]) -> ResponseCreate:
    """`response.create` with these fields of it. Raises `FrameError`, `ToolInvalid`."""
    if not overrides:
        return ResponseCreate()
    if overrides.get("tools") is not None:
        overrides["tools"] = [tool.definition for tool in tools_of(overrides["tools"]).values()]
    return ResponseCreate(response=converted(overrides, ResponseParams, "response"))


def in_brief(create: _Asks) -> _Asks:
    """The same, with each thing told once, for who reads no more than that; unless it says something of it."""
    params = create.response or ResponseParams()
    if params.events is not msgspec.UNSET:
        return create
    return msgspec.structs.replace(create, response=msgspec.structs.replace(params, events="brief"))


def together(create: ResponseCreate, first: Sequence[ItemCreate]) -> ResponseCreate | None:
    """Both in one frame; None where that would be a large one."""
    items = [event.item for event in first]
    if sum(map(_characters, items)) > TOGETHER:
        return None
    return msgspec.structs.replace(create, items=items)


def _characters(item: AnyItem) -> int:
    match item:
        case MessageItem():
            return len(item.text)
        case FunctionCallItem():
            return len(item.arguments)
        case FunctionCallOutputItem():
            return len(item.output)


def converted(fields: dict[str, Any], kind: type[_Params], name: str) -> _Params:
    """Keyword arguments as a frame's object, checked as the server will. Raises `FrameError`."""
    unknown = set(fields) - set(kind.__struct_fields__)
    if unknown:
        raise FieldUnknown(f"Unknown parameter: '{name}.{min(unknown)}'", f"{name}.{min(unknown)}")
    try:
        return msgspec.convert(msgspec.to_builtins(fields), kind)
    except (msgspec.ValidationError, TypeError) as error:
        raise FieldInvalid(f"{name}: {error}", name) from None
