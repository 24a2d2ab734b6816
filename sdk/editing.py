"""Items put into a conversation and read again: one event each, and its answer. Knows nothing of turns."""

from __future__ import annotations

from .connection import Connection
from .frames.client import ItemCreate, ItemRetrieve
from .frames.items import AnyItem
from .frames.server import ItemDone, ItemRetrieved
from .turn import named


async def add(connection: Connection, item: AnyItem, previous_item_id: str | None) -> AnyItem:
    """The item as the server has it, at the end or after the one named. Raises `ServerError`."""
    item = named(item)
    create = ItemCreate(item=item, previous_item_id=previous_item_id)
    return (await connection.request(create, ItemDone, lambda event: event.item.id == item.id)).item


async def retrieve(connection: Connection, item_id: str) -> AnyItem:
    """An item as the server has it. Raises `ServerError`."""
    retrieve = ItemRetrieve(item_id=item_id)
    return (await connection.request(retrieve, ItemRetrieved, lambda event: event.item.id == item_id)).item
