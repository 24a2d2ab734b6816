"""Keyword arguments as `response.create` and `session.update` events, checked as the server checks them."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, TypeVar

import msgspec

from .errors import FieldInvalid, FieldUnknown
from .frames.client import ItemCreate, ResponseCreate, ResponseSteer
from .frames.formats import AnyGrammar, ResponseFormat, TextConfig, ToolChoice
from .frames.items import AnyItem, FunctionCallItem, FunctionCallOutputItem, InputItem, MessageItem
from .frames.response import ResponseParams
from .frames.session import SessionPatch, TruncationConfig
from .tools.tool import ToolLike, tools_of

TOGETHER = 64 << 10
"""At most so many characters of items go into one frame with a `response.create`; each takes at most six
bytes."""


class SamplingOptions(TypedDict, total=False):
    """Types of the keyword arguments for sampling, of a session or a turn; the fields of
    `frames.sampling.SamplingFields`. None: the server's default in a session, the session's value in a turn."""

    max_output_tokens: int | Literal["inf"] | None
    min_output_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    bad_words: Sequence[str | Sequence[int]] | None
    seed: int | None
    stop: Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    top_logprobs: int | None


class RunOptions(SamplingOptions, total=False):
    """Types of the keyword arguments of `Chat.run` for each of its responses; the fields of
    `frames.response.ResponseParams`. Where a frame holds an object, a dict is taken too."""

    conversation: Literal["auto", "none"] | None
    input: Sequence[InputItem | Mapping[str, Any]] | None
    instructions: str | None
    output_modalities: Sequence[str] | None
    tool_choice: ToolChoice | Mapping[str, Any] | None
    metadata: Mapping[str, str] | None
    text: TextConfig | Mapping[str, Any] | None
    response_format: ResponseFormat | Mapping[str, Any] | None
    grammar: AnyGrammar | Mapping[str, Any] | None
    events: Literal["all", "brief"] | None
    audio: Any
    parallel_tool_calls: bool | None
    reasoning: Any


class ResponseOptions(RunOptions, total=False):
    """Types of the keyword arguments of `Chat.say`, `respond` and `steer`; the fields of
    `frames.response.ResponseParams`. `tools`: what the model may call in this turn, instead of the session's
    tools. They are only offered: calls of new ones are yours to answer."""

    tools: Iterable[ToolLike] | None


class SessionOptions(SamplingOptions, total=False):
    """Types of the keyword arguments of `Client.session` beside instructions and tools; fields of
    `frames.session.SessionPatch`."""

    type: Literal["realtime"]
    model: str | None
    output_modalities: Sequence[str] | None
    tool_choice: ToolChoice | Mapping[str, Any] | None
    truncation: TruncationConfig | Mapping[str, Any] | None
    audio: Any
    include: Any
    parallel_tool_calls: bool | None
    reasoning: Any
    tracing: Any


class UpdateOptions(SessionOptions, total=False):
    """Types of the keyword arguments of `Chat.update` beside the tools; fields of
    `frames.session.SessionPatch`."""

    instructions: str | None


_Params = TypeVar("_Params", SessionPatch, ResponseParams)
_Create = TypeVar("_Create", ResponseCreate, ResponseSteer)


@dataclass(slots=True)
class SentOutputs:
    """Outputs of tools that were sent before the response that answers them was asked for. If that response is
    refused, they are deleted again.

    ``events``: ids of all client events that were sent; ``items``: ids of the items that those add;
    ``commits``: for each streamed output, by call id, the id of the event that committed it.
    """

    events: list[str] = field(default_factory=list)
    items: list[str] = field(default_factory=list)
    commits: dict[str, str] = field(default_factory=dict)


def create_of(overrides: RunOptions | ResponseOptions) -> ResponseCreate:
    """The `response.create` event with the fields `overrides` of `ResponseParams`; of `tools` it has the
    definitions. Raises `FrameError`, `ToolInvalid`."""
    if not overrides:
        return ResponseCreate()
    fields: dict[str, Any] = {**overrides}
    if fields.get("tools") is not None:
        fields["tools"] = [tool.definition for tool in tools_of(fields["tools"]).values()]
    return ResponseCreate(response=converted(fields, ResponseParams, "response"))


def in_brief(create: _Create) -> _Create:
    """The same event with `events` "brief", by which the server sends each thing once, without the standard's
    repetitions; unchanged if it sets `events` already."""
    params = create.response or ResponseParams()
    if params.events is not msgspec.UNSET:
        return create
    return msgspec.structs.replace(create, response=msgspec.structs.replace(params, events="brief"))


def together(create: ResponseCreate, first: Sequence[ItemCreate]) -> ResponseCreate | None:
    """One event that adds the items of `first` and asks for the response. None if their text is longer than
    `TOGETHER`: then they are to be sent one by one."""
    items = [event.item for event in first]
    if sum(map(_characters, items)) > TOGETHER:
        return None
    return msgspec.structs.replace(create, items=items)


def converted(fields: dict[str, Any], kind: type[_Params], name: str) -> _Params:
    """Keyword arguments as a checked object of the type `kind`. `name`: the event's field for it, which errors
    show. Raises `FieldUnknown`, `FieldInvalid`."""
    unknown = set(fields) - set(kind.__struct_fields__)
    if unknown:
        raise FieldUnknown(f"Unknown parameter: '{name}.{min(unknown)}'", f"{name}.{min(unknown)}")
    try:
        return msgspec.convert(msgspec.to_builtins(fields, str_keys=True), kind, str_keys=True)
    except (msgspec.ValidationError, TypeError) as error:
        raise FieldInvalid(f"{name}: {error}", name) from None


def output_of(call: FunctionCallItem, output: str) -> ItemCreate:
    """The event that adds `output` as the output of `call`; its item has a new id."""
    return ItemCreate(item=named(FunctionCallOutputItem(call_id=call.call_id or "", output=output)))


def named(item: AnyItem) -> AnyItem:
    """The item with an id, a random one if it has none. The server's answer repeats the id, and is known by
    it."""
    return item if item.id else msgspec.structs.replace(item, id=f"item_{secrets.token_hex(12)}")


def _characters(item: AnyItem) -> int:
    match item:
        case MessageItem():
            return len(item.text)
        case FunctionCallItem():
            return len(item.arguments)
        case FunctionCallOutputItem():
            return len(item.output)
