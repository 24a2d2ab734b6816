"""Requests of Responses and Conversations as msgspec structs, over HTTP and over the WebSocket.

The field names are those of the `openai` package. Sampling fields that the standard lacks are ours, with the
names that our Realtime protocol gives them. Some fields are accepted and have no effect; `REFUSED` ones
would change what the model reads or writes, so they are refused by name. Unknown fields are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from ...sdk.frames.codec import decode_prepared
from ...sdk.frames.formats import (
    MAX_TOOLS,
    AnyText,
    FunctionTool,
    JsonObject,
    JsonSchema,
    ToolChoice,
    too_deep,
    too_wide,
)
from ...sdk.frames.response import Metadata
from ...sdk.frames.sampling import SamplingFields
from ..clients import RESPONSES, Asked, RefusedFields, accepting, asked
from .items import UNSERVED_ITEMS, UNSERVED_PARTS, GivenItem, GivenItems, Id, tag_items

T = TypeVar("T")

UNSERVED_TOOLS = frozenset(
    {
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use",
        "computer_use_preview",
        "custom",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)
"""The types of tools that are left out, because the server cannot run them, or has no call for them; those of a
``tool_choice`` are refused."""
REFUSED = RefusedFields(
    frozenset(
        {
            "access_programs",
            "background_options",
            "context_management",
            "image",
            "moderation",
            "personality",
            "prompt",
            "tools[].async",
            "tools[].defer_loading",
            "tools[].tools[].async",
            "tools[].tools[].defer_loading",
            "prompt_cache_options.comparison_response_id",
        }
    ),
    {
        "input[].type": UNSERVED_ITEMS,
        "items[].type": UNSERVED_ITEMS,
        "input[].content[].type": UNSERVED_PARTS,
        "items[].content[].type": UNSERVED_PARTS,
        "input[].output[].type": UNSERVED_PARTS,
        "items[].output[].type": UNSERVED_PARTS,
        "tools[].tools[].type": UNSERVED_TOOLS,
        "tool_choice.type": UNSERVED_TOOLS | {"namespace"},
        "tool_choice.tools[].type": UNSERVED_TOOLS,
    },
)

Include: TypeAlias = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
LOGPROBS = "message.output_text.logprobs"


class _RequestPart(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Base of the parts of a request. Unknown fields are refused."""


class OfferedFunction(FunctionTool, kw_only=True, frozen=True, omit_defaults=False, tag="function"):
    """A function that the model may call. ``parameters``: a JSON Schema. ``strict``: the arguments of a call
    are made to match it. The other fields have no effect."""

    allowed_callers: Any = None
    output_schema: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(too_deep(one) or too_wide(one) for one in (self.output_schema, self.allowed_callers)):
            raise ValueError("A field nests too deep, or holds an integer of more than 64 bits")


class OfferedNamespace(_RequestPart, tag_field="type", tag="namespace", kw_only=True, frozen=True):
    """Functions that the model may call by ``NAMESPACE.NAME``; a call of one has the field ``namespace``. The
    description is read with that of the first function."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z")]
    tools: Annotated[list[OfferedFunction], Meta(max_length=MAX_TOOLS)]
    description: str | None = None


OfferedTools: TypeAlias = Annotated[list[OfferedFunction | OfferedNamespace], Meta(max_length=MAX_TOOLS)]


class ReplyText(_RequestPart, kw_only=True, frozen=True):
    """The field ``text``: the format of the reply's text. ``verbosity`` has no effect."""

    format: AnyText | JsonObject | JsonSchema | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.format, JsonSchema) and too_wide(self.format.schema):
            raise ValueError("The schema holds an integer of more than 64 bits")


class ConversationName(_RequestPart, kw_only=True, frozen=True):
    """The conversation that a request belongs to, by its id."""

    id: Id


class StreamChoice(_RequestPart, kw_only=True, frozen=True):
    """The field ``stream_options``. It has no effect: nothing is obfuscated here."""

    include_obfuscation: bool | None = None


class PromptCaching(_RequestPart, kw_only=True, frozen=True):
    """The field ``prompt_cache_options``. ``prewarm``: prefill the prompt and write nothing. The others have no
    effect: every prompt is cached."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None
    prewarm: bool | None = None


class CreateBody(SamplingFields, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The body of ``POST /v1/responses``.

    ``prompt_cache_key`` leads to the session that had it last, if the conversation continues that one. Ours,
    beside the sampling fields: ``ignore_eos``, as Chat Completions have it.
    """

    model: str | None = None
    input: str | GivenItems | None = None
    instructions: str | None = None
    previous_response_id: Id | None = None
    conversation: str | ConversationName | None = None
    tools: OfferedTools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: ReplyText | None = None
    include: list[Include] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: StreamChoice | None = None
    prompt_cache_options: PromptCaching | None = None
    max_tool_calls: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    ignore_eos: bool | None = None

    @property
    def conversation_id(self) -> str | None:
        """The id of the conversation that the request belongs to; None if it names none."""
        named = self.conversation
        return named.id if isinstance(named, ConversationName) else named

    @property
    def stored(self) -> bool:
        """Whether the response is to be stored; true unless ``store`` is false."""
        return self.store is not False


class CompactBody(_RequestPart, kw_only=True, frozen=True):
    """The body of ``POST /v1/responses/compact``, which shortens a conversation by a summary."""

    model: str
    input: str | GivenItems | None = None
    instructions: str | None = None
    previous_response_id: Id | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: PromptCaching | None = None


class CountBody(_RequestPart, kw_only=True, frozen=True):
    """The body of ``POST /v1/responses/input_tokens``, which counts a prompt's tokens. Fields that add nothing
    to the prompt have no effect."""

    model: str | None = None
    input: str | GivenItems | None = None
    instructions: str | None = None
    previous_response_id: Id | None = None
    conversation: str | ConversationName | None = None
    tools: OfferedTools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: ReplyText | None = None
    truncation: Literal["auto", "disabled"] | None = None

    @property
    def conversation_id(self) -> str | None:
        """The id of the conversation that the request belongs to; None if it names none."""
        named = self.conversation
        return named.id if isinstance(named, ConversationName) else named


# --- conversations ------------------------------------------------------------------------------------------


class ConversationBody(_RequestPart, kw_only=True, frozen=True):
    """The body of ``POST /v1/conversations``, which begins a conversation with these items."""

    items: Annotated[list[GivenItem], Meta(max_length=20)] | None = None
    metadata: Metadata | None = None


class ConversationChange(_RequestPart, kw_only=True, frozen=True):
    """The body of ``POST /v1/conversations/{id}``, which replaces the metadata. Null removes all."""

    metadata: Metadata | None


class ConversationItems(_RequestPart, kw_only=True, frozen=True):
    """The body of ``POST /v1/conversations/{id}/items``, which adds items."""

    items: Annotated[list[GivenItem], Meta(min_length=1, max_length=20)]


# --- the WebSocket ------------------------------------------------------------------------------------------

LaneName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=128)]


class LaneCreate(CreateBody, kw_only=True, frozen=True, tag_field="type", tag="response.create"):
    """``response.create`` on a WebSocket. ``stream_id``: the queue that the request waits in; requests of one
    queue are served one after the other. ``generate`` false: prefill the prompt and write nothing."""

    stream_id: LaneName | None = None
    generate: bool | None = None


class LaneSteer(_RequestPart, kw_only=True, frozen=True, tag_field="type", tag="response.steer"):
    """``response.steer`` on a WebSocket: more input for the running response ``previous_response_id``, which
    ends and is followed by another one."""

    previous_response_id: Id
    input: str | Annotated[list[GivenItem], Meta(min_length=1, max_length=64)]


class LaneCancel(_RequestPart, kw_only=True, frozen=True, tag_field="type", tag="response.cancel"):
    """``response.cancel`` on a WebSocket: end the running response with this id. Without an id, end the one
    that runs in the queue ``stream_id``."""

    response_id: Id | None = None
    stream_id: LaneName | None = None


LaneEvent: TypeAlias = LaneCreate | LaneSteer | LaneCancel

CREATE, COMPACT = accepting(CreateBody, RESPONSES), accepting(CompactBody, RESPONSES)
COUNT = accepting(CountBody, RESPONSES)
LANE: Any = accepting(LaneCreate, RESPONSES) | LaneSteer | LaneCancel
"""The bodies, and the events of a WebSocket, with the fields that have no effect."""


def decoded(data: bytes, form: type[T]) -> Asked[T]:
    """Decode a body as ``form``, without the tools that are not served. Raises a `FrameError` that names the
    wrong field."""
    return asked(data, lambda left: decode_prepared(left, form, _prepare, REFUSED), UNSERVED_TOOLS)


def decoded_event(data: bytes) -> Asked[LaneEvent]:
    """Decode the event in a frame of a WebSocket. Raises a `FrameError` that names the wrong field."""
    return decoded(data, LANE)


def _prepare(whole: Any) -> None:
    if isinstance(whole, dict):
        tag_items(whole.get("input"))
        tag_items(whole.get("items"))
