"""The session's configuration: a patch from the client, the whole of it from the server.

In a patch a field that is absent (UNSET) stays as it was; `""`, `[]` and null clear it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from .sampling import SamplingFields, SamplingResource

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


class SessionPatch(SamplingFields, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What `session.update` carries, with the `SamplingFields`, which are ours.

    The last five fields have no effect and are echoed (`unserved`).
    """

    type: Literal["realtime"] | UnsetType = UNSET
    model: str | UnsetType | None = UNSET
    instructions: str | UnsetType | None = UNSET
    output_modalities: Modalities | UnsetType | None = UNSET
    tools: Tools | UnsetType | None = UNSET
    tool_choice: ToolChoice | UnsetType | None = UNSET
    truncation: Literal["disabled"] | UnsetType | None = UNSET
    audio: Any = UNSET
    include: Any = UNSET
    parallel_tool_calls: bool | UnsetType | None = UNSET
    reasoning: Any = UNSET
    tracing: Any = UNSET

    def __post_init__(self) -> None:
        kept = (self.audio, self.include, self.reasoning, self.tracing)
        if any(map(too_deep, kept)):
            raise ValueError(f"Fields nest deeper than {MAX_DEPTH} levels")
        if any(map(too_wide, kept)):
            raise ValueError("Fields hold an integer of more than 64 bits")


class SessionResource(SamplingResource, kw_only=True, frozen=True):
    """The effective configuration, as the server shows it, the model's own sampling defaults included."""

    id: str
    model: str
    type: Literal["realtime"] = "realtime"
    object: Literal["realtime.session"] = "realtime.session"
    instructions: str = ""
    output_modalities: list[Literal["text"]] = msgspec.field(default_factory=lambda: ["text"])
    tools: list[FunctionTool] = msgspec.field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    truncation: Literal["disabled"] = "disabled"
    audio: Any = UNSET
    include: Any = UNSET
    parallel_tool_calls: bool | UnsetType | None = UNSET
    reasoning: Any = UNSET
    tracing: Any = UNSET
