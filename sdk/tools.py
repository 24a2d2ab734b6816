"""Python callables as tools: their schema from type hints and docstring, and running them.

A sync callable runs in a thread, an async one is awaited; what it raises becomes an output the model reads.
Knows nothing of the conversation.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import anyio.to_thread
import msgspec

from .errors import ToolInvalid
from .frames.session import FunctionTool

ToolLike: TypeAlias = Callable[..., Any] | Mapping[str, Any] | FunctionTool

_ARGUMENTS = "Arguments"
_ARGUMENT = re.compile(r"^\s*(?P<name>\w+)(?:\s*\([^)]*\))?\s*:\s*(?P<text>.+)$")
_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$")


@dataclass(frozen=True, slots=True)
class Tool:
    """What the model is told of a tool, and how to run it; without `run` its caller answers the calls."""

    definition: FunctionTool
    run: Callable[[str], Awaitable[str]] | None = None

    @property
    def name(self) -> str:
        """The name the model calls it by."""
        return self.definition.name


def tool_of(given: ToolLike) -> Tool:
    """A tool from a callable, a dict in the Realtime form, or a `FunctionTool`. Raises `ToolInvalid`."""
    if isinstance(given, FunctionTool):
        return Tool(given)
    if isinstance(given, Mapping):
        try:
            return Tool(msgspec.convert({"type": "function", **given}, FunctionTool))
        except msgspec.ValidationError as error:
            raise ToolInvalid(f"Not a function tool: {error}") from None
    return _from_callable(given)


def tools_of(given: Iterable[ToolLike]) -> dict[str, Tool]:
    """Tools by name. Raises `ToolInvalid`, also for two of one name."""
    tools: dict[str, Tool] = {}
    for tool in map(tool_of, given):
        if tool.name in tools:
            raise ToolInvalid(f"Two tools are named `{tool.name}`")
        tools[tool.name] = tool
    return tools


def _from_callable(function: Callable[..., Any]) -> Tool:
    name = getattr(function, "__name__", type(function).__name__)
    try:
        arguments = _arguments_struct(function)
        description, documented = _documentation(inspect.getdoc(function) or "")
        definition = FunctionTool(
            name=name, description=description or None, parameters=_schema(arguments, documented)
        )
        msgspec.convert(msgspec.to_builtins(definition), FunctionTool)
    except (TypeError, ValueError, NameError) as error:
        raise ToolInvalid(f"`{name}` cannot be a tool: {error}") from error

    async def run(text: str) -> str:
        try:
            return _output(await _call(function, msgspec.json.decode(text or "{}", type=arguments)))
        except Exception as error:  # whatever a tool raises is the model's to read
            return _output({"error": f"{type(error).__name__}: {error}"})

    return Tool(definition, run)


def _arguments_struct(function: Callable[..., Any]) -> type[msgspec.Struct]:
    """A struct with the callable's parameters: it gives the schema, and decodes and checks each call."""
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"parameter `{parameter.name}` cannot be given by name")
        hint = Any if parameter.annotation is parameter.empty else parameter.annotation
        if parameter.default is parameter.empty:
            fields.append((parameter.name, hint))
        elif isinstance(parameter.default, str | int | float | None):
            fields.append((parameter.name, hint, parameter.default))
        else:
            default = partial(copy.deepcopy, parameter.default)
            fields.append((parameter.name, hint, msgspec.field(default_factory=default)))
    return msgspec.defstruct(_ARGUMENTS, fields, kw_only=True, forbid_unknown_fields=True)


def _schema(arguments: type[msgspec.Struct], documented: Mapping[str, str]) -> dict[str, Any]:
    (_,), components = msgspec.json.schema_components([arguments], ref_template="#/$defs/{name}")
    own = components.pop(_ARGUMENTS)
    properties = own["properties"]
    for name, text in documented.items():
        if name in properties:
            properties[name].setdefault("description", text)
    schema = {"type": "object", "properties": properties, "required": own["required"]}
    return {**schema, "$defs": components} if components else schema


def _documentation(text: str) -> tuple[str, dict[str, str]]:
    """The docstring's text above its first section, and what its `Args:` say of each parameter."""
    above: list[str] = []
    arguments: dict[str, str] = {}
    section = ""
    for line in text.splitlines():
        heading = _SECTION.match(line)
        if heading:
            section = heading[1]
        elif not section:
            above.append(line.strip())
        elif section in ("Args", "Arguments", "Parameters") and (found := _ARGUMENT.match(line)):
            arguments[found["name"]] = found["text"].strip()
    return " ".join(" ".join(above).split()), arguments


async def _call(function: Callable[..., Any], arguments: msgspec.Struct) -> Any:
    given = {name: getattr(arguments, name) for name in arguments.__struct_fields__}
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
    ):
        return await function(**given)
    result = await anyio.to_thread.run_sync(lambda: function(**given), abandon_on_cancel=True)
    return await result if inspect.isawaitable(result) else result


def _output(result: Any) -> str:
    """Text as it is, anything else as JSON, spaced as models have mostly read it."""
    if isinstance(result, str):
        return result
    return json.dumps(msgspec.to_builtins(result, enc_hook=str), ensure_ascii=False)
