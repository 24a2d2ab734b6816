"""Conversation items, as they stand in client events and in server events."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

Identifier: TypeAlias = Annotated[str, Meta(min_length=1, max_length=64)]
AdapterName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
Role: TypeAlias = Literal["system", "user", "assistant"]
ItemStatus: TypeAlias = Literal["completed", "incomplete", "in_progress"]

PartType: TypeAlias = Literal["input_text", "output_text"]

PART_OF_ROLE: dict[Role, PartType] = {
    "system": "input_text",
    "user": "input_text",
    "assistant": "output_text",
}


class Given(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of objects that a client sends: a field that they do not have is refused."""


class TextPart(Given, kw_only=True, frozen=True):
    """A part of a message's content. Its `type` is `output_text` in an assistant's message, `input_text` in
    another."""

    type: PartType
    text: str


class Item(Given, kw_only=True, frozen=True, omit_defaults=True, tag_field="type"):
    """Base of items. The server sets all of these fields; a client may leave them out, and then the server
    makes an `id`."""

    id: Identifier | None = None
    object: Literal["realtime.item"] | None = None
    status: ItemStatus | None = None


class MessageItem(Item, frozen=True, tag="message"):
    """A message; its text is that of all parts of `content`. Raises ValueError if a part has a type that does
    not belong to the `role`."""

    role: Role
    content: list[TextPart]

    def __post_init__(self) -> None:
        wanted = PART_OF_ROLE[self.role]
        for part in self.content:
            if part.type != wanted:
                raise ValueError(f"Content of a {self.role} message must be `{wanted}`, got `{part.type}`")

    @classmethod
    def of(cls, role: Role, text: str) -> MessageItem:
        """A new message without an id. Its one part holds `text`, with the type that belongs to `role`."""
        return cls(role=role, content=[TextPart(type=PART_OF_ROLE[role], text=text)])

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)


class FunctionCallItem(Item, frozen=True, tag="function_call"):
    """A tool call of the model. `name`: the tool; `arguments`: JSON text as the model wrote it, which may be
    invalid; `call_id`: the id that its output repeats."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    arguments: str
    call_id: Identifier | None = None


class FunctionCallOutputItem(Item, frozen=True, tag="function_call_output"):
    """The output of the tool call with the id `call_id`: the text that the model reads."""

    call_id: Identifier
    output: str


class ItemReference(Given, kw_only=True, frozen=True, tag_field="type", tag="item_reference"):
    """In `response.input`: stands for the conversation's item with this `id`."""

    id: Identifier


AnyItem: TypeAlias = MessageItem | FunctionCallItem | FunctionCallOutputItem
InputItem: TypeAlias = AnyItem | ItemReference
