"""What a response may hold: calls of function tools, and text in a format.

`text.format` is of the Responses API, `response_format` of Chat Completions; `grammar` is ours.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

MAX_CHOICES = 4096
MAX_DEPTH = 64
MAX_TOOLS = 128


class NamedFunction(
    msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"
):
    """The one function that must be called."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]


ToolChoice: TypeAlias = Literal["auto", "none", "required"] | NamedFunction
Modalities: TypeAlias = Annotated[list[Literal["text"]], Meta(min_length=1, max_length=1)]


def too_deep(value: Any, limit: int = MAX_DEPTH) -> bool:
    """Whether free-form JSON nests deeper than `limit` levels. It walks level by level, without recursion."""
    level = [value]
    for _ in range(limit):
        level = [child for node in level for child in _children(node)]
        if not level:
            return False
    return True


def too_wide(value: Any) -> bool:
    """Whether free-form JSON holds an integer of more than 64 bits, which the journal cannot keep.

    Check `too_deep` first.
    """
    level = [value]
    while level:
        if any(isinstance(node, int) and not -(2**63) <= node < 2**64 for node in level):
            return True
        level = [child for node in level for child in _children(node)]
    return False


def _children(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []


class FunctionTool(
    msgspec.Struct,
    kw_only=True,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="type",
    tag="function",
):
    """A function that the model may call. `parameters` is JSON Schema.

    `strict`: the arguments of each call fit `parameters` (of the Responses API; ours here). Raises ValueError
    where `parameters` nests too deep or holds an integer of more than 64 bits.
    """

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}\Z")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        if too_deep(self.parameters):
            raise ValueError(f"Parameters nest deeper than {MAX_DEPTH} levels")
        if too_wide(self.parameters):
            raise ValueError("Parameters hold an integer of more than 64 bits")


Tools: TypeAlias = Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)]


# --- the text ---

_Name: TypeAlias = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z")]


class Format(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """Base of the formats."""


class AnyText(Format, frozen=True, tag="text"):
    """Any text."""


class JsonObject(Format, frozen=True, tag="json_object"):
    """Any JSON object."""


class NamedSchema(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The inner object of `ChatJsonSchema`; fields as in `JsonSchema`."""

    name: _Name
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        if too_deep(self.schema):
            raise ValueError(f"The schema nests deeper than {MAX_DEPTH} levels")


class JsonSchema(NamedSchema, frozen=True, tag_field="type", tag="json_schema"):
    """JSON that fits `schema`, as in the Responses API.

    `strict` false: unsupported keywords of the schema are ignored; else they are refused.
    """


class ChatJsonSchema(Format, frozen=True, tag="json_schema"):
    """JSON that fits a schema, as in Chat Completions."""

    json_schema: NamedSchema


class RegexGrammar(Format, frozen=True, tag="regex"):
    """Text that `pattern` matches as a whole. Look-around and back-references are not supported."""

    pattern: Annotated[str, Meta(min_length=1)]


class ChoiceGrammar(Format, frozen=True, tag="choice"):
    """One of these texts."""

    choices: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=MAX_CHOICES)]


class LarkGrammar(Format, frozen=True, tag="lark"):
    """Text that a grammar in llguidance's Lark syntax accepts, from its rule `start`."""

    definition: Annotated[str, Meta(min_length=1)]


ResponseFormat: TypeAlias = AnyText | JsonObject | ChatJsonSchema
AnyGrammar: TypeAlias = RegexGrammar | ChoiceGrammar | LarkGrammar


class TextConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The field `text` of the Responses API."""

    format: AnyText | JsonObject | JsonSchema | None = None
