"""Keyword arguments as what the wire asks for, checked as the server will. Knows nothing of chats."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from .errors import FieldInvalid, FieldUnknown
from .frames.client import ResponseCreate
from .frames.response import ResponseParams
from .frames.session import SessionPatch
from .tools import tools_of

_Params = TypeVar("_Params", SessionPatch, ResponseParams)


def create_of(overrides: dict[str, Any]) -> ResponseCreate:
    """`response.create` with these fields of it. Raises `FrameError`, `ToolInvalid`."""
    if not overrides:
        return ResponseCreate()
    if overrides.get("tools") is not None:
        overrides["tools"] = [tool.definition for tool in tools_of(overrides["tools"]).values()]
    return ResponseCreate(response=converted(overrides, ResponseParams, "response"))


def converted(fields: dict[str, Any], kind: type[_Params], name: str) -> _Params:
    """Keyword arguments as a frame's object, checked as the server will. Raises `FrameError`."""
    unknown = set(fields) - set(kind.__struct_fields__)
    if unknown:
        raise FieldUnknown(f"Unknown parameter: '{name}.{min(unknown)}'", f"{name}.{min(unknown)}")
    try:
        return msgspec.convert(msgspec.to_builtins(fields), kind)
    except (msgspec.ValidationError, TypeError) as error:
        raise FieldInvalid(f"{name}: {error}", name) from None
