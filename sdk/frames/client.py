"""Events a client sends. Each may carry an `event_id`, which errors about it repeat."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from .items import AnyItem, Identifier
from .response import ResponseParams
from .session import SessionPatch

EventId: TypeAlias = Annotated[str, Meta(max_length=512)]


class ClientFrame(
    msgspec.Struct,
    kw_only=True,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="type",
):
    """What all client events have."""

    event_id: EventId | None = None

    @property
    def type(self) -> str:
        """The event's name on the wire."""
        return str(self.__struct_config__.tag)


class SessionUpdate(ClientFrame, frozen=True, tag="session.update"):
    """Change the fields that are present in `session`."""

    session: SessionPatch


class ItemCreate(ClientFrame, frozen=True, tag="conversation.item.create"):
    """Add an item: at the end (absent), at the beginning (`root`), or after the item named."""

    item: AnyItem
    previous_item_id: Identifier | None = None


class ItemRetrieve(ClientFrame, frozen=True, tag="conversation.item.retrieve"):
    """Ask for an item as the server has it."""

    item_id: Identifier


class ItemDelete(ClientFrame, frozen=True, tag="conversation.item.delete"):
    """Take an item out of the conversation."""

    item_id: Identifier


class ResponseCreate(ClientFrame, frozen=True, tag="response.create"):
    """Ask the model for a reply."""

    response: ResponseParams | None = None


class ResponseCancel(ClientFrame, frozen=True, tag="response.cancel"):
    """Cut a running reply short; without an id the default conversation's."""

    response_id: Identifier | None = None


ClientEvent: TypeAlias = (
    SessionUpdate | ItemCreate | ItemRetrieve | ItemDelete | ResponseCreate | ResponseCancel
)
