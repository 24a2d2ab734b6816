"""Bodies of Chat Completions as msgspec structs: requests, answers and chunks.

The field names are those of the `openai` package. Fields of vLLM's server that have a meaning here are served,
too. Some fields are accepted and have no effect; `REFUSED` ones would change what the model reads or writes, so
they are refused by name. Unknown fields are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ...sdk.frames.formats import MAX_TOOLS, ResponseFormat, ToolDefinition
from ...sdk.frames.response import KVReceipt
from ...sdk.frames.sampling import MaxOutputTokens, SamplingFields, Stop, sampling_fields
from ..clients import CHAT, RefusedFields, accepting
from ..live.reply import ScoredToken

MAX_CHOICES = 16
"""The most replies to one request (``n``)."""

REFUSED = RefusedFields(
    frozenset(
        {
            "audio",
            "function_call",
            "functions",
            "messages[].audio",
            "messages[].content[].file",
            "messages[].content[].image_url",
            "messages[].content[].input_audio",
            "messages[].function_call",
            "prediction",
            "web_search_options",
        }
    ),
    {
        "messages[].content[].type": frozenset(
            {"image_url", "input_audio", "file", "video_url", "audio_url"}
        ),
        "messages[].role": frozenset({"function"}),
        "messages[].tool_calls[].type": frozenset({"custom"}),
        "tool_choice.type": frozenset({"custom"}),
        "tool_choice.allowed_tools.tools[].type": frozenset({"custom"}),
        "modalities[]": frozenset({"audio"}),
    },
)
UNSERVED_TOOLS = frozenset({"custom"})
"""The types of tools that are left out: the server cannot run them, or has no call for them."""


class _Body(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of the parts of a request."""


# --- messages -----------------------------------------------------------------------------------------------


class ChatTextPart(_Body, tag_field="type", tag="text", kw_only=True, frozen=True):
    """A part of a message's content: text."""

    text: str


class RefusalPart(_Body, tag_field="type", tag="refusal", kw_only=True, frozen=True):
    """A part of a message's content: a refusal that the model wrote. It is read as the message's text."""

    refusal: str


Parts: TypeAlias = str | list[ChatTextPart | RefusalPart]


class FunctionOfCall(_Body, kw_only=True, frozen=True):
    """The function that a tool call names, and its arguments: JSON text."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    arguments: str


class ToolCall(_Body, kw_only=True, frozen=True):
    """A tool call of the model, in a message of a request. ``index``: its position among the calls, which some
    clients copy from a stream's chunk; it has no effect."""

    id: Annotated[str, Meta(min_length=1, max_length=64)]
    function: FunctionOfCall
    type: Literal["function"] = "function"
    index: int | None = None


class _Message(_Body, tag_field="role", kw_only=True, frozen=True):
    """Base of the messages of a request. ``name`` has no effect: chat templates do not know it."""

    name: str | None = None


class SystemMessage(_Message, tag="system", kw_only=True, frozen=True):
    """Instructions. As the first message they are the session's instructions; later ones are system messages in
    the conversation."""

    content: Parts


class DeveloperMessage(_Message, tag="developer", kw_only=True, frozen=True):
    """Instructions, treated as a system message."""

    content: Parts


class UserMessage(_Message, tag="user", kw_only=True, frozen=True):
    """A user's message."""

    content: Parts


class AssistantMessage(_Message, tag="assistant", kw_only=True, frozen=True):
    """A message of the model, with its tool calls. Reasoning that a client sends back has no effect: templates
    leave out the reasoning of earlier turns."""

    content: Parts | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    annotations: Any = None
    audio: None = None
    function_call: None = None


class ToolMessage(_Message, tag="tool", kw_only=True, frozen=True):
    """The output of a tool, for the call with the id ``tool_call_id``."""

    tool_call_id: Annotated[str, Meta(min_length=1, max_length=64)]
    content: Parts


ChatMessage: TypeAlias = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


# --- tools and formats --------------------------------------------------------------------------------------


class ChatTool(_Body, tag_field="type", tag="function", kw_only=True, frozen=True):
    """A tool that is offered to the model."""

    function: ToolDefinition


class FunctionName(_Body, kw_only=True, frozen=True):
    """The name of a function."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]


class ChosenFunction(_Body, tag_field="type", tag="function", kw_only=True, frozen=True):
    """A value of ``tool_choice``: this function must be called."""

    function: FunctionName


class AllowedFunctions(_Body, kw_only=True, frozen=True):
    """The functions that may be called, or of which one must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenFunction], Meta(min_length=1, max_length=MAX_TOOLS)]


class ChatAllowedTools(_Body, tag_field="type", tag="allowed_tools", kw_only=True, frozen=True):
    """Only some of the tools may be called; the prompt still has all of them."""

    allowed_tools: AllowedFunctions


ChatToolChoice: TypeAlias = Literal["auto", "none", "required"] | ChosenFunction | ChatAllowedTools


class StreamOptions(_Body, kw_only=True, frozen=True):
    """Options of a stream. ``include_usage``: a last chunk has the usage. The others have no effect."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(_Body, kw_only=True, frozen=True):
    """vLLM's field for the form of the reply's text; at most one field may be set. ``json``: a JSON Schema, as
    an object or as text. ``grammar``: a Lark grammar in llguidance's dialect."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


# --- requests -----------------------------------------------------------------------------------------------


if TYPE_CHECKING:
    _Sampling = SamplingFields
else:
    _Sampling = sampling_fields(
        {"max_output_tokens": "max_tokens", "min_output_tokens": "min_tokens"},
        {
            "seed": Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | UnsetType | None,
            "stop": str | Stop | UnsetType | None,
            "top_k": Annotated[int, Meta(ge=-1, le=2**31 - 1)] | UnsetType | None,
        },
    )


class SamplingBody(_Sampling, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The fields that the bodies of Chat Completions and Completions share: the model, sampling, limits and
    streaming.

    ``ignore_eos``: the reply has as many tokens as its limit, or as fit into the context.
    """

    model: str | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class ChatRequest(SamplingBody, kw_only=True, frozen=True):
    """The body of ``POST /v1/chat/completions``.

    ``prompt_cache_key`` leads to the session that had it last, if the conversation continues that one.
    """

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=20_000)]
    tools: Annotated[list[ChatTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ChatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    max_completion_tokens: MaxOutputTokens | None = None
    logprobs: bool | None = None
    modalities: list[Literal["text"]] | None = None
    prompt_cache_key: str | None = None


# --- answers ------------------------------------------------------------------------------------------------


class _Told(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Base of the parts of an answer. Fields that are unset or at their default are left out of the JSON."""


class ToldFunction(_Told, kw_only=True, frozen=True):
    """The function of a tool call in an answer; in a chunk, only what is new of its name and arguments."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToldCall(_Told, omit_defaults=False, kw_only=True, frozen=True):
    """A tool call in an answer."""

    id: str
    function: ToldFunction
    type: str = "function"


class CallDelta(_Told, kw_only=True, frozen=True):
    """In a chunk, what is new of the tool call with this ``index``. The first one has the call's id and
    name."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: ToldFunction


class ToldMessage(_Told, omit_defaults=False, kw_only=True, frozen=True):
    """The whole reply, in an answer that does not stream. ``content`` is null if the reply is only tool
    calls."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[ToldCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class Delta(_Told, kw_only=True, frozen=True):
    """In a chunk, what is new of a reply."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChoiceLogprobs(msgspec.Struct, kw_only=True, frozen=True):
    """The log probabilities of the tokens of a reply, or of a chunk."""

    content: list[ScoredToken] | None = None
    refusal: None = None


FinishReason: TypeAlias = Literal["stop", "length", "tool_calls", "content_filter"]


class Choice(msgspec.Struct, kw_only=True, frozen=True):
    """One reply in an answer that does not stream."""

    index: int
    message: ToldMessage
    finish_reason: FinishReason
    logprobs: ChoiceLogprobs | None = None


class ChunkChoice(msgspec.Struct, kw_only=True, frozen=True):
    """In a chunk, what is new of the reply with this ``index``."""

    index: int
    delta: Delta
    finish_reason: FinishReason | None = None
    logprobs: ChoiceLogprobs | None = None


class PromptTokensDetails(msgspec.Struct, kw_only=True, frozen=True):
    """Parts of the prompt's tokens. ``cached_tokens``: those with KV from an earlier turn, on any tier."""

    cached_tokens: int = 0
    audio_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, kw_only=True, frozen=True):
    """Parts of the output's tokens that the standard counts. They are not counted here: all are 0."""

    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class CompletionUsage(msgspec.Struct, kw_only=True, frozen=True):
    """What a request cost, in tokens. The prompt counts once, and the output is that of all choices
    together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


class ChatCompletion(_Told, omit_defaults=False, kw_only=True, frozen=True):
    """The answer to a request that does not stream. ``kv``: where the prompt's KV came from (ours).
    ``unserved``: the tools that were left out of the request (ours)."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: CompletionUsage
    object: str = "chat.completion"
    system_fingerprint: str | None = None
    kv: KVReceipt | UnsetType = UNSET
    unserved: Sequence[str] | UnsetType = UNSET


class ChatChunk(_Told, omit_defaults=False, kw_only=True, frozen=True):
    """One event of a stream. The chunk with the usage, if the client asked for that, comes last and has no
    choices. ``unserved``, in the first chunk: the tools that were left out of the request (ours)."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: CompletionUsage | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"
    system_fingerprint: str | None = None
    kv: KVReceipt | UnsetType = UNSET
    unserved: Sequence[str] | UnsetType = UNSET


ACCEPTED = accepting(ChatRequest, CHAT)
REQUEST = msgspec.json.Decoder(ACCEPTED)
"""Decodes the body of ``POST /v1/chat/completions``."""
