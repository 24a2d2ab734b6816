"""The response: the fields of `response.create`, and the object that the server sends, with usage and KV."""

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
"""Those of the standard, and `steered` (ours): a `response.steer` ended it."""


class ResponseParams(SamplingFields, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What `response.create` overrides for one response, with the `SamplingFields`.

    Absent and null fields have the session's values. `conversation` "none" does not change the history and may
    run beside other responses; `input` replaces the context. At most one of `text.format` (as in the Responses
    API), `response_format` (as in Chat Completions) and `grammar` (ours) sets the format of the text.
    `events` "brief" (ours) sends each thing once: `response.created`, text deltas, `response.output_item.done`
    for each complete item, `response.done` without `output`, and no `conversation.item` events.
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
    """The cached tokens by kind; ours are all text."""

    text_tokens: int
    audio_tokens: int = 0


class InputTokenDetails(msgspec.Struct, kw_only=True, frozen=True):
    """The prompt's tokens. `cached_tokens` had their KV when the turn began."""

    cached_tokens: int
    text_tokens: int
    cached_tokens_details: CachedTokensDetails
    audio_tokens: int = 0


class OutputTokenDetails(msgspec.Struct, kw_only=True, frozen=True):
    """The reply's tokens by kind; ours are all text."""

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

    `new`: tokens that are new to the session: appended text, template, the pending token. `prefilled`: tokens
    that the engine computed for the first time. `resident`, `host`, `disk`: where the other KV was found.
    `recomputed`: tokens computed once more. `restore_ms`: milliseconds of restoring KV. `miss_reason`: why KV
    had to be computed again.
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
    """How a response ended that is not completed. An incomplete one has an `error` where the server cut it."""

    type: Literal["cancelled", "incomplete", "failed"]
    reason: Reason | None = None
    error: StatusError | None = None


class Response(msgspec.Struct, kw_only=True, frozen=True):
    """A response. `conversation_id` is null where it is out of band. `usage` and `kv` are set at the end."""

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
