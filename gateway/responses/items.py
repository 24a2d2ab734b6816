"""Items of the Responses standard as msgspec structs: those that clients send, and those that the server sends
and stores.

`Given…` items come from clients, with the fields of the `openai` package; `Kept…` items are what the server
sends and stores. Fields that mean nothing for a model of text are accepted and dropped.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ..live.reply import ScoredToken

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]
Phase: TypeAlias = Literal["commentary", "final_answer"]
Id: TypeAlias = Annotated[str, Meta(min_length=1, max_length=128)]
CallId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=64)]
MAX_INPUT = 20_000
"""The most items of one request."""


class _Given(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Base of what clients send. Unknown fields are refused."""


# --- from clients -------------------------------------------------------------------------------------------


class GivenInputText(_Given, tag_field="type", tag="input_text", kw_only=True, frozen=True):
    """A part of a message's content: text of a user or a developer. A cache breakpoint has no effect: all of it
    is cached."""

    text: str
    prompt_cache_breakpoint: Any = None


class GivenOutputText(_Given, tag_field="type", tag="output_text", kw_only=True, frozen=True):
    """A part of a message's content: text of the model. Its annotations and log probabilities are dropped."""

    text: str
    annotations: Any = None
    logprobs: Any = None


class GivenPlainText(_Given, tag_field="type", tag="text", kw_only=True, frozen=True):
    """A part of a message's content: text, with the type that Conversations give it."""

    text: str


class GivenRefusal(_Given, tag_field="type", tag="refusal", kw_only=True, frozen=True):
    """A part of a message's content: a refusal that the model wrote. It is read as the message's text."""

    refusal: str


GivenPart: TypeAlias = GivenInputText | GivenOutputText | GivenPlainText | GivenRefusal
GivenParts: TypeAlias = str | list[GivenPart]


class GivenMessage(_Given, tag_field="type", tag="message", kw_only=True, frozen=True):
    """A message that a client sends. The parts of its content are joined without a separator."""

    role: Literal["user", "assistant", "system", "developer"]
    content: GivenParts
    id: Id | None = None
    status: ItemStatus | None = None
    phase: Phase | None = None


class GivenCall(_Given, tag_field="type", tag="function_call", kw_only=True, frozen=True):
    """A tool call of the model that a client sends back. ``namespace``: that of the function, if it has one."""

    call_id: CallId
    name: CallId
    arguments: str
    id: Id | None = None
    status: ItemStatus | None = None
    namespace: CallId | None = None
    caller: Any = None
    created_by: str | None = None


class GivenOutput(_Given, tag_field="type", tag="function_call_output", kw_only=True, frozen=True):
    """The output of a tool, for the call with the id ``call_id``. Its name and namespace have no effect: the
    call has them."""

    call_id: CallId
    output: GivenParts
    id: Id | None = None
    status: ItemStatus | None = None
    name: str | None = None
    namespace: str | None = None
    caller: Any = None
    created_by: str | None = None


class GivenReasoning(_Given, tag_field="type", tag="reasoning", kw_only=True, frozen=True):
    """Reasoning of the model that a client sends back. It has no effect: templates leave out the reasoning of
    earlier turns."""

    id: Id | None = None
    summary: Any = None
    content: Any = None
    encrypted_content: str | None = None
    status: ItemStatus | None = None


class GivenReference(_Given, tag_field="type", tag="item_reference", kw_only=True, frozen=True):
    """A reference to an item that is stored already, by its id."""

    id: Id


class GivenCompaction(_Given, tag_field="type", tag="compaction", kw_only=True, frozen=True):
    """A summary instead of a conversation, as the answer of ``/v1/responses/compact`` had it."""

    encrypted_content: str
    id: Id | None = None
    created_by: str | None = None


GivenItem: TypeAlias = (
    GivenMessage | GivenCall | GivenOutput | GivenReasoning | GivenReference | GivenCompaction
)
GivenItems: TypeAlias = Annotated[list[GivenItem], Meta(max_length=MAX_INPUT)]

UNSERVED_ITEMS = frozenset(
    {
        "additional_tools",
        "apply_patch_call",
        "apply_patch_call_output",
        "code_interpreter_call",
        "compaction_trigger",
        "computer_call",
        "computer_call_output",
        "configuration_update",
        "custom_tool_call",
        "custom_tool_call_output",
        "file_search_call",
        "image_generation_call",
        "local_shell_call",
        "local_shell_call_output",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "program",
        "program_output",
        "shell_call",
        "shell_call_output",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    }
)
"""The types of the standard's items that are refused, because they belong to tools and features that are not
served."""
UNSERVED_PARTS = frozenset({"computer_screenshot", "input_audio", "input_file", "input_image", "input_video"})


def tag_items(items: Any) -> None:
    """Write the field ``type`` into those of the items, decoded JSON, that leave it out: ``message`` or
    ``item_reference``. Changes them in place; does nothing if ``items`` is no list."""
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict) and item.get("type") is None:
            item["type"] = "message" if "role" in item or "content" in item else "item_reference"


def whole_name(namespace: str, name: str) -> str:
    """The name by which a model calls a function of a namespace."""
    return f"{namespace}.{name}"


# --- told and stored ----------------------------------------------------------------------------------------


class KeptInputText(msgspec.Struct, tag_field="type", tag="input_text", kw_only=True, frozen=True):
    """The text of a message that is not the model's."""

    text: str


class KeptOutputText(msgspec.Struct, tag_field="type", tag="output_text", kw_only=True, frozen=True):
    """The text of a model's message. ``logprobs``: empty unless they were asked for."""

    text: str
    annotations: list[Any] = []
    logprobs: list[ScoredToken] = []


class KeptReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text", kw_only=True, frozen=True):
    """The text of a model's reasoning."""

    text: str


KeptPart: TypeAlias = KeptInputText | KeptOutputText | KeptReasoningText


class KeptMessage(msgspec.Struct, tag_field="type", tag="message", kw_only=True, frozen=True):
    """A message of any role."""

    id: str
    role: Literal["user", "assistant", "system", "developer"]
    content: list[KeptInputText | KeptOutputText]
    status: ItemStatus = "completed"
    phase: Phase | UnsetType = UNSET

    @property
    def text(self) -> str:
        """The whole text of its content."""
        return "".join(part.text for part in self.content)


class KeptCall(msgspec.Struct, tag_field="type", tag="function_call", kw_only=True, frozen=True):
    """A tool call of the model. ``namespace``: that of the function, if it has one."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus = "completed"
    namespace: str | UnsetType = UNSET

    @property
    def called(self) -> str:
        """The function's whole name, by which the model calls it."""
        return self.name if self.namespace is UNSET else whole_name(self.namespace, self.name)


class KeptOutput(msgspec.Struct, tag_field="type", tag="function_call_output", kw_only=True, frozen=True):
    """The output of a tool, for the call with the id ``call_id``."""

    id: str
    call_id: str
    output: str
    status: ItemStatus = "completed"


class KeptReasoning(msgspec.Struct, tag_field="type", tag="reasoning", kw_only=True, frozen=True):
    """Reasoning of the model. Reasoning that a client sent back is stored without its text."""

    id: str
    summary: list[Any] = []
    content: list[KeptReasoningText] = []
    status: ItemStatus = "completed"


class KeptCompaction(msgspec.Struct, tag_field="type", tag="compaction", kw_only=True, frozen=True):
    """A summary instead of a conversation. `translate.summary_of` decodes its content."""

    id: str
    encrypted_content: str


KeptItem: TypeAlias = KeptMessage | KeptCall | KeptOutput | KeptReasoning | KeptCompaction
