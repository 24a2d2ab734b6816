"""Bodies of Anthropic's Messages as msgspec structs: requests, answers and the events of a stream.

The field names are those of the `anthropic` package; `temperature`, `top_p` and `top_k` are those of its
releases before 2. Some fields are accepted and have no effect. `REFUSED` ones would change what the model reads
or writes, so they are refused by name. Unknown fields are refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ...sdk.frames.formats import MAX_DEPTH, too_deep, too_wide
from ...sdk.frames.response import KVReceipt
from ...sdk.frames.sampling import SamplingFields, sampling_fields
from ..clients import MESSAGES, accepting

MAX_MESSAGES = 100_000
MAX_TOOLS = 1_000
LEAST_BUDGET = 1_024
"""The least value of ``budget_tokens`` in the field ``thinking``."""

REFUSED = frozenset(
    {
        "compaction",
        "container",
        "mcp_servers",
        "output_config.task_budget",
        "thread",
    }
)
"""Fields of the standard that are refused, by their path; ``[]`` stands for any index."""


class _Hosted:
    """The types of tools that are left out: Anthropic's server runs them, or defines what the model sees of
    them. Each has a date in its type."""

    _names = (
        "advisor|bash|browser|code_execution|computer|mcp|memory|text_editor|tool_search|web_fetch|web_search"
    )
    _form = re.compile(rf"({_names})_[a-z0-9_]{{1,32}}")

    def __contains__(self, kind: object) -> bool:
        return isinstance(kind, str) and self._form.fullmatch(kind) is not None


UNSERVED_TOOLS = _Hosted()
BLOCKS = frozenset(
    {
        "image",
        "document",
        "search_result",
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "tool_reference",
        "browser_state",
        "container_upload",
        "mcp_tool_use",
        "mcp_tool_result",
        "advisor_tool_result",
        "compaction",
        "fallback",
        "tool_addition",
        "tool_removal",
    }
)
"""The types of content blocks that are refused."""


class _MessagesBody(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Base of the parts of a request. Unknown fields are refused."""


ToolName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=128)]
CacheControl: TypeAlias = dict[str, Any] | None
"""The field ``cache_control``. It has no effect: KV is cached without it."""

# --- messages -----------------------------------------------------------------------------------------------


class TextBlock(_MessagesBody, tag_field="type", tag="text", kw_only=True, frozen=True):
    """Text in a message of a request. ``citations`` that a client sends back have no effect."""

    text: str
    citations: Any = None
    cache_control: CacheControl = None


class ThinkingBlock(_MessagesBody, tag_field="type", tag="thinking", kw_only=True, frozen=True):
    """Reasoning that a client sends back. It has no effect: templates leave out the reasoning of earlier
    turns."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(
    _MessagesBody, tag_field="type", tag="redacted_thinking", kw_only=True, frozen=True
):
    """Encrypted reasoning that a client sends back. It has no effect."""

    data: str


class ToolUseBlock(_MessagesBody, tag_field="type", tag="tool_use", kw_only=True, frozen=True):
    """A tool call of the model, in a message of a request. ``input``: a JSON object; its text stays as the
    client wrote it."""

    id: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z")]
    name: ToolName
    input: msgspec.Raw
    caller: Any = None
    toolset_name: None = None
    cache_control: CacheControl = None


class ToolResultBlock(_MessagesBody, tag_field="type", tag="tool_result", kw_only=True, frozen=True):
    """The output of a tool, for the call with the id ``tool_use_id``. ``is_error``: the tool failed, and the
    output says why."""

    tool_use_id: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    toolset_name: None = None
    cache_control: CacheControl = None


Block: TypeAlias = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
Text: TypeAlias = str | list[TextBlock]


class FromSystem(_MessagesBody, tag_field="role", tag="system", kw_only=True, frozen=True):
    """A system message in the middle of a conversation."""

    content: Text


class FromUser(_MessagesBody, tag_field="role", tag="user", kw_only=True, frozen=True):
    """A message of the user: text, and outputs of tools."""

    content: str | list[Block]


class FromAssistant(_MessagesBody, tag_field="role", tag="assistant", kw_only=True, frozen=True):
    """A message of the model: text, reasoning and tool calls."""

    content: str | list[Block]


AnyMessage: TypeAlias = FromSystem | FromUser | FromAssistant

# --- tools, thinking and formats ----------------------------------------------------------------------------


class CustomTool(_MessagesBody, kw_only=True, frozen=True, rename={"parameters": "input_schema"}):
    """A tool that the client runs. ``input_schema``: a JSON Schema. ``strict``: the input of a call is made to
    match it.

    Without effect: ``cache_control``, ``defer_loading`` and ``eager_input_streaming`` (a call's input is always
    streamed as it comes), ``input_examples``.
    """

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}\Z")]
    parameters: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    cache_control: CacheControl = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        _check_schema(self.parameters)


class AutoChoice(_MessagesBody, tag_field="type", tag="auto", kw_only=True, frozen=True):
    """A value of ``tool_choice``: the model may call tools."""

    disable_parallel_tool_use: bool | None = None


class AnyChoice(_MessagesBody, tag_field="type", tag="any", kw_only=True, frozen=True):
    """A value of ``tool_choice``: the model must call a tool."""

    disable_parallel_tool_use: bool | None = None


class NamedChoice(_MessagesBody, tag_field="type", tag="tool", kw_only=True, frozen=True):
    """A value of ``tool_choice``: the model must call the tool ``name``."""

    name: ToolName
    disable_parallel_tool_use: bool | None = None


class NoChoice(_MessagesBody, tag_field="type", tag="none", kw_only=True, frozen=True):
    """A value of ``tool_choice``: the model may call no tool."""


ToolChoice: TypeAlias = AutoChoice | AnyChoice | NamedChoice | NoChoice

Display: TypeAlias = Literal["summarized", "omitted"] | None
"""How reasoning is shown in the answer. ``omitted``: its blocks have no text. ``summarized`` and None: they
have all of the text; nothing is summarized here."""


class ThinkingEnabled(_MessagesBody, tag_field="type", tag="enabled", kw_only=True, frozen=True):
    """A value of ``thinking``: the model reasons, if it can. ``budget_tokens`` has no effect."""

    budget_tokens: Annotated[int, Meta(ge=LEAST_BUDGET)]
    display: Display = None


class ThinkingAdaptive(_MessagesBody, tag_field="type", tag="adaptive", kw_only=True, frozen=True):
    """A value of ``thinking``: the model reasons as it likes, as without this field."""

    display: Display = None


class ThinkingBetweenTools(_MessagesBody, tag_field="type", tag="between_tools", kw_only=True, frozen=True):
    """A value of ``thinking``, treated as adaptive: the model reasons as it likes."""


class ThinkingDisabled(_MessagesBody, tag_field="type", tag="disabled", kw_only=True, frozen=True):
    """A value of ``thinking``: the answer has no thinking blocks."""


Thinking: TypeAlias = ThinkingEnabled | ThinkingAdaptive | ThinkingBetweenTools | ThinkingDisabled


class JsonFormat(_MessagesBody, tag_field="type", tag="json_schema", kw_only=True, frozen=True):
    """A format of the reply: its text is JSON that fits ``schema``."""

    schema: dict[str, Any]

    def __post_init__(self) -> None:
        _check_schema(self.schema)


class OutputConfig(_MessagesBody, kw_only=True, frozen=True):
    """The field ``output_config``. ``format``: the form of the reply's text. ``effort`` has no effect."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None
    task_budget: None = None


def _check_schema(schema: dict[str, Any]) -> None:
    if too_deep(schema):
        raise ValueError(f"The schema nests deeper than {MAX_DEPTH} levels")
    if too_wide(schema):
        raise ValueError("The schema holds an integer of more than 64 bits")


# --- requests -----------------------------------------------------------------------------------------------


class MessagesConversation(_MessagesBody, kw_only=True, frozen=True):
    """The fields that the bodies of ``/v1/messages`` and ``/v1/messages/count_tokens`` share."""

    model: str
    messages: Annotated[list[AnyMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: Text | None = None
    tools: Annotated[list[CustomTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    context_management: dict[str, Any] | None = None
    mcp_servers: Annotated[list[Any], Meta(max_length=0)] | None = None
    compaction: None = None


class CountRequest(MessagesConversation, kw_only=True, frozen=True):
    """The body of ``POST /v1/messages/count_tokens``. Only the conversation and the tools count."""


if TYPE_CHECKING:

    class _Sampling(MessagesConversation, SamplingFields, kw_only=True, frozen=True): ...
else:
    _Sampling = sampling_fields(
        {"stop": "stop_sequences"},
        {"temperature": Annotated[float, Meta(ge=0, le=1)] | UnsetType | None},
        MessagesConversation,
    )


class MessagesRequest(
    _Sampling,
    kw_only=True,
    frozen=True,
    forbid_unknown_fields=True,
    rename={"max_output_tokens": "max_tokens"},
):
    """The body of ``POST /v1/messages``. ``context_management``: the answer says that no edit was applied."""

    max_output_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    stream: bool | None = None
    container: None = None
    thread: None = None


# --- answers ------------------------------------------------------------------------------------------------


class _Answered(msgspec.Struct, kw_only=True, frozen=True):
    """Base of the answers' parts."""


class ToldTextBlock(_Answered, tag_field="type", tag="text", kw_only=True, frozen=True):
    """A content block of the answer: text."""

    text: str
    citations: None = None


class ToldThinking(_Answered, tag_field="type", tag="thinking", kw_only=True, frozen=True):
    """A content block of the answer: the model's reasoning. ``signature``: a digest of its text."""

    thinking: str
    signature: str


class ToldToolUse(_Answered, tag_field="type", tag="tool_use", kw_only=True, frozen=True):
    """A content block of the answer: a tool call. ``input``: a JSON object."""

    id: str
    name: str
    input: msgspec.Raw


ToldBlock: TypeAlias = ToldTextBlock | ToldThinking | ToldToolUse

StopReason: TypeAlias = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class MessageUsage(_Answered, kw_only=True, frozen=True):
    """What a request cost, in tokens. The prompt's tokens are the sum of ``input_tokens``, which had no KV from
    earlier turns, and ``cache_read_input_tokens``, which had. ``kv``: where the KV came from (ours)."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int | UnsetType = UNSET
    cache_creation_input_tokens: int | UnsetType = UNSET
    service_tier: str | UnsetType = UNSET
    kv: KVReceipt | UnsetType = UNSET


class EditsApplied(_Answered, kw_only=True, frozen=True):
    """The field ``context_management`` of an answer: which edits of the context were applied. None is ever
    applied."""

    applied_edits: list[None] = []


class MessageAnswer(_Answered, kw_only=True, frozen=True, tag_field="type", tag="message"):
    """The answer to a request. In the first event of a stream it has no content and no stop reason yet.
    ``unserved``: the tools that were left out of the request (ours)."""

    id: str
    model: str
    content: list[ToldBlock]
    usage: MessageUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    role: str = "assistant"
    context_management: EditsApplied | UnsetType = UNSET
    unserved: Sequence[str] | UnsetType = UNSET


class TokenCount(_Answered, kw_only=True, frozen=True):
    """The answer of ``count_tokens``: the number of tokens of the prompt."""

    input_tokens: int


# --- the events of a stream ---------------------------------------------------------------------------------


class MessageStreamEvent(_Answered, kw_only=True, frozen=True, tag_field="type"):
    """Base of the events of a stream. An event's ``type`` is also the name of the server-sent event."""

    @property
    def name(self) -> str:
        """The event's type."""
        return str(self.__struct_config__.tag)


class MessageStart(MessageStreamEvent, tag="message_start", kw_only=True, frozen=True):
    """The first event of a stream, with the answer as it begins."""

    message: MessageAnswer


class Ping(MessageStreamEvent, tag="ping", kw_only=True, frozen=True):
    """An event without content, which keeps the connection alive."""


class BlockStart(MessageStreamEvent, tag="content_block_start", kw_only=True, frozen=True):
    """A content block begins; it is still empty."""

    index: int
    content_block: ToldBlock


class BlockText(_Answered, tag_field="type", tag="text_delta", kw_only=True, frozen=True):
    """In `BlockDelta`: more text."""

    text: str


class BlockThinking(_Answered, tag_field="type", tag="thinking_delta", kw_only=True, frozen=True):
    """In `BlockDelta`: more reasoning."""

    thinking: str


class BlockSignature(_Answered, tag_field="type", tag="signature_delta", kw_only=True, frozen=True):
    """In `BlockDelta`: the signature of the reasoning, at its end."""

    signature: str


class BlockInput(_Answered, tag_field="type", tag="input_json_delta", kw_only=True, frozen=True):
    """In `BlockDelta`: more of a tool call's input, as a part of its JSON text."""

    partial_json: str


AnyDelta: TypeAlias = BlockText | BlockThinking | BlockSignature | BlockInput


class BlockDelta(MessageStreamEvent, tag="content_block_delta", kw_only=True, frozen=True):
    """More of the content block with this ``index``."""

    index: int
    delta: AnyDelta


class BlockStop(MessageStreamEvent, tag="content_block_stop", kw_only=True, frozen=True):
    """The content block with this ``index`` ends."""

    index: int


class Ending(_Answered, kw_only=True, frozen=True):
    """In `MessageDelta`: why the reply ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(MessageStreamEvent, tag="message_delta", kw_only=True, frozen=True):
    """The reply has ended. ``usage`` replaces that of the first event."""

    delta: Ending
    usage: MessageUsage
    context_management: EditsApplied | UnsetType = UNSET


class MessageStop(MessageStreamEvent, tag="message_stop", kw_only=True, frozen=True):
    """The last event."""


class FaultDetails(_Answered, kw_only=True, frozen=True):
    """Our field in an error, for what Anthropic's errors have no field for. `error_code`: the stable code of
    this server. `param`: the field at fault."""

    error_code: str
    param: str | UnsetType = UNSET


class MessagesFault(_Answered, kw_only=True, frozen=True):
    """The error itself, in Anthropic's form. `message` is for people."""

    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "rate_limit_error",
        "timeout_error",
        "overloaded_error",
        "api_error",
    ]
    message: str
    details: FaultDetails


class MessagesError(MessageStreamEvent, tag="error", kw_only=True, frozen=True):
    """The body of an answer that refuses a request, or the last event of a stream that failed. `request_id`:
    the id that is also in the header `request-id` and in the server's log."""

    error: MessagesFault
    request_id: str


MessageEvent: TypeAlias = (
    MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | MessagesError
)
"""Any event of a stream."""


ACCEPTED, COUNTED = accepting(MessagesRequest, MESSAGES), accepting(CountRequest, MESSAGES)
REQUEST = msgspec.json.Decoder(ACCEPTED)
"""Decodes the body of ``POST /v1/messages``."""
COUNT = msgspec.json.Decoder(COUNTED)
"""Decodes the body of ``POST /v1/messages/count_tokens``."""


def is_unserved(path: str, value: Any) -> bool:
    """Whether the standard has this field with this value, and this server refuses it. ``path``: where it is
    in the body, such as ``messages[0].content[1].type``."""
    pattern = re.sub(r"\[\d+\]", "[]", path)
    if pattern in REFUSED:
        return True
    if not isinstance(value, str):
        return False
    return not pattern.startswith("tools[]") and pattern.endswith(".type") and value in BLOCKS
