"""The response: what `response.create` asks for, and what the server tells of it, usage and KV included."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from .formats import (
    MAX_DEPTH,
    AnyGrammar,
    Modalities,
    ResponseFormat,
    TextConfig,
    ToolChoice,
    Tools,
    too_deep,
)
from .items import AnyItem, InputItem
from .sampling import MaxOutputTokens, SamplingFields

Metadata: TypeAlias = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
ResponseStatus: TypeAlias = Literal["in_progress", "completed", "cancelled", "incomplete", "failed"]
Reason: TypeAlias = Literal[
    "turn_detected", "client_cancelled", "max_output_tokens", "content_filter", "steered"
]
"""Those of the standard, and `steered`: it ended for what was said meanwhile (ours)."""


class ResponseParams(SamplingFields, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What `response.create` may override for one response; absent and null fields follow the session.

    The `SamplingFields` are among them.

    `conversation` "none" leaves the history alone and may run beside others; `input` replaces the context.
    What the reply's text must be: `text.format` as in the Responses interface, `response_format` as in Chat
    Completions, or `grammar` (ours): one of them. `events` "brief" (ours): each thing is told once. There are
    `response.created`, text as it comes, `response.output_item.done` for what is whole, and `response.done`
    without `output`; no item is told of as the conversation's.
    The last three fields have no effect (`unserved`).
    """

    conversation: Literal["auto", "none"] | UnsetType | None = UNSET
    input: Annotated[list[InputItem], Meta(max_length=4096)] | UnsetType | None = UNSET
    instructions: str | UnsetType | None = UNSET
    output_modalities: Modalities | UnsetType | None = UNSET
    tools: Tools | UnsetType | None = UNSET
    tool_choice: ToolChoice | UnsetType | None = UNSET
    metadata: Metadata | UnsetType | None = UNSET
    text: TextConfig | UnsetType | None = UNSET
    response_format: ResponseFormat | UnsetType | None = UNSET
    grammar: AnyGrammar | UnsetType | None = UNSET
    events: Literal["all", "brief"] | UnsetType | None = UNSET
    audio: Any = UNSET
    parallel_tool_calls: bool | UnsetType | None = UNSET
    reasoning: Any = UNSET

    def __post_init__(self) -> None:
        if too_deep(self.audio) or too_deep(self.reasoning):
            raise ValueError(f"Fields nest deeper than {MAX_DEPTH} levels")


class CachedTokensDetails(msgspec.Struct, kw_only=True, frozen=True):
    """Of which kind the cached tokens are; ours are all text."""

    text_tokens: int
    audio_tokens: int = 0


class InputTokenDetails(msgspec.Struct, kw_only=True, frozen=True):
    """`cached_tokens` had their KV when the turn began."""

    cached_tokens: int
    text_tokens: int
    cached_tokens_details: CachedTokensDetails
    audio_tokens: int = 0


class OutputTokenDetails(msgspec.Struct, kw_only=True, frozen=True):
    """Of which kind the reply's tokens are."""

    text_tokens: int
    audio_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True, frozen=True):
    """Tokens of one response, in the standard's fields."""

    total_tokens: int
    input_tokens: int
    output_tokens: int
    input_token_details: InputTokenDetails
    output_token_details: OutputTokenDetails


class KVReceipt(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What the turn cost, in tokens, and why (ours).

    `new`: what the session counts as truly new: appended, template, pending. `prefilled`: what the engine's
    steps computed for the first time. `resident`, `host`, `disk`: where the rest of the KV was found.
    `recomputed`: computed once more. `restore_ms`: milliseconds spent bringing KV up.
    """

    new: int
    prefilled: int
    resident: int
    recomputed: int
    host: int
    disk: int
    restore_ms: float
    miss_reason: str | None = None


class StatusError(msgspec.Struct, kw_only=True, frozen=True):
    """Why a response failed."""

    type: str
    code: str | None
    message: str


class StatusDetails(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """How a response ended, when it was not simply completed. An incomplete one has an `error` where the server
    cut it.
    """

    type: Literal["cancelled", "incomplete", "failed"]
    reason: Reason | None = None
    error: StatusError | None = None


class Response(msgspec.Struct, kw_only=True, frozen=True):
    """A response. `conversation_id` is null when it is out of band; `usage` and `kv` come at the end."""

    id: str
    status: ResponseStatus
    conversation_id: str | None
    max_output_tokens: MaxOutputTokens
    object: Literal["realtime.response"] = "realtime.response"
    status_details: StatusDetails | None = None
    output: list[AnyItem] = msgspec.field(default_factory=list)
    output_modalities: list[Literal["text"]] = msgspec.field(default_factory=lambda: ["text"])
    metadata: dict[str, str] | None = None
    usage: Usage | None = None
    kv: KVReceipt | UnsetType = UNSET
