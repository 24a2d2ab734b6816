"""The signature of a callable as a tool: its JSON schema for the model, and the check of a call's arguments.

Both come from type hints and the docstring. msgspec makes the schema and decodes the arguments.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import msgspec

from ..errors import ToolInvalid, ToolTypeUnsupported
from .context import ToolContext

_ARGUMENTS = "Arguments"
_FIT = "str, int, float, bool, list, dict, Literal, Enum, dataclasses, TypedDict and msgspec.Struct are"
_SECTIONS = ("Args", "Arguments", "Parameters")
_ARGUMENT = re.compile(r"^\s*(?P<name>\w+)(?:\s*\([^)]*\))?\s*:(?P<text>.*)$")
_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$")


@dataclass(frozen=True, slots=True)
class ToolSignature:
    """What is known of a callable as a tool. ``description``: from its docstring; ``parameters``: the JSON
    schema of its arguments, for the model.

    ``arguments`` decodes and checks the JSON of a call; its fields, in order, are the parameters ``names``.
    ``contexts``: the names of the parameters that get a `ToolContext`.
    """

    description: str
    parameters: dict[str, Any]
    arguments: msgspec.json.Decoder[msgspec.Struct]
    names: tuple[str, ...]
    contexts: tuple[str, ...]

    def given(self, text: str, context: ToolContext) -> dict[str, Any]:
        """The keyword arguments for the callable: from the JSON text of a call (empty: no arguments), and
        `context` where the callable asks for it. Raises `msgspec.DecodeError`, or `msgspec.ValidationError` if
        they do not fit the type hints."""
        decoded = self.arguments.decode(text or "{}")
        values = (getattr(decoded, field) for field in decoded.__struct_fields__)
        return {**dict(zip(self.names, values, strict=True)), **dict.fromkeys(self.contexts, context)}


def callable_name(function: Callable[..., Any]) -> str:
    """The name of ``function``: a function's own, or the name of the class of another callable. For a
    `functools.partial`, that of the callable inside it."""
    function, _ = _unbound(function)
    return str(getattr(function, "__name__", type(function).__name__))


def yields(function: Callable[..., Any]) -> bool:
    """Whether a callable is a generator function, sync or async, also inside a `functools.partial`."""
    function, _ = _unbound(function)
    called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    return inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called)


def signature_of(function: Callable[..., Any], name: str) -> ToolSignature:
    """The signature of a callable as the tool `name`. Arguments that `functools.partial` gave already are left
    out. Raises `ToolInvalid`, and `ToolTypeUnsupported` for a parameter with a type that is no JSON type."""
    inner, bound = _unbound(function)
    try:
        signature = inspect.signature(function, eval_str=True)
    except Exception as error:  # annotations may hold any expression
        raise ToolInvalid(f"`{name}` cannot be a tool: {error}") from error
    parameters = [parameter for parameter in signature.parameters.values() if parameter.name not in bound]
    _check_callable(inner, parameters, name)
    _check_pieces(inner, signature.return_annotation, name)
    contexts = tuple(parameter.name for parameter in parameters if _is_context(parameter))
    shown = [parameter for parameter in parameters if not _is_context(parameter)]
    for parameter in shown:
        _check(parameter, name)
    description, documented = _documentation(inspect.getdoc(inner) or "")
    try:
        fields = [_field(f"field_{number}", one) for number, one in enumerate(shown)]
        arguments = msgspec.defstruct(_ARGUMENTS, fields, kw_only=True, forbid_unknown_fields=True)
        schema = _schema(arguments, documented)
        decoder: msgspec.json.Decoder[msgspec.Struct] = msgspec.json.Decoder(arguments)
    except (TypeError, ValueError, NameError) as error:
        raise ToolInvalid(f"`{name}` cannot be a tool: {error}") from error
    return ToolSignature(description, schema, decoder, tuple(one.name for one in shown), contexts)


def _unbound(function: Callable[..., Any]) -> tuple[Callable[..., Any], frozenset[str]]:
    """The callable inside a `functools.partial`, and the names of the keyword arguments that the partial gives;
    the same callable and no names if it is no partial."""
    bound: frozenset[str] = frozenset()
    while isinstance(function, partial):
        bound |= function.keywords.keys()
        function = function.func
    return function, bound


def _check_callable(function: Callable[..., Any], parameters: list[inspect.Parameter], name: str) -> None:
    """Raises `ToolInvalid` for a method without its object: a function of a class with `self` or `cls` as first
    parameter."""
    owner = getattr(function, "__qualname__", "").rpartition(".")[0]
    own = parameters[0] if parameters else None
    if (
        inspect.isfunction(function)
        and owner
        and not owner.endswith("<locals>")
        and own is not None
        and own.name in ("self", "cls")
        and own.annotation is own.empty
    ):
        raise ToolInvalid(
            f"`{name}` cannot be a tool: it is a method of `{owner}` without its object. "
            f"Give a bound one: tools=[instance.{name}]"
        )


def _check_pieces(function: Callable[..., Any], returns: Any, name: str) -> None:
    """Raises `ToolInvalid` for a generator function that is annotated to yield something else than `str`.
    `returns`: its annotation."""
    pieces = get_args(returns)[:1] if yields(function) else ()
    if pieces and pieces[0] not in (str, Any):
        shown = getattr(pieces[0], "__name__", str(pieces[0]))
        raise ToolInvalid(
            f"`{name}` cannot be a tool: it yields `{shown}`. The pieces of an output must be `str`"
        )


def _check(parameter: inspect.Parameter, name: str) -> None:
    """Raises `ToolInvalid` for a parameter that cannot be given by name, `ToolTypeUnsupported` for one that
    JSON cannot give. `name`: the tool."""
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise ToolInvalid(f"`{name}` cannot be a tool: parameter `{parameter.name}` cannot be given by name")
    hint = _hint(parameter)
    try:
        msgspec.json.schema(hint)
        msgspec.json.Decoder(hint)
    except (TypeError, ValueError, NameError) as error:
        shown = hint.__name__ if isinstance(hint, type) else str(hint)
        why = _FIT if "schema_hook" in str(error) else str(error)  # a tool's author cannot give a hook
        raise ToolTypeUnsupported(
            f"`{name}` cannot be a tool: parameter `{parameter.name}` has the type `{shown}`, "
            f"which is not a JSON type: {why}",
            parameter=parameter.name,
            type_name=shown,
        ) from error


def _hint(parameter: inspect.Parameter) -> Any:
    return Any if parameter.annotation is parameter.empty else parameter.annotation


def _is_context(parameter: inspect.Parameter) -> bool:
    return ToolContext in (parameter.annotation, *get_args(parameter.annotation))


def _field(name: str, parameter: inspect.Parameter) -> tuple[str, Any, Any]:
    """A parameter as a field for `msgspec.defstruct`: name, type and default. `name` avoids the struct's own
    names; in JSON the field has the parameter's name."""
    default: dict[str, Any] = {}
    if isinstance(parameter.default, str | int | float | None):
        default = {"default": parameter.default}
    elif parameter.default is not parameter.empty:
        default = {"default_factory": partial(copy.deepcopy, parameter.default)}
    return name, _hint(parameter), msgspec.field(name=parameter.name, **default)


def _schema(arguments: type[msgspec.Struct], documented: Mapping[str, str]) -> dict[str, Any]:
    (reference,), components = msgspec.json.schema_components([arguments], ref_template="#/$defs/{name}")
    own = components.pop(
        reference["$ref"].removeprefix("#/$defs/")
    )  # also where a parameter's type has this name
    properties = own["properties"]
    for name, text in documented.items():
        if name in properties:
            properties[name].setdefault("description", text)
    schema = {"type": "object", "properties": properties, "required": own["required"]}
    return {**schema, "$defs": components} if components else schema


def _documentation(text: str) -> tuple[str, dict[str, str]]:
    """What a docstring tells: the text above its first section, in one line, and the text in `Args:` for each
    parameter."""
    above: list[str] = []
    arguments: dict[str, str] = {}
    section, argument, margin = "", "", 0
    for line in text.splitlines():
        heading = _SECTION.match(line)
        indent = len(line) - len(line.lstrip())
        if heading:
            section, argument = heading[1], ""
        elif not section:
            above.append(line.strip())
        elif section not in _SECTIONS or not line.strip():
            continue
        elif argument and indent > margin:  # a continued line
            arguments[argument] = f"{arguments[argument]} {line.strip()}".strip()
        elif found := _ARGUMENT.match(line):
            argument, margin = found["name"], indent
            arguments[argument] = found["text"].strip()
    return " ".join(" ".join(above).split()), {name: text for name, text in arguments.items() if text}
