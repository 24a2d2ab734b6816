"""The session's configuration: the client sends a patch, the server sends the whole.

A field that is absent from a patch (UNSET) does not change. Null restores the value that the session began
with. `""` and `[]` are values like others: no instructions, no tools.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from .formats import MAX_DEPTH, FunctionTool, Modalities, ToolChoice, Tools, too_deep, too_wide
from .items import Given
from .sampling import SamplingFields, SamplingResource


class ConversationLimits(Given, kw_only=True, frozen=True, omit_defaults=True):
    """Limits of a prompt, in a `truncation`. `post_instructions`: the most tokens that it may have behind
    instructions and tools; null: as many as the context holds."""

    post_instructions: Annotated[int, Meta(ge=1)] | None = None


class RetentionRatio(
    Given, kw_only=True, frozen=True, omit_defaults=True, tag_field="type", tag="retention_ratio"
):
    """A `truncation`: when the context is full, leave out the oldest turns until the rest fills at most this
    share of the room behind the instructions. `token_limits` makes that room smaller."""

    retention_ratio: Annotated[float, Meta(ge=0, le=1)]
    token_limits: ConversationLimits | None = None


TruncationConfig: TypeAlias = Literal["auto", "disabled"] | RetentionRatio
"""What a response does if its prompt does not fit into the context. `auto`: it leaves out the oldest turns
until the rest fills at most 0.8 of the room behind the instructions (OpenAI's `auto` is a ratio of 1.0).
`disabled`: it is refused as `context_length_exceeded`."""


class SessionPatch(SamplingFields, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The fields of `session.update`, with the `SamplingFields` (ours). A `model` may be another name of the
    model that the session has; any other is refused.

    `parallel_tool_calls` false: a reply ends behind its first tool call.

    `audio`, `include`, `reasoning` and `tracing` have no effect; nor has `output_modalities`, as all replies
    are text. `unserved` in the answer names those that were given. Raises ValueError if one of them nests too
    deep or holds an integer of more than 64 bits.
    """

    type: Literal["realtime"] | UnsetType = UNSET
    model: str | UnsetType | None = UNSET
    instructions: str | UnsetType | None = UNSET
    output_modalities: Modalities | UnsetType | None = UNSET
    tools: Tools | UnsetType | None = UNSET
    tool_choice: ToolChoice | UnsetType | None = UNSET
    truncation: TruncationConfig | UnsetType | None = UNSET
    parallel_tool_calls: bool | UnsetType | None = UNSET
    audio: Any = UNSET
    include: Any = UNSET
    reasoning: Any = UNSET
    tracing: Any = UNSET

    def __post_init__(self) -> None:
        kept = (self.audio, self.include, self.reasoning, self.tracing)
        if any(map(too_deep, kept)):
            raise ValueError(f"Fields nest deeper than {MAX_DEPTH} levels")
        if any(map(too_wide, kept)):
            raise ValueError("Fields hold an integer of more than 64 bits")


class SessionResource(SamplingResource, kw_only=True, frozen=True):
    """The configuration in force. Sampling fields that were not set have the model's own defaults. Each field
    here has an effect.

    `unserved` (ours), only in `session.updated`: the fields of that `session.update` that have no effect here.
    """

    id: str
    model: str
    type: Literal["realtime"] = "realtime"
    object: Literal["realtime.session"] = "realtime.session"
    instructions: str = ""
    output_modalities: list[Literal["text"]] = msgspec.field(default_factory=lambda: ["text"])
    tools: list[FunctionTool] = msgspec.field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    truncation: TruncationConfig = "auto"
    unserved: list[str] | UnsetType = UNSET
