"""How responses, conversations and their items are encoded for the store of objects (`sessions.stored`). Pure.

A stored object is a list of notes, that is, encoded records. A response begins with the notes of the response
or of the conversation that it continues, so the notes of one object hold its whole past. The notes of a
conversation grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from ...sessions.stored import StoredObject
from .events import ResponseObject, ToldConversation
from .items import KeptItem
from .reply import Cuts


class KeptResponse(msgspec.Struct, tag="response", kw_only=True, frozen=True, omit_defaults=True):
    """The note of a response. ``input``: its own input items. ``before``: earlier items that no stored object
    has, because they were not stored. ``cuts``: the lengths of its output's deltas, from which its stream can
    be made again. ``session``: the number in the journal, hexadecimal, of the session that wrote it; "" if the
    journal keeps none. A later note of the same response replaces it."""

    response: ResponseObject
    input: list[KeptItem]
    before: list[KeptItem] = []
    cuts: Cuts = []
    session: str = ""

    @property
    def items(self) -> list[KeptItem]:
        """The items that the response adds to the object's past: earlier unstored ones, input, output. A failed
        response adds no output, because its turn was rolled back."""
        said = [] if self.response.status == "failed" else self.response.output
        return [*self.before, *self.input, *said]


class ItemsNote(msgspec.Struct, tag="items", kw_only=True, frozen=True, omit_defaults=True):
    """A note of items that were added to a conversation. ``session``: as in `KeptResponse`, if a response added
    them. ``gone``: how many items before them were removed."""

    items: list[KeptItem]
    session: str = ""
    gone: int = 0


class RemovedNote(msgspec.Struct, tag="removed", kw_only=True, frozen=True):
    """A note of an item, by its id, that was removed from a conversation. Earlier versions wrote it; now all
    notes are rewritten without the item."""

    item: str


class ConversationNote(msgspec.Struct, tag="conversation", kw_only=True, frozen=True):
    """A note of a conversation's id, time and metadata. A later one replaces it."""

    conversation: ToldConversation


Note: TypeAlias = KeptResponse | ItemsNote | RemovedNote | ConversationNote

_ENCODER = msgspec.msgpack.Encoder()
_CONVERSATION, _RESPONSE = (_ENCODER.encode({"type": tag})[1:] for tag in ("conversation", "response"))
"""How a note of each kind begins, behind the byte with the number of its fields."""
_DECODER: msgspec.msgpack.Decoder[Note] = msgspec.msgpack.Decoder(Note)


def encoded(note: Note) -> bytes:
    """The note as bytes, for the store."""
    return _ENCODER.encode(note)


def decoded(note: bytes) -> Note:
    """The note from the bytes that `encoded` made."""
    return _DECODER.decode(note)


def items_of(notes: Sequence[bytes]) -> list[KeptItem]:
    """All items of an object, those of its past first, in order, without those that were removed. ``notes``:
    the notes of the object."""
    pieces: dict[str, tuple[int, list[KeptItem]]] = {}
    removed: dict[str, int] = {}  # the index of the note that removed an item, by its id
    for at, raw in enumerate(notes):
        match decoded(raw):
            case KeptResponse() as note:
                pieces[note.response.id] = at, note.items
            case ItemsNote(items=items):
                pieces[str(at)] = at, items
            case RemovedNote(item=gone):
                removed[gone] = at
            case ConversationNote():
                continue
    return [item for at, items in pieces.values() for item in items if removed.get(item.id, -1) < at]


def is_response(stored: StoredObject) -> bool:
    """Whether a stored object is a response. It is not decoded, as it may be long."""
    return stored.last.startswith(_RESPONSE, 1)


def response_in(stored: StoredObject) -> KeptResponse:
    """The response that a stored object is."""
    note = decoded(stored.last)
    assert isinstance(note, KeptResponse), "it is a response"
    return note


def conversation_in(stored: StoredObject) -> ToldConversation | None:
    """The conversation in a stored object, with its latest metadata; None if the object is no conversation."""
    for raw in reversed(stored.notes[-stored.own :]):
        if raw.startswith(_CONVERSATION, 1):  # other notes may be long: they are not decoded
            note = decoded(raw)
            assert isinstance(note, ConversationNote), "its tag says so"
            return note.conversation
    return None


def sessions_of(stored: StoredObject) -> set[int]:
    """The numbers in the journal of the sessions that wrote the object's own responses and items."""
    own = [decoded(note) for note in stored.notes[-stored.own :]]
    return {
        int(note.session, 16) for note in own if isinstance(note, KeptResponse | ItemsNote) and note.session
    }


def made_items(stored: StoredObject) -> int:
    """How many items a conversation ever had, removed ones included. New ones get the next numbers in their
    ids."""
    notes = map(decoded, stored.notes)
    return sum(len(note.items) + note.gone for note in notes if isinstance(note, ItemsNote))


def without(stored: StoredObject, item: str) -> list[bytes]:
    """All notes of a conversation, written again without the item with this id."""
    conversation = conversation_in(stored)
    assert conversation is not None, "it is a conversation"
    left = [one for one in items_of(stored.notes) if one.id != item]
    items = ItemsNote(items=left, gone=made_items(stored) - len(left))
    return [encoded(items), encoded(ConversationNote(conversation=conversation))]
