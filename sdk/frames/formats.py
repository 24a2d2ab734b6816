"""What the text of a reply must be, as the standards write it, and as we do.

`text.format` is the Responses interface's, `response_format` that of Chat Completions; `grammar` is ours, for
what neither has. How it is followed is the server's business.
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
    """The one function that has to be called."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]


ToolChoice: TypeAlias = Literal["auto", "none", "required"] | NamedFunction
Modalities: TypeAlias = Annotated[list[Literal["text"]], Meta(min_length=1, max_length=1)]


def too_deep(value: Any, limit: int = MAX_DEPTH) -> bool:
    """Whether free-form JSON nests deeper than `limit`; walks level by level, so depth costs no stack."""
    level = [value]
    for _ in range(limit):
        level = [child for node in level for child in _children(node)]
        if not level:
            return False
    return True


def too_wide(value: Any) -> bool:
    """Whether free-form JSON, which is not `too_deep`, holds an integer that no journal keeps."""
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
    """A function the model may call. `parameters` is JSON Schema; ValueError when it nests too deep, or holds
    an integer of more than 64 bits.

    `strict`: whenever it is called, the arguments fit `parameters` (of the Responses interface; ours here).
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
    """What all have."""


class AnyText(Format, frozen=True, tag="text"):
    """Whatever the model says."""


class JsonObject(Format, frozen=True, tag="json_object"):
    """A JSON object, whichever."""


class JsonSchema(Format, frozen=True, tag="json_schema"):
    """JSON that fits `schema`, as the Responses interface has it.

    `strict` false: keywords that cannot be followed are passed over, else they are refused.
    """

    name: _Name
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        _check_depth(self.schema)


class NamedSchema(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The inner object of `ChatJsonSchema`; fields as in `JsonSchema`."""

    name: _Name
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        _check_depth(self.schema)


class ChatJsonSchema(Format, frozen=True, tag="json_schema"):
    """JSON that fits a schema, as Chat Completions has it."""

    json_schema: NamedSchema


class RegexGrammar(Format, frozen=True, tag="regex"):
    """Text that `pattern` matches as a whole; without look-around and back-references."""

    pattern: Annotated[str, Meta(min_length=1)]


class ChoiceGrammar(Format, frozen=True, tag="choice"):
    """One of these texts."""

    choices: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=MAX_CHOICES)]


class LarkGrammar(Format, frozen=True, tag="lark"):
    """Text that a grammar in llguidance's Lark accepts; its rule `start` is the whole."""

    definition: Annotated[str, Meta(min_length=1)]


ResponseFormat: TypeAlias = AnyText | JsonObject | ChatJsonSchema
AnyGrammar: TypeAlias = RegexGrammar | ChoiceGrammar | LarkGrammar


class TextConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The `text` of the Responses interface."""

    format: AnyText | JsonObject | JsonSchema | None = None


def _check_depth(value: Any) -> None:
    if too_deep(value):
        raise ValueError(f"The schema nests deeper than {MAX_DEPTH} levels")
