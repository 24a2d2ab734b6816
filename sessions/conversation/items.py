"""Items: what a conversation consists of, as immutable data that can be journaled. Knows nothing of frames,
which the gateway translates, nor of chat templates."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Container, Iterable
from typing import Any, Literal, TypeAlias

import msgspec

from ..errors import CallAnswered, CallUnknown, ItemInvalid, ToolInvalid

Role: TypeAlias = Literal["system", "user", "assistant"]

MAX_ID = 64
MAX_NAME = 128


class Message(msgspec.Struct, frozen=True, kw_only=True, tag="message"):
    """A message. ``complete`` is false for one that was cut."""

    id: str
    role: Role
    text: str
    complete: bool = True


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True, tag="function_call"):
    """A tool call. ``arguments`` is JSON text as the model wrote it, cut off if it is not ``complete``."""

    id: str
    call_id: str
    name: str
    arguments: str
    complete: bool = True


class FunctionCallOutput(msgspec.Struct, frozen=True, kw_only=True, tag="function_call_output"):
    """A tool's output for the call ``call_id``."""

    id: str
    call_id: str
    output: str


Item: TypeAlias = Message | FunctionCall | FunctionCallOutput
Growing: TypeAlias = Message | FunctionCallOutput
"""Items that may be streamed in: messages and outputs of tools."""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function the model may call; ``parameters`` is a JSON Schema. ``strict``: calls always match it."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)
    strict: bool = False


class Preamble(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What the prompt holds before the first item: the instructions, and the tools that the model may call.

    Two are equal if a template writes the same for both: in a schema, 1 is not 1.0, and the order of keys
    counts.
    """

    instructions: str = ""
    tools: tuple[Tool, ...] = ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Preamble) or self.instructions != other.instructions:
            return False
        encode = msgspec.msgpack.encode
        return self.tools is other.tools or encode(self.tools) == encode(other.tools)

    def __ne__(self, other: object) -> bool:  # msgspec's own compares identities
        return not self == other


def new_id(prefix: str) -> str:
    """A fresh id such as ``item_3f…``, of 96 random bits."""
    return f"{prefix}_{secrets.token_hex(12)}"


def derived_id(prefix: str, *seeds: str) -> str:
    """An id such as ``item_3f…``, derived from the ``seeds``: equal prefix and seeds give the same id."""
    digest = hashlib.blake2b("\0".join(seeds).encode(), digest_size=12)
    return f"{prefix}_{digest.hexdigest()}"


def checked_item(item: Item) -> Item:
    """Return the item if its fields are valid. Raises ``ItemInvalid`` naming the field."""
    named = {"id": (item.id, MAX_ID)}
    match item:
        case Message():
            texts: tuple[str, ...] = (item.text,)
            if item.role not in ("system", "user", "assistant"):
                raise ItemInvalid(f"Unknown role {item.role!r}", param="item.role")
        case FunctionCall():
            texts = (item.name, item.arguments)
            named |= {"call_id": (item.call_id, MAX_ID), "name": (item.name, MAX_NAME)}
        case FunctionCallOutput():
            texts = (item.output,)
            named["call_id"] = (item.call_id, MAX_ID)
    for field, (value, limit) in named.items():
        if not 1 <= len(value) <= limit:
            raise ItemInvalid(f"`{field}` must have 1 to {limit} characters", param=f"item.{field}")
    _check_encodable("item", *texts)
    return item


def checked_preamble(preamble: Preamble) -> Preamble:
    """Return the preamble if it is valid. Raises ``ToolInvalid`` or ``ItemInvalid``."""
    _check_encodable("instructions", preamble.instructions)
    for tool in preamble.tools:
        if not 1 <= len(tool.name) <= MAX_NAME:
            raise ToolInvalid(f"A tool's name must have 1 to {MAX_NAME} characters", param="tools")
        try:
            msgspec.msgpack.encode(tool)
        except (TypeError, ValueError, OverflowError, RecursionError) as fault:
            raise ToolInvalid(f"Tool {tool.name!r} is not JSON: {fault}", param="tools") from None
    if len({tool.name for tool in preamble.tools}) != len(preamble.tools):
        raise ToolInvalid("Two tools have the same name", param="tools")
    return preamble


def size_of(preamble: Preamble) -> int:
    """Roughly how many characters the instructions and tools of a preamble have."""
    tools = msgspec.msgpack.encode(preamble.tools) if preamble.tools else b""
    return len(preamble.instructions) + len(tools)


def reads_alike(one: Item, other: Item) -> bool:
    """Whether a template writes two items in the same way: they differ in their ids at most, and in whether
    they are complete."""
    written = set(one.__struct_fields__) - {"id", "complete"}
    return type(one) is type(other) and all(getattr(one, name) == getattr(other, name) for name in written)


class ToolCalls:
    """The call ids of a conversation's tool calls, and which of them have outputs. An output may come late or
    out of order."""

    def __init__(self, items: Iterable[Item] = ()) -> None:
        self._made: set[str] = set()
        self._answered: set[str] = set()
        for item in items:
            self.add(item)

    def add(self, item: Item) -> None:
        """Add one more item of the conversation."""
        if isinstance(item, FunctionCall):
            self._made.add(item.call_id)
        elif isinstance(item, FunctionCallOutput):
            self._answered.add(item.call_id)

    def copy(self) -> ToolCalls:
        """A copy that changes on its own."""
        other = ToolCalls()
        other._made, other._answered = set(self._made), set(self._answered)
        return other

    def check(self, call_id: str, saying: Container[str] = (), *, param: str = "item.call_id") -> None:
        """Check that an output for the call ``call_id`` may be added.

        ``saying``: the call ids of calls that a running reply has made so far; they count as calls too.
        ``param``: the request's field that an error names. Raises ``CallUnknown`` if there is no such call,
        ``CallAnswered`` if it has an output.
        """
        if call_id in self._answered:
            raise CallAnswered(f"The call {call_id!r} has been answered", param=param)
        if call_id not in self._made and call_id not in saying:
            raise CallUnknown(f"Tool call ID {call_id!r} not found in conversation", param=param)


def _check_encodable(param: str, *texts: str) -> None:
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError:
        raise ItemInvalid("Text holds a lone surrogate, which is not a character", param=param) from None
