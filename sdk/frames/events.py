"""What all events have, those of the client and those of the server."""

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
    """What all client events have. `session_id`, ours: which of the socket's sessions it is for (the first)."""

    event_id: EventId | None = None
    session_id: Identifier | None = None

    @property
    def type(self) -> str:
        """The event's name on the wire."""
        return str(self.__struct_config__.tag)


class ServerFrame(msgspec.Struct, kw_only=True, frozen=True, tag_field="type"):
    """What all server events have. `session_id`, ours: whose it is, once a socket has had several sessions."""

    event_id: str
    session_id: str | UnsetType = UNSET

    @property
    def type(self) -> str:
        """The event's name on the wire."""
        return str(self.__struct_config__.tag)


class OwnFrame(ServerFrame, frozen=True):
    """An event that no standard has; a client of the standard passes it over."""
