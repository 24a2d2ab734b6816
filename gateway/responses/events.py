"""The response object of the Responses standard, and the events of its stream, as the server sends them; also
the answers of the other routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from ...sdk.frames.formats import AnyText, JsonObject, JsonSchema, ToolChoice
from ...sdk.frames.response import KVReceipt
from ..live.reply import ScoredToken
from .frames import OfferedFunction, OfferedNamespace
from .items import KeptItem, KeptPart

ResponseState: TypeAlias = Literal["queued", "in_progress", "completed", "cancelled", "incomplete", "failed"]


class CachedInput(msgspec.Struct, kw_only=True, frozen=True):
    """In `ResponseUsage`: parts of the prompt's tokens. ``cached_tokens``: those with KV from an earlier turn,
    on any tier. ``cache_write_tokens``: those that were computed for the first time and are cached now."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class ReasonedOutput(msgspec.Struct, kw_only=True, frozen=True):
    """In `ResponseUsage`: the tokens of reasoning. They are not counted apart from the others: always 0."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, kw_only=True, frozen=True):
    """What a response cost, in tokens."""

    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    input_tokens_details: CachedInput = CachedInput()
    output_tokens_details: ReasonedOutput = ReasonedOutput()


class ResponseFault(msgspec.Struct, kw_only=True, frozen=True):
    """Why a response failed. ``code``: one of the standard's codes; ``type``: this server's own code of the
    error."""

    code: str
    message: str
    type: str | None = None


class Unfinished(msgspec.Struct, kw_only=True, frozen=True):
    """Why a response is incomplete: ``max_output_tokens`` or ``steered``."""

    reason: str


class ConversationRef(msgspec.Struct, kw_only=True, frozen=True):
    """The conversation of a response."""

    id: str


class ReplyTextSettings(msgspec.Struct, kw_only=True, frozen=True):
    """The field ``text`` of a response: the format of the reply's text."""

    format: AnyText | JsonObject | JsonSchema = AnyText()


class ResponseObject(msgspec.Struct, kw_only=True, frozen=True):
    """A response, as answers and events show it. ``kv``: where the prompt's KV came from (ours). ``unserved``:
    the tools that were left out of the request (ours)."""

    id: str
    created_at: int
    model: str
    status: ResponseState = "in_progress"
    object: str = "response"
    completed_at: int | None = None
    background: bool = False
    conversation: ConversationRef | None = None
    error: ResponseFault | None = None
    frequency_penalty: float = 0.0
    incomplete_details: Unfinished | None = None
    instructions: str | None = None
    kv: KVReceipt | UnsetType = UNSET
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = {}
    output: list[KeptItem] = []
    parallel_tool_calls: bool = True
    presence_penalty: float = 0.0
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: None = None
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = True
    temperature: float = 0.0
    text: ReplyTextSettings = ReplyTextSettings()
    tool_choice: ToolChoice = "auto"
    tools: list[OfferedFunction | OfferedNamespace] = []
    top_logprobs: int = 0
    top_p: float = 1.0
    truncation: Literal["auto", "disabled"] = "disabled"
    unserved: Sequence[str] | UnsetType = UNSET
    usage: ResponseUsage | None = None
    user: str | None = None


# --- events -------------------------------------------------------------------------------------------------


class ResponseStreamEvent(msgspec.Struct, kw_only=True, frozen=True):
    """Base of the events of a stream. ``sequence_number``: the event's position in the stream, from 0."""

    type: str
    sequence_number: int


class ResponseChanged(ResponseStreamEvent, kw_only=True, frozen=True):
    """The events about the whole response: ``response.created``, ``.in_progress``, ``.completed``,
    ``.incomplete`` and ``.failed``."""

    response: ResponseObject


class OutputItemEvent(ResponseStreamEvent, kw_only=True, frozen=True):
    """``response.output_item.added`` and ``.done``: an output item begins, or has ended."""

    output_index: int
    item: KeptItem


class _OfItem(ResponseStreamEvent, kw_only=True, frozen=True):
    """Base of the events about one output item. ``output_index``: its index in the output."""

    output_index: int
    item_id: str


class ContentPartEvent(_OfItem, kw_only=True, frozen=True):
    """``response.content_part.added`` and ``.done``: the text of a message or of reasoning begins, or has
    ended."""

    part: KeptPart
    content_index: int = 0


class OutputTextDelta(_OfItem, kw_only=True, frozen=True):
    """``response.output_text.delta``: more text of a message."""

    delta: str
    logprobs: list[ScoredToken] = []
    content_index: int = 0


class OutputTextDone(_OfItem, kw_only=True, frozen=True):
    """``response.output_text.done``: the whole text of a message, at its end."""

    text: str
    logprobs: list[ScoredToken] = []
    content_index: int = 0


class ReasoningTextDelta(_OfItem, kw_only=True, frozen=True):
    """``response.reasoning_text.delta``: more reasoning."""

    delta: str
    content_index: int = 0


class ReasoningTextDone(_OfItem, kw_only=True, frozen=True):
    """``response.reasoning_text.done``: the whole text of the reasoning, at its end."""

    text: str
    content_index: int = 0


class CallArgumentsDelta(_OfItem, kw_only=True, frozen=True):
    """``response.function_call_arguments.delta``: more of a tool call's arguments."""

    delta: str


class CallArgumentsDone(_OfItem, kw_only=True, frozen=True):
    """``response.function_call_arguments.done``: the whole arguments of a tool call, at its end."""

    arguments: str


class FailureEvent(msgspec.Struct, kw_only=True, frozen=True):
    """``error`` in a stream: an error after which no event follows."""

    sequence_number: int
    code: str | None
    message: str
    param: str | None = None
    type: str = "error"


class ItemPage(msgspec.Struct, kw_only=True, frozen=True):
    """A page of a list of items. ``has_more``: further items follow."""

    data: list[KeptItem]
    first_id: str
    last_id: str
    has_more: bool
    object: str = "list"


class CompactionResult(msgspec.Struct, kw_only=True, frozen=True):
    """The answer of ``/v1/responses/compact``. ``output``: one item, which holds the summary and can stand
    for the conversation."""

    id: str
    created_at: int
    output: list[KeptItem]
    usage: ResponseUsage
    object: str = "response.compaction"


class DeletionResult(msgspec.Struct, kw_only=True, frozen=True):
    """The answer to the ``DELETE`` of a response or a conversation."""

    id: str
    object: str
    deleted: bool = True


class CountedInput(msgspec.Struct, kw_only=True, frozen=True):
    """The answer of ``/v1/responses/input_tokens``: the number of the prompt's tokens."""

    input_tokens: int
    object: str = "response.input_tokens"


class ToldConversation(msgspec.Struct, kw_only=True, frozen=True):
    """A conversation, without its items, as answers show it."""

    id: str
    created_at: int
    metadata: dict[str, str] = {}
    object: str = "conversation"
