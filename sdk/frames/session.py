"""The session's configuration: a patch from the client, the whole of it from the server.

In a patch a field that is absent (UNSET) stays as it was; `""`, `[]` and null clear it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from .formats import MAX_DEPTH, FunctionTool, Modalities, ToolChoice, Tools, too_deep, too_wide
from .sampling import SamplingFields, SamplingResource


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
