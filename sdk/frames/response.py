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
    "turn_detected", "client_cancelled", "max_output_tokens", "content_filter", "steered", "repetition"
]
"""Why a response ended before its end: the standard's reasons, and two of ours. `steered`: a `response.steer`
ended it. `repetition`: the reply repeated one cycle of tokens without end."""


class ResponseParams(SamplingFields, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Fields that replace a session's configuration for one response, with the `SamplingFields`. Where a field
    is absent or null, the session's value counts.

    `conversation` "none": the response is out of band: it does not change the history, and may run beside other
    responses. `input`: items that the model reads instead of the conversation. `metadata`: comes back in the
    `Response`.

    At most one of `text.format` (as in the Responses API), `response_format` (as in Chat Completions) and
    `grammar` (ours) sets the format of the text. `events` "brief" (ours): the server sends each thing once:
    `response.created`, text deltas, `response.output_item.done` for each complete item, and `response.done`
    without `output`; it sends no `conversation.item` events. `parallel_tool_calls` false: the reply ends behind
    its first tool call.

    `audio` and `reasoning` have no effect; nor has `output_modalities`, as all replies are text. `unserved` of
    the `Response` names those that were given. Raises ValueError if `audio` or `reasoning` nests too deep.
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
    parallel_tool_calls: bool | UnsetType | None = UNSET
    audio: Any = UNSET
    reasoning: Any = UNSET

    def __post_init__(self) -> None:
        if too_deep(self.audio) or too_deep(self.reasoning):
            raise ValueError(f"Fields nest deeper than {MAX_DEPTH} levels")


class CachedTokensDetails(msgspec.Struct, kw_only=True, frozen=True):
    """The cached tokens of a prompt by kind. As there is no audio here, all are text."""

    text_tokens: int
    audio_tokens: int = 0


class InputTokenDetails(msgspec.Struct, kw_only=True, frozen=True):
    """The prompt's tokens: all are text. `cached_tokens`: those that had KV when the turn began, on the device
    or in a lower tier."""

    cached_tokens: int
    text_tokens: int
    cached_tokens_details: CachedTokensDetails
    audio_tokens: int = 0


class OutputTokenDetails(msgspec.Struct, kw_only=True, frozen=True):
    """The reply's tokens by kind. As there is no audio here, all are text."""

    text_tokens: int
    audio_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True, frozen=True):
    """Tokens of one response, in the standard's fields. `input_tokens`: the whole prompt; `output_tokens`: the
    reply; `total_tokens`: both together."""

    total_tokens: int
    input_tokens: int
    output_tokens: int
    input_token_details: InputTokenDetails
    output_token_details: OutputTokenDetails


class KVReceipt(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """How much KV a response computed and where it found the rest, in tokens (ours).

    `new`: prompt tokens that the session did not have before: appended text, what the chat template writes,
    and the last token of the reply before, which had no KV yet. `prefilled`: computed for the first time;
    streamed input that was taken back counts, too. `recomputed`: computed again. `resident`, `host`, `disk`:
    prompt tokens with KV that was on the device, or came from the host or disk tier. These five add up to the
    prompt, and to what was computed a second time, such as the beginning of a reply that goes on after its
    engine or server died. `restore_ms`: milliseconds of waiting for the disk. `miss_reason`: why more than the
    new tokens had to be computed; null: no more had to be.

    The engine counts these when it ends a reply. Of a reply that the server stops (it was cancelled, or a stop
    string or its only call ended it), the tokens that had no KV on the device at the beginning count as
    `prefilled`. If they are more than `new`, or no token came, `miss_reason` is "unreported": then only `new`
    is known, the other counts are 0, and so are the cached tokens of the usage.
    """

    new: int
    prefilled: int
    resident: int
    recomputed: int
    host: int
    disk: int
    restore_ms: float
    miss_reason: str | None = None


class TruncatedContext(msgspec.Struct, kw_only=True, frozen=True):
    """What a response left out of its context, because that was full (ours).

    `items`: ids of the items that were left out, in order. They stay in the conversation, but later responses
    do not read them either. A response out of band, or with instructions or tools of its own, leaves items out
    for itself alone. `tokens`: by how much the prompt got shorter; a lower bound if the whole prompt was too
    long to be counted.
    """

    items: list[str]
    tokens: int


class StatusError(msgspec.Struct, kw_only=True, frozen=True):
    """Why a response failed, or was cut by the server: `type` and `code` for programs, `message` for people, as
    in an `error` event."""

    type: str
    code: str | None
    message: str


class StatusDetails(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Why a response has another status than `completed`. `reason`: of a cancelled or incomplete one. `error`:
    of a failed one, and of an incomplete one that the server cut because it shuts down."""

    type: Literal["cancelled", "incomplete", "failed"]
    reason: Reason | None = None
    error: StatusError | None = None


class Response(msgspec.Struct, kw_only=True, frozen=True):
    """A response, as `response.created` and `response.done` show it. `conversation_id`: null if it is out of
    band. `output`: its items, none if `events` is "brief". `usage` and `kv` (ours): in `response.done`, but a
    failed response may lack them. `truncated` (ours): in `response.done`, if items were left out of its
    context.

    `unserved` (ours): in `response.created`, the fields of the `response.create` that have no effect here.
    """

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
    unserved: list[str] | UnsetType = UNSET
    truncated: TruncatedContext | UnsetType = UNSET
