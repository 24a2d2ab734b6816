"""Lark rules for the arguments of a call that are not one JSON object: each is written by its name, and its
value as plain text, as JSON, or in the notation of Gemma.

Of a text's schema only ``enum`` and ``const`` are enforced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ...runtime.grammar.json_schema import UNFOLLOWED, exact
from ...runtime.grammar.limits import excess
from ..conversation.items import Tool
from ..errors import GrammarInvalid
from .parameter_types import constants, found_at, may_be_text, types_of, values_in

STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Separators of JSON, as templates write them."""
EMPTY = '""'
"""An empty text as a Lark expression."""
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_ANY_NAME, _ANY_KEY = "/[A-Za-z_][A-Za-z0-9_]*/", '/[^<>"\\n]+/'
_SCALARS = frozenset({"integer", "number", "boolean", "null"})
_BOUNDS = ("type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_KEY = re.compile(r"[^\s:{}\[\],<>\"'](?:[^:{}\[\],<>\"'\n]*[^\s:{}\[\],<>\"'])?")
"""A name that stands without quotes in the notation of Gemma."""


@dataclass(frozen=True, slots=True)
class ArgumentSyntax:
    """How a form writes one argument: ``before NAME behind VALUE end``, and ``between`` between two.

    ``quote``: values are in the notation of Gemma, with this text around strings. If it is empty, values are
    plain text or JSON if ``end`` tells where they end, and JSON else; then names are names of Python.
    """

    before: str
    behind: str
    end: str
    between: str = ""
    quote: str = ""


class ArgumentRules:
    """Makes the rules for one form ``syntax``. ``tag``: gives a text as a Lark expression, in which special
    tokens are tokens. ``until``: gives the Lark expression for any text up to a text, and that."""

    def __init__(
        self, syntax: ArgumentSyntax, tag: Callable[[str], str], until: Callable[[str], str]
    ) -> None:
        self.syntax, self.tag = syntax, tag
        self._any_text = until(syntax.quote or syntax.end) if syntax.quote or syntax.end else ""

    def shared(self) -> Iterator[str]:
        """The rules that those of all tools refer to."""
        syntax = self.syntax
        if syntax.quote:
            scalar = styled({"type": ["number", "boolean", "null"]})
            yield f"string: {self.tag(syntax.quote)} text"
            yield f"thing: string | %json {scalar} | things | pairs"
            yield f'things: "[" {_listed("thing")} "]"'
            yield f'pairs: "{{" {_listed("pair")} "}}"'
            yield f'pair: {_ANY_NAME} ":" thing'
        if self._any_text:
            yield self._any_text

    def of_tool(self, at: int, tool: Tool) -> Iterator[str]:
        """The rules of ``givenN``, the arguments of tool number ``at``. If one has a name that the form cannot
        write, any are allowed; of a strict tool, ``GrammarInvalid`` is raised."""
        syntax, root = self.syntax, parameters(tool)
        properties, values = (
            root.get("properties"),
            _Values(self, f"given{at}", root, lenient=not tool.strict),
        )
        pairs, owed = list[str](), list[bool]()
        between = self.tag(syntax.between)
        named = syntax.quote or syntax.end or all(map(_NAME.fullmatch, properties or ()))
        if not isinstance(properties, dict) or not (named or tool.strict):
            value = "thing" if syntax.quote else "text" if syntax.end else f"%json {styled({})}"
            name = _ANY_KEY if syntax.end else _ANY_NAME
            pair = f"{self.tag(syntax.before)} {name} {self.tag(syntax.behind)} {value}"
            yield f"given{at}: ({pair} ({between} {pair})*)?"
            return
        required = root.get("required")
        for number, (name, schema) in enumerate(properties.items()):
            shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
            schema = {**schema, **shared} if isinstance(schema, dict) else {}
            value = values.of(schema)
            yield f"given{at}x{number}: {self.name(name)} {value}"
            pairs.append(f"given{at}x{number}")
            owed.append(isinstance(required, list) and name in required)
        yield from chained(f"given{at}", pairs, owed, between)
        yield from values.rules

    def name(self, name: str) -> str:
        """The Lark expression for an argument's ``name`` and what stands around it. Raises
        ``GrammarInvalid``."""
        syntax, written = self.syntax, quoted(name)
        if syntax.quote and not _KEY.fullmatch(name):
            written = f"{self.tag(syntax.quote)} {quoted(name)} {self.tag(syntax.quote)}"
        elif not (syntax.quote or syntax.end or _NAME.fullmatch(name)):
            raise GrammarInvalid(f"The model's form of calls cannot name an argument {name!r}", param="tools")
        return f"{self.tag(syntax.before)} {written} {self.tag(syntax.behind)}"


class _Values:
    """Makes the Lark expressions of one tool's values. ``prefix``: begins the names of its rules, ``rules``.
    ``root``: the schema that ``$ref`` refers to. ``lenient``: JSON may ignore keywords that are unknown."""

    def __init__(self, form: ArgumentRules, prefix: str, root: dict[str, Any], *, lenient: bool) -> None:
        self._form, self._prefix, self._root, self._lenient = form, prefix, root, lenient
        self._references: dict[str, str] = {}  # the rule of each `$ref`
        self.rules: list[str] = []

    def of(self, schema: dict[str, Any]) -> str:
        """The expression for a value with this schema, and for what stands behind it."""
        syntax = self._form.syntax
        if syntax.quote:
            return self._noted(schema)
        written = f"%json {styled(schema, lenient=self._lenient)}"
        if not syntax.end:
            return written
        end, values = self._form.tag(syntax.end), constants(schema, self._root)
        if values is not None:
            texts = [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in values]
            return f"({' | '.join(quoted(text) or EMPTY for text in texts)}) {end}"
        return "text" if may_be_text(types_of(schema, self._root)) else f"{written} {end}"

    # --- the notation of Gemma ---

    def _noted(self, schema: Any) -> str:
        """The name of a rule for a value with this schema in the notation of Gemma."""
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if isinstance(reference, str):
            if reference not in self._references:
                self._references[reference] = name = f"{self._prefix}r{len(self._references)}"
                self.rules.append(f"{name}: {self._noted(found_at(reference, self._root))}")
            return self._references[reference]
        if not isinstance(schema, dict):
            return "thing"
        kind = schema.get("type")
        if values := values_in(schema):
            return self._rule(" | ".join(map(self._literal, values)))
        for key in ("anyOf", "oneOf", "allOf"):
            options = schema.get(key)
            if isinstance(options, list) and (options if key != "allOf" else len(options) == 1):
                return self._rule(" | ".join(map(self._noted, options)))
        if isinstance(kind, list):
            return self._rule(" | ".join(self._noted({**schema, "type": one}) for one in kind))
        if kind in _SCALARS:
            told = {key: schema[key] for key in _BOUNDS if key in schema}
            return self._rule(f"%json {styled(told, lenient=self._lenient)}")
        if kind == "object" or (kind is None and "properties" in schema):
            return self._pairs(schema)
        if kind == "array" or (kind is None and "items" in schema):
            return self._things(schema)
        return "string" if kind == "string" else "thing"

    def _pairs(self, schema: dict[str, Any]) -> str:
        properties, required, more = (
            schema.get(key) for key in ("properties", "required", "additionalProperties")
        )
        if not isinstance(properties, dict):
            pair = f'{_ANY_NAME} ":" {self._noted(more)}'
            return self._rule(f'"{{" {_listed(pair)} "}}"') if isinstance(more, dict) else "pairs"
        pairs = [
            self._rule(f"{self._form.name(name)} {self._noted(one)}") for name, one in properties.items()
        ]
        owed = [isinstance(required, list) and name in required for name in properties]
        inner = f"{self._prefix}y{len(self.rules)}"
        self.rules += chained(inner, pairs, owed, '","')
        return self._rule(f'"{{" {inner} "}}"')

    def _things(self, schema: dict[str, Any]) -> str:
        few, most = schema.get("minItems"), schema.get("maxItems")
        few, most = few if isinstance(few, int) else 0, most if isinstance(most, int) else None
        if most == 0:
            return self._rule('"[" "]"')
        return self._rule(f'"[" {_listed(self._noted(schema.get("items")), few, most)} "]"')

    def _literal(self, value: Any) -> str:
        """The expression for exactly this value."""
        if isinstance(value, list):
            inner = ' "," '.join(map(self._literal, value))
            return f'"[" {inner} "]"'
        if isinstance(value, dict):
            inner = ' "," '.join(
                f"{self._form.name(name)} {self._literal(one)}" for name, one in value.items()
            )
            return f'"{{" {inner} "}}"'
        if isinstance(value, str):
            quote = self._form.tag(self._form.syntax.quote)
            return f"{quote} {quoted(value)} {quote}"
        return quoted(json.dumps(value))

    def _rule(self, expression: str) -> str:
        name = f"{self._prefix}z{len(self.rules)}"
        self.rules.append(f"{name}: {expression}")
        return name


def _listed(item: str, few: int = 0, most: int | None = None) -> str:
    """The expression for ``few`` to ``most`` items with commas between them, ``most`` at least 1; None: any
    number."""
    times = f"{{{max(0, few - 1)},{'' if most is None else most - 1}}}"
    more = item if most == 1 else f'{item} ("," {item}){times}'
    return more if few > 0 else f"({more})?"


def chained(name: str, items: list[str], owed: list[bool], between: str) -> Iterator[str]:
    """The rules of ``name``: the items in order, with ``between`` between two. Those that are not ``owed`` may
    be left out."""
    if not between:
        marked = [item if must else f"{item}?" for item, must in zip(items, owed, strict=True)]
        yield f"{name}: {' '.join(marked) or EMPTY}"
        return
    first, more = EMPTY, ""  # what may come from an item on, if none came before it, or some did
    for at in reversed(range(len(items))):
        yield f"{name}m{at}: ({between} {items[at]}){'' if owed[at] else '?'} {more}"
        yield f"{name}f{at}: {items[at]} {more} {'' if owed[at] else f'| {first}'}"
        first, more = f"{name}f{at}", f"{name}m{at}"
    yield f"{name}: {first}"


def parameters(tool: Tool, param: str = "tools") -> dict[str, Any]:
    """The schema of the tool's arguments as a grammar follows it. One that says nothing of members is that of
    the empty object. ``param``: the field that an error names. Raises ``GrammarInvalid`` if the tool is strict
    and its schema cannot be enforced, or is not of an object."""
    schema = tool.parameters
    kinds = schema.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        if tool.strict:
            raise GrammarInvalid(f"The parameters of tool {tool.name!r} are no object", param=param)
        return {"type": "object"}
    schema = {key: value for key, value in schema.items() if value is not None} | {"type": "object"}
    if not _OF_MEMBERS.intersection(schema):
        schema["properties"] = {}
    return followed(schema, strict=tool.strict, param=param, shut=True)


def followed(schema: dict[str, Any], *, strict: bool, param: str, shut: bool = False) -> dict[str, Any]:
    """The schema as a grammar follows it. ``strict``: what cannot be enforced, or takes long to compile, is
    refused; else it is left out. ``param``: the field that an error names. ``shut``: objects are `closed`.
    Raises ``GrammarInvalid``."""
    passed = excess(schema)
    if strict:
        for bound in passed.values():
            raise GrammarInvalid(f"A schema to be followed has {bound}", param=param)
    if passed.keys() - {"enum", "multipleOf"}:  # too large as a whole
        schema = {"type": schema["type"]} if "type" in schema else {}
    try:
        found: dict[str, Any] = exact(closed(schema) if shut else schema, lenient=not strict, without=passed)
    except ValueError as error:
        raise GrammarInvalid(f"The schema cannot be followed: {error}", param=param) from None
    return found


def closed(schema: Any) -> Any:
    """The schema, changed so that objects with ``properties`` allow no others, unless they say that they do. So
    the model cannot invent arguments."""
    if isinstance(schema, list):
        return [closed(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) if key in _NESTED else value for key, value in schema.items()}
    for key in _NAMED:
        if isinstance(found.get(key), dict):
            found[key] = {name: closed(inner) for name, inner in found[key].items()}
    if isinstance(found.get("properties"), dict) and not _OPEN.intersection(found):
        found["additionalProperties"] = False
    return found


_NESTED = frozenset({"items", "prefixItems", "anyOf", "oneOf"})
_NAMED = ("properties", "$defs", "definitions")
_OPEN = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref"}
)


_OF_MEMBERS = (
    _OPEN | UNFOLLOWED | {"properties", "required", "minProperties", "maxProperties", "const", "enum"}
)
"""Keywords that may ask for members of an object, or rule some out."""


def styled(schema: dict[str, Any], *, lenient: bool = False) -> str:
    """The schema, as `followed` gives it, as JSON for llguidance, with the separators of `STYLE`. ``lenient``:
    it may give way if it cannot be compiled."""
    return json.dumps({**schema, "x-guidance": {**STYLE, "lenient": lenient}}, ensure_ascii=False)


def quoted(text: str) -> str:
    """A text as a literal in Lark, which refuses the character DEL as it stands; empty for an empty text."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") if text else ""
