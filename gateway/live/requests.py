"""What requests of all protocols have in common: how their fields become the request of a turn.

The bodies of all faces have the sampling fields as attributes with the names of `SamplingFields`, whatever
their names on the wire. So they are read here for all, and an error names the field as its protocol does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import UNSET

from ...runtime.verbs import Grammar, GrammarKind
from ...sdk.errors import FieldInvalid
from ...sdk.frames import formats
from ...sdk.frames.sampling import SamplingFields
from ...sessions.conversation.items import FunctionCall, FunctionCallOutput, Item, Message, Role, Tool, new_id
from ...sessions.errors import GrammarInvalid, RequestInvalid
from ...sessions.tools.grammar import checked_grammar, json_format

T = TypeVar("T")


def sampling_of(body: object, names: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """The sampling parameters that a body sets, by their names as arguments of `TurnRequest.checked`.
    ``names``: of its attributes, where they are not those of `SamplingFields`."""
    values = {name: getattr(body, names.get(name, name)) for name in SamplingFields.__struct_fields__}
    given = {name: value for name, value in values.items() if value not in (None, UNSET, "inf")}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    if given.get("top_k") == -1:
        given["top_k"] = 0  # vLLM's -1 means all, too
    return given


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """In the block, an error has other names for fields: by our name, the one that a client knows. A name may
    be a path, with ``[]`` for each index."""
    try:
        yield
    except RequestInvalid as error:
        if error.param is not None:
            error.param = _renamed(error.param, names)
        error.message = re.sub(r"`([^`]+)`", lambda word: f"`{_renamed(word[1], names)}`", error.message)
        error.args = (error.message,)
        raise


@lru_cache
def names_in(body: type[msgspec.Struct]) -> Mapping[str, str]:
    """By our name, what a field of this type of body is called on the wire, if that is another name."""
    return {one.name: one.encode_name for one in msgspec.structs.fields(body) if one.name != one.encode_name}


def _renamed(path: str, names: Mapping[str, str]) -> str:
    """A field's path with another name for it or for its beginning, if there is one."""
    if (whole := names.get(re.sub(r"\[\d+\]", "[]", path))) is not None:
        return whole.replace("[]", "{}").format(*re.findall(r"\[\d+\]", path))
    begins = re.match(r"\w*", path)
    first = "" if begins is None else begins[0]
    return names.get(first, first) + path[len(first) :]


def query_of(given: Mapping[str, str], form: type[T]) -> T:
    """The parameters of a URL as a struct. Raises ``FieldInvalid``."""
    try:
        return msgspec.convert(dict(given), form, strict=False)
    except msgspec.ValidationError as error:
        told = str(error)
        param = told.rpartition("$.")[2][:-1]
        raise FieldInvalid(f"The URL's parameters are not valid: {told}", param) from None


class SentConversation:
    """The items of a conversation that a request brings, in order. ``items``: so far."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._open: set[str] = set()  # ids of calls that wait for an output

    def message(self, role: Role, text: str) -> None:
        """Add a message."""
        self.items.append(Message(id=new_id("item"), role=role, text=text))

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a tool call of the model."""
        self._open.add(call_id)
        self.items.append(FunctionCall(id=new_id("item"), call_id=call_id, name=name, arguments=arguments))

    def output(self, call_id: str, output: str, param: str) -> None:
        """Add the output of a tool. ``param``: the field that names its call. Raises ``FieldInvalid`` if no
        call before it waits for one."""
        if call_id not in self._open:
            raise FieldInvalid(f"No tool call {call_id!r} before this waits for an output", param)
        self._open.discard(call_id)
        self.items.append(FunctionCallOutput(id=new_id("item"), call_id=call_id, output=output))


# --- tools --------------------------------------------------------------------------------------------------


class OfferedTool(Protocol):
    """A tool as a body offers it."""

    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str | None: ...
    @property
    def parameters(self) -> dict[str, Any] | None: ...
    @property
    def strict(self) -> bool | None: ...


def tools_of(tools: Iterable[OfferedTool] | None) -> tuple[Tool, ...]:
    """The tools of a body as tools of `sessions`."""
    return tuple(
        Tool(
            name=tool.name,
            description=tool.description or "",
            parameters=tool.parameters or {},
            strict=bool(tool.strict),
        )
        for tool in tools or ()
    )


@dataclass(frozen=True, slots=True)
class CallChoice:
    """Which tools may be called, in the words of `TurnRequest.checked`."""

    tool_choice: str = "auto"
    tool: str | None = None
    allowed: tuple[str, ...] = ()

    @classmethod
    def of(cls, choice: formats.ToolChoice | None) -> CallChoice:
        """From a `tool_choice` as Responses and Realtime have it."""
        match choice:
            case formats.NamedFunction(name=name):
                return cls("required", name)
            case formats.AllowedTools(mode=mode):
                return cls(mode, None, tuple(choice.names))
        return cls(choice or "auto")

    def fields(self) -> dict[str, Any]:
        """As keyword arguments."""
        return {"tool_choice": self.tool_choice, "tool": self.tool, "allowed": self.allowed}


# --- the form of the text -----------------------------------------------------------------------------------


def grammar_of(wishes: Mapping[str, Any]) -> Grammar | None:
    """The grammar that the reply's text must follow; None: any text. ``wishes``: by the name of the field that
    has it, a format of `sdk.frames.formats`, a grammar, or nothing. Raises `GrammarInvalid` if it is not
    valid, or if there are several."""
    given = {name: wish for name, wish in wishes.items() if wish is not None and wish is not UNSET}
    if len(given) > 1:
        raise GrammarInvalid(f"Only one of {' and '.join(given)} can be set", param=list(given)[-1])
    return next((_grammar(wish, name) for name, wish in given.items()), None)


def structured_grammar(kind: str, value: Any, param: str) -> Grammar:
    """The grammar of one of vLLM's structured outputs. ``kind``: ``json`` (a schema, also as text), ``regex``,
    ``choice``, ``grammar`` (Lark) or ``json_object``. ``param``: the field that has it, for errors. Raises
    `GrammarInvalid`."""
    match kind:
        case "regex" | "grammar":
            if not isinstance(value, str):
                raise GrammarInvalid(f"`{param}` must be text", param=param)
            lark = GrammarKind.REGEX if kind == "regex" else GrammarKind.LARK
            return checked_grammar(Grammar(lark, value), param)
        case "choice":
            if isinstance(value, str) or not value or not all(isinstance(one, str) and one for one in value):
                raise GrammarInvalid(f"`{param}` must be a list of texts, none of them empty", param=param)
            listed = msgspec.json.encode(list(value)).decode()
            return checked_grammar(Grammar(GrammarKind.CHOICE, listed), param)
    schema = {"type": "object"} if kind == "json_object" else value
    if isinstance(schema, str):
        checked_grammar(Grammar(GrammarKind.JSON, schema), param)  # one that is too long is not read
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as fault:
            raise GrammarInvalid(f"`{param}` is no JSON: {fault}", param=param) from None
    if not isinstance(schema, Mapping):
        raise GrammarInvalid(f"`{param}` must be a JSON Schema that is an object", param=param)
    return json_format(dict(schema), strict=True, param=param)


def _grammar(wish: Any, name: str) -> Grammar | None:
    match wish:
        case Grammar():
            return wish
        case formats.JsonObject():
            return json_format({"type": "object"}, strict=True, param=name)
        case formats.JsonSchema(schema=schema, strict=strict):
            return json_format(schema, strict=bool(strict), param=f"{name}.schema")
        case formats.ChatJsonSchema(json_schema=named):
            param = f"{name}.json_schema.schema"
            return json_format(named.schema, strict=bool(named.strict), param=param)
        case formats.RegexGrammar(pattern=pattern):
            return checked_grammar(Grammar(GrammarKind.REGEX, pattern), f"{name}.pattern")
        case formats.ChoiceGrammar(choices=choices):
            listed = msgspec.json.encode(choices).decode()
            return checked_grammar(Grammar(GrammarKind.CHOICE, listed), f"{name}.choices")
        case formats.LarkGrammar(definition=definition):
            return checked_grammar(Grammar(GrammarKind.LARK, definition), f"{name}.definition")
    return None
