"""What a response may hold: calls of function tools, and text in a format.

Three fields of `response.create` set the format of the text: `text.format` as in the Responses API,
`response_format` as in Chat Completions, and `grammar`, which is ours.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

MAX_CHOICES = 4096
MAX_DEPTH = 64
MAX_TOOLS = 128


class Tagged(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """Base of what is told apart by its `type`: choices of tools, and formats of a response's text."""


class NamedFunction(Tagged, kw_only=True, frozen=True, tag="function"):
    """As a `tool_choice`: the model must call the function `name`."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]


class AllowedTools(Tagged, kw_only=True, frozen=True, tag="allowed_tools"):
    """As a `tool_choice`: the model may call only these of the tools (`mode` auto), or must call one or more of
    them (required). The prompt still has all tools, so that its KV is used again."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Meta(min_length=1, max_length=MAX_TOOLS)]

    @property
    def names(self) -> list[str]:
        """The names of the tools."""
        return [tool.name for tool in self.tools]


ToolChoice: TypeAlias = Literal["auto", "none", "required"] | NamedFunction | AllowedTools
Modalities: TypeAlias = Annotated[list[Literal["text", "audio"]], Meta(min_length=1, max_length=1)]


def too_deep(value: Any, limit: int = MAX_DEPTH) -> bool:
    """Whether decoded JSON has more than `limit` levels: a number has one, `{"a": 1}` has two. It walks level
    by level, so that a deep value does not exhaust the stack."""
    level = [value]
    for _ in range(limit):
        level = [child for node in level for child in _children(node)]
        if not level:
            return False
    return True


def too_wide(value: Any) -> bool:
    """Whether decoded JSON holds an integer that fits neither 64 signed nor 64 unsigned bits, which the journal
    cannot keep. Check `too_deep` first: for a value that contains itself this never returns."""
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


class ToolDefinition(
    msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A function that the model may call. `parameters`: the JSON Schema of its arguments.

    `strict` true: the arguments of each call fit `parameters`, by a grammar, and what it cannot enforce is
    refused (a field of the Responses API; in Realtime it is ours). Raises ValueError if `parameters` nests
    too deep or holds an integer of more than 64 bits.
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


class FunctionTool(ToolDefinition, frozen=True, tag_field="type", tag="function"):
    """A function that the model may call. `parameters`: the JSON Schema of its arguments. `strict` true: the
    arguments of each call fit `parameters`, by a grammar (a field of the Responses API; in Realtime it is
    ours)."""


Tools: TypeAlias = Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)]


# --- the text ---

_Name: TypeAlias = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z")]


class AnyText(Tagged, frozen=True, tag="text"):
    """The text has any form, as without a format."""


class JsonObject(Tagged, frozen=True, tag="json_object"):
    """The text is a JSON object, with any fields."""


class NamedSchema(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A JSON Schema that a response's text must fit: the inner object of `ChatJsonSchema`.

    `strict` true: keywords of `schema` that the server cannot enforce are refused; else they are ignored.
    `name` and `description` have no effect. Raises ValueError if `schema` nests too deep.
    """

    name: _Name
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        if too_deep(self.schema):
            raise ValueError(f"The schema nests deeper than {MAX_DEPTH} levels")


class JsonSchema(NamedSchema, frozen=True, tag_field="type", tag="json_schema"):
    """The text is JSON that fits `schema`, as in the Responses API.

    `strict` true: keywords of `schema` that the server cannot enforce are refused; else they are ignored.
    `name` and `description` have no effect.
    """


class ChatJsonSchema(Tagged, frozen=True, tag="json_schema"):
    """The text is JSON that fits the schema in `json_schema`, as in Chat Completions."""

    json_schema: NamedSchema


class RegexGrammar(Tagged, frozen=True, tag="regex"):
    """The whole text matches the regular expression `pattern`. Look-around and back-references are not
    supported."""

    pattern: Annotated[str, Meta(min_length=1)]


class ChoiceGrammar(Tagged, frozen=True, tag="choice"):
    """The text is exactly one of `choices`."""

    choices: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=MAX_CHOICES)]


class LarkGrammar(Tagged, frozen=True, tag="lark"):
    """The whole text fits the rule `start` of the grammar `definition`, which is written in llguidance's Lark
    syntax."""

    definition: Annotated[str, Meta(min_length=1)]


ResponseFormat: TypeAlias = AnyText | JsonObject | ChatJsonSchema
AnyGrammar: TypeAlias = RegexGrammar | ChoiceGrammar | LarkGrammar


class TextConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The field `text` of a response, as in the Responses API: it holds the `format` of the text (null: any
    text)."""

    format: AnyText | JsonObject | JsonSchema | None = None
