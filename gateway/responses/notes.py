"""What the face stores: responses, conversations and their items, as notes of `sessions.stored`. Pure.

A response begins with the notes of the response or of the conversation that it continues, so the notes of one
object hold its whole past. A conversation is a list of notes that grows.
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
    """A response. ``input``: its own input items. ``before``: earlier items that its past does not have,
    because they were not stored. ``cuts``: the deltas of its output. A later note of the same response replaces
    it."""

    response: ResponseObject
    input: list[KeptItem]
    before: list[KeptItem] = []
    cuts: Cuts = []

    @property
    def items(self) -> list[KeptItem]:
        """The items that it adds to its past. One that failed adds no output: its turn was taken back."""
        said = [] if self.response.status == "failed" else self.response.output
        return [*self.before, *self.input, *said]


class ItemsNote(msgspec.Struct, tag="items", kw_only=True, frozen=True):
    """Items of a conversation."""

    items: list[KeptItem]


class RemovedNote(msgspec.Struct, tag="removed", kw_only=True, frozen=True):
    """An item that was removed from a conversation."""

    item: str


class ConversationNote(msgspec.Struct, tag="conversation", kw_only=True, frozen=True):
    """A conversation. A later one replaces it."""

    conversation: ToldConversation


Note: TypeAlias = KeptResponse | ItemsNote | RemovedNote | ConversationNote

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Note] = msgspec.msgpack.Decoder(Note)


def encoded(note: Note) -> bytes:
    """The note as it is stored."""
    return _ENCODER.encode(note)


def decoded(note: bytes) -> Note:
    """The note that was stored."""
    return _DECODER.decode(note)


def items_of(notes: Sequence[bytes]) -> list[KeptItem]:
    """All items of an object and of its past, in order."""
    pieces: dict[str, list[KeptItem]] = {}
    for at, raw in enumerate(notes):
        match decoded(raw):
            case KeptResponse() as note:
                pieces[note.response.id] = note.items
            case ItemsNote(items=items):
                pieces[str(at)] = items
            case RemovedNote(item=gone):
                for key, items in pieces.items():
                    pieces[key] = [item for item in items if item.id != gone]
            case ConversationNote():
                continue
    return [item for items in pieces.values() for item in items]


def response_in(stored: StoredObject) -> KeptResponse | None:
    """The response that an object is; None if it is none."""
    note = decoded(stored.last)
    return note if isinstance(note, KeptResponse) else None


def conversation_in(stored: StoredObject) -> ToldConversation | None:
    """The conversation that an object is; None if it is none."""
    own = (decoded(note) for note in reversed(stored.notes[-stored.own :]))
    return next((note.conversation for note in own if isinstance(note, ConversationNote)), None)


def made_items(stored: StoredObject) -> int:
    """How many items a conversation ever had."""
    notes = (decoded(note) for note in stored.notes)
    return sum(len(note.items) for note in notes if isinstance(note, ItemsNote))
