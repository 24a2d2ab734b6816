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
from typing import Any

import msgspec

from .errors import ToolInvalid, ToolTypeUnsupported
from .toolcontext import ToolContext

_ARGUMENTS = "Arguments"
_ARGUMENT = re.compile(r"^\s*(?P<name>\w+)(?:\s*\([^)]*\))?\s*:\s*(?P<text>.+)$")
_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$")


@dataclass(frozen=True, slots=True)
class Takes:
    """``arguments`` decodes and checks a call; ``context`` names the parameter that gets a `ToolContext`."""

    description: str
    parameters: dict[str, Any]
    arguments: msgspec.json.Decoder[msgspec.Struct]
    context: str | None

    def given(self, text: str, context: ToolContext) -> dict[str, Any]:
        """Keyword arguments from a call's JSON text. Raises `msgspec.DecodeError`, `.ValidationError`."""
        decoded = self.arguments.decode(text or "{}")
        given = {name: getattr(decoded, name) for name in decoded.__struct_fields__}
        return given if self.context is None else {**given, self.context: context}


def takes_of(function: Callable[..., Any], name: str) -> Takes:
    """What a callable takes. Raises `ToolInvalid`, `ToolTypeUnsupported` naming parameter and type."""
    try:
        parameters = list(inspect.signature(function, eval_str=True).parameters.values())
    except (TypeError, ValueError, NameError) as error:
        raise ToolInvalid(f"`{name}` cannot be a tool: {error}") from error
    contexts = [parameter.name for parameter in parameters if parameter.annotation is ToolContext]
    told = [parameter for parameter in parameters if parameter.annotation is not ToolContext]
    for parameter in told:
        _check(parameter, name)
    description, documented = _documentation(inspect.getdoc(function) or "")
    try:
        arguments = msgspec.defstruct(
            _ARGUMENTS, [_field(one) for one in told], kw_only=True, forbid_unknown_fields=True
        )
        schema = _schema(arguments, documented)
        decoder: msgspec.json.Decoder[msgspec.Struct] = msgspec.json.Decoder(arguments)
    except (TypeError, ValueError, NameError) as error:
        raise ToolInvalid(f"`{name}` cannot be a tool: {error}") from error
    return Takes(description, schema, decoder, contexts[0] if contexts else None)


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
        raise ToolTypeUnsupported(
            f"`{name}` cannot be a tool: parameter `{parameter.name}` has the type `{shown}`, "
            f"which no JSON is: {error}",
            parameter=parameter.name,
            type_name=shown,
        ) from error


def _hint(parameter: inspect.Parameter) -> Any:
    return Any if parameter.annotation is parameter.empty else parameter.annotation


def _field(parameter: inspect.Parameter) -> tuple[str, Any] | tuple[str, Any, Any]:
    hint = _hint(parameter)
    if parameter.default is parameter.empty:
        return parameter.name, hint
    if isinstance(parameter.default, str | int | float | None):
        return parameter.name, hint, parameter.default
    return parameter.name, hint, msgspec.field(default_factory=partial(copy.deepcopy, parameter.default))


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
