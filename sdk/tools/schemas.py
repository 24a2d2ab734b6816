"""What a callable takes, as the model is told of it and as calls are checked: from type hints and docstring.

msgspec makes the JSON schema and decodes each call's arguments. Knows nothing of running anything.
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
class Takes:
    """``arguments`` decodes and checks a call; its fields in order are the parameters ``names``. ``contexts``:
    the parameters that get a `ToolContext`."""

    description: str
    parameters: dict[str, Any]
    arguments: msgspec.json.Decoder[msgspec.Struct]
    names: tuple[str, ...]
    contexts: tuple[str, ...]

    def given(self, text: str, context: ToolContext) -> dict[str, Any]:
        """Keyword arguments from a call's JSON text. Raises `msgspec.DecodeError`, `.ValidationError`."""
        decoded = self.arguments.decode(text or "{}")
        values = (getattr(decoded, field) for field in decoded.__struct_fields__)
        return {**dict(zip(self.names, values, strict=True)), **dict.fromkeys(self.contexts, context)}


def called_by(function: Callable[..., Any]) -> str:
    """The name of a callable: a function's own, also of one that `functools.partial` made, else its class's."""
    function, _ = _unbound(function)
    return str(getattr(function, "__name__", type(function).__name__))


def yields(function: Callable[..., Any]) -> bool:
    """Whether a callable answers in pieces."""
    function, _ = _unbound(function)
    called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    return inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called)


def takes_of(function: Callable[..., Any], name: str) -> Takes:
    """What a callable takes; what `functools.partial` gave it already is no business of the model.

    Raises `ToolInvalid`, `ToolTypeUnsupported` naming parameter and type.
    """
    inner, bound = _unbound(function)
    try:
        signature = inspect.signature(function, eval_str=True)
    except Exception as error:  # annotations are evaluated, whatever they hold
        raise ToolInvalid(f"`{name}` cannot be a tool: {error}") from error
    parameters = [parameter for parameter in signature.parameters.values() if parameter.name not in bound]
    _check_callable(inner, parameters, name)
    _check_pieces(inner, signature.return_annotation, name)
    contexts = tuple(parameter.name for parameter in parameters if _is_context(parameter))
    told = [parameter for parameter in parameters if not _is_context(parameter)]
    for parameter in told:
        _check(parameter, name)
    description, documented = _documentation(inspect.getdoc(inner) or "")
    try:
        fields = [_field(f"field_{number}", one) for number, one in enumerate(told)]
        arguments = msgspec.defstruct(_ARGUMENTS, fields, kw_only=True, forbid_unknown_fields=True)
        schema = _schema(arguments, documented)
        decoder: msgspec.json.Decoder[msgspec.Struct] = msgspec.json.Decoder(arguments)
    except (TypeError, ValueError, NameError) as error:
        raise ToolInvalid(f"`{name}` cannot be a tool: {error}") from error
    return Takes(description, schema, decoder, tuple(one.name for one in told), contexts)


def _unbound(function: Callable[..., Any]) -> tuple[Callable[..., Any], frozenset[str]]:
    """What `functools.partial` was given, and the names of the arguments that it adds."""
    bound: frozenset[str] = frozenset()
    while isinstance(function, partial):
        bound |= function.keywords.keys()
        function = function.func
    return function, bound


def _check_callable(function: Callable[..., Any], parameters: list[inspect.Parameter], name: str) -> None:
    """It has its object if it is a method."""
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
    """What yields, yields text."""
    pieces = get_args(returns)[:1] if yields(function) else ()
    if pieces and pieces[0] not in (str, Any):
        shown = getattr(pieces[0], "__name__", str(pieces[0]))
        raise ToolInvalid(
            f"`{name}` cannot be a tool: it yields `{shown}`. The pieces of an output are `str`: its text is "
            "all of them, one behind the other"
        )


def _check(parameter: inspect.Parameter, name: str) -> None:
    """The model gives arguments by name, as JSON: both must be possible."""
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise ToolInvalid(f"`{name}` cannot be a tool: parameter `{parameter.name}` cannot be given by name")
    hint = _hint(parameter)
    try:
        msgspec.json.schema(hint)
        msgspec.json.Decoder(hint)
    except (TypeError, ValueError, NameError) as error:
        shown = hint.__name__ if isinstance(hint, type) else str(hint)
        why = _FIT if "schema_hook" in str(error) else str(error)  # a hook is nothing that an author can give
        raise ToolTypeUnsupported(
            f"`{name}` cannot be a tool: parameter `{parameter.name}` has the type `{shown}`, "
            f"which no JSON is: {why}",
            parameter=parameter.name,
            type_name=shown,
        ) from error


def _hint(parameter: inspect.Parameter) -> Any:
    return Any if parameter.annotation is parameter.empty else parameter.annotation


def _is_context(parameter: inspect.Parameter) -> bool:
    return ToolContext in (parameter.annotation, *get_args(parameter.annotation))


def _field(name: str, parameter: inspect.Parameter) -> tuple[str, Any, Any]:
    """A parameter as a field of any name that is none of the struct's own; in JSON it has the parameter's."""
    default: dict[str, Any] = {}
    if isinstance(parameter.default, str | int | float | None):
        default = {"default": parameter.default}
    elif parameter.default is not parameter.empty:
        default = {"default_factory": partial(copy.deepcopy, parameter.default)}
    return name, _hint(parameter), msgspec.field(name=parameter.name, **default)


def _schema(arguments: type[msgspec.Struct], documented: Mapping[str, str]) -> dict[str, Any]:
    (place,), components = msgspec.json.schema_components([arguments], ref_template="#/$defs/{name}")
    own = components.pop(place["$ref"].removeprefix("#/$defs/"))  # where a parameter's type has its name too
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
    section, told, margin = "", "", 0
    for line in text.splitlines():
        heading = _SECTION.match(line)
        indent = len(line) - len(line.lstrip())
        if heading:
            section, told = heading[1], ""
        elif not section:
            above.append(line.strip())
        elif section not in _SECTIONS or not line.strip():
            continue
        elif told and indent > margin:  # more of the same
            arguments[told] = f"{arguments[told]} {line.strip()}".strip()
        elif found := _ARGUMENT.match(line):
            told, margin = found["name"], indent
            arguments[told] = found["text"].strip()
    return " ".join(" ".join(above).split()), {name: text for name, text in arguments.items() if text}
