"""The base classes of client events and server events."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from .items import Identifier

EventId: TypeAlias = Annotated[str, Meta(max_length=512)]
Handle: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]


class ClientFrame(
    msgspec.Struct,
    kw_only=True,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="type",
):
    """Base of client events. `session_id` (ours): the session of the socket it is for; null: the first."""

    event_id: EventId | None = None
    session_id: Identifier | None = None

    @property
    def type(self) -> str:
        """The event's name on the wire."""
        return str(self.__struct_config__.tag)


class ServerFrame(msgspec.Struct, kw_only=True, frozen=True, tag_field="type"):
    """Base of server events. `session_id` (ours): its session, set once a socket has had several."""

    event_id: str
    session_id: str | UnsetType = UNSET

    @property
    def type(self) -> str:
        """The event's name on the wire."""
        return str(self.__struct_config__.tag)


class OwnFrame(ServerFrame, frozen=True):
    """Base of events that are not in the standard. A client of the standard skips them."""
