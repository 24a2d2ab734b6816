"""JSON schemas as llguidance has to get them, so that it follows them exactly.

The library reads numbers as doubles and writes bounds as regular expressions, which it cannot do for very large
or small ones. So bounds are narrowed to numbers that a double holds exactly: what is written then fits the
schema that was given, too. Constants that a double does not hold are refused, since they would be written
rounded. Dates get a pattern of their own, as the library's takes February 29 in every year. A pattern of names
that are all declared is dropped: the library lets a comma follow for a further name, and finds none. What the
library cannot do is refused by name, or left out. Knows no library.
"""

from __future__ import annotations

import json
import math
import re
import re._parser as _parser  # type: ignore[import-not-found]  # the only parser of regular expressions there is
from collections.abc import Callable, Container, Iterable, Iterator
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any
from urllib.parse import unquote

from ..verbs import Grammar, GrammarKind

EXACT = 2**53
"""Up to this a double holds each whole number (RFC 8259, section 6)."""
DIGITS = 15
"""Digits of a bound that is no whole number, and its decimal places: a double holds so many."""
MOST_NAMES = 256
"""More names than this of one pattern count as any."""
_LEAP = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
DATE = (
    r"(?:\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    rf"|02-(?:0[1-9]|1\d|2[0-8]))|{_LEAP}-02-29)"
)
"""A full-date of RFC 3339."""
TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:(?:[0-5]\d|60)(?:\.\d{1,9})?(?:[Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
"""A full-time of RFC 3339."""
_PATTERNS = {"date": f"^{DATE}$", "date-time": f"^{DATE}[Tt]{TIME}$"}
_NAMES = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords with an object of schemas by name."""
_VALUES = ("default", "examples", "example", "const", "enum", "type", "required", "x-guidance")
"""Keywords with a value that holds no schema."""
_DIALECT = re.compile(
    r"(http://json-schema\.org/draft-0[3467]|https://json-schema\.org/draft/20.{5})/schema#?"
)
"""What ``$schema`` may name; any other is left out."""
UNFOLLOWED = frozenset(
    [
        *("not", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas"),
        *("uniqueItems", "contains", "minContains", "maxContains", "propertyNames"),
        *("unevaluatedProperties", "unevaluatedItems"),
        *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
    ]
)
"""Keywords that the library cannot follow."""
KINDS = ("null", "boolean", "integer", "number", "string", "array", "object")
FORMATS = frozenset(
    ["unknown", "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
)
"""The formats of strings that the library knows."""
_REGULAR = re.compile(r"(?:\\[^bBk1-9]|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?!\?<?[=!])|[^\\\[(])*+", re.DOTALL)
"""A regular expression that looks at nothing around it and refers to no group: others are no automata."""


def exact(schema: Any, *, lenient: bool = False, without: Container[str] = ()) -> Any:
    """This schema, as parsed, in the form in which it is followed exactly. ``lenient``: keywords that cannot be
    followed are left out; else the first one raises ``ValueError``, which names it. ``without``: keywords that
    are left out in any case."""
    return _exact(schema, schema, "", lenient, without)


def _exact(schema: Any, root: Any, at: str, lenient: bool, without: Container[str]) -> Any:
    if isinstance(schema, list):
        return [_exact(one, root, f"{at}[{index}]", lenient, without) for index, one in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in without or (key == "$schema" and not _DIALECT.fullmatch(str(value))):
            continue
        try:
            value = _followed(key, value, schema, root)
        except ValueError as fault:
            if lenient:
                continue
            where = f" in `{at[1:]}`" if at else ""
            raise ValueError(f"`{key}`{where} {fault}") from None
        if key in _NAMES and isinstance(value, dict):
            inner = {name: (one, f"{at}.{key}.{name}") for name, one in value.items()}
            made[key] = {name: _exact(one, root, to, lenient, without) for name, (one, to) in inner.items()}
        else:
            made[key] = value if key in _VALUES else _exact(value, root, f"{at}.{key}", lenient, without)
    if "patternProperties" in schema and "patternProperties" not in made:
        made.pop("additionalProperties", None)  # it is for other names than the patterns'
    name = made.get("format")
    if isinstance(name, str) and name in _PATTERNS and "pattern" not in made:
        del made["format"]
        made["pattern"] = _PATTERNS[name]
    if isinstance(made.get("properties"), dict) and isinstance(made.get("patternProperties"), dict):
        _drop_declared(made)
    return made


def _followed(key: str, value: Any, schema: dict[str, Any], root: Any) -> Any:
    """The value of a keyword of ``schema``, a part of ``root``, as it is followed. Raises ``ValueError`` with
    the reason if it cannot be."""
    if key in UNFOLLOWED:
        raise ValueError("cannot be enforced")
    if key in _TAKES and not _TAKES[key](value):
        raise ValueError(f"cannot be {value!r}"[:80])
    match key:
        case "const" | "enum":
            _check_constants(value)
        case "minimum" | "exclusiveMinimum" if not isinstance(value, bool):
            return _narrowed(max(value, -EXACT), ROUND_CEILING)
        case "maximum" | "exclusiveMaximum" if not isinstance(value, bool):
            return _narrowed(min(value, EXACT), ROUND_FLOOR)
        case "minProperties" | "maxProperties":
            names, required = schema.get("properties"), schema.get("required")
            if isinstance(names, dict) and names.keys() - (required if isinstance(required, list) else ()):
                raise ValueError("cannot be enforced with properties that may be left out")
        case "format" if "string" in _listed(schema.get("type", "string")) and value not in FORMATS:
            raise ValueError(f"cannot be enforced as {value!r}"[:80])
        case "$ref" if not _refers(value, root):
            raise ValueError(f"refers to {value!r:.40}, which is not in the schema")
    return value


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _are_schemas(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_schema, value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_regular(value: Any) -> bool:
    return isinstance(value, str) and _REGULAR.fullmatch(value) is not None


_TAKES: dict[str, Callable[[Any], bool]] = {
    "type": lambda value: value != [] and all(kind in KINDS for kind in _listed(value)),
    "enum": lambda value: isinstance(value, list) and value != [],
    "required": lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
    "format": lambda value: isinstance(value, str),
    "pattern": _is_regular,
    "patternProperties": lambda value: isinstance(value, dict) and all(map(_is_regular, value)),
    "additionalProperties": _is_schema,
    "items": lambda value: _is_schema(value) or _are_schemas(value),
    **dict.fromkeys(("prefixItems", "allOf"), _are_schemas),
    **dict.fromkeys(("anyOf", "oneOf"), lambda value: _are_schemas(value) and value != []),
    **dict.fromkeys(("minimum", "maximum"), _is_number),
    **dict.fromkeys(  # true or false before draft 6
        ("exclusiveMinimum", "exclusiveMaximum"), lambda value: isinstance(value, int | float)
    ),
    "multipleOf": lambda value: _is_number(value) and value > 0,
    **dict.fromkeys(("minLength", "minItems", "minProperties"), _is_count),
    **dict.fromkeys(("maxLength", "maxItems", "maxProperties"), _is_count),
}
"""Whether the library takes a keyword's value."""


def _refers(reference: Any, root: Any) -> bool:
    """Whether a reference finds its schema, as far as that is known here."""
    if not isinstance(reference, str):
        return False
    if "$id" in root or not reference.startswith("#/"):
        return "$id" in root or reference.startswith("#")
    for name in unquote(reference[2:]).split("/"):
        name = name.replace("~1", "/").replace("~0", "~")
        index = int(name) if isinstance(root, list) and name.isascii() and name.isdigit() else name
        try:
            root = root[index]
        except (TypeError, LookupError):
            return False
    return True


def loosened(grammar: Grammar, follows: Callable[[Grammar], bool]) -> Grammar:
    """A grammar that cannot be compiled, changed so that of each lenient schema in it that cannot be followed
    only the type is left; if each of them could be, of all. ``follows``: whether a grammar can be compiled."""
    parts = list(_lenient_parts(grammar))
    refused = [
        part for part in parts if not follows(Grammar(GrammarKind.JSON, grammar.text[part[0] : part[1]]))
    ]
    text, last = "", 0
    for begin, end, schema in refused or parts:
        left = {key: schema[key] for key in ("type", "x-guidance") if key in schema}
        text += grammar.text[last:begin] + json.dumps(left)
        last = end
    return Grammar(grammar.kind, text + grammar.text[last:], grammar.string_bytes)


def _lenient_parts(grammar: Grammar) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The lenient schemas in a grammar: where each begins and ends in its text, and itself."""
    begins = {
        GrammarKind.JSON: [0],
        GrammarKind.LARK: [one.end() for one in re.finditer("%json ", grammar.text)],
    }
    end = 0
    for begin in begins.get(grammar.kind, ()):
        try:
            schema, until = _DECODER.raw_decode(grammar.text, begin)
            lenient = schema["x-guidance"]["lenient"] is True
        except (ValueError, TypeError, LookupError, RecursionError):
            continue
        if lenient and begin >= end:  # not a text in another one
            yield begin, until, schema
            end = until


_DECODER = json.JSONDecoder()


def _drop_declared(schema: dict[str, Any]) -> None:
    """Drop patterns of names that match declared ones alone; what they ask for goes to these."""
    properties, patterns = dict(schema["properties"]), dict(schema["patternProperties"])
    for pattern, asked in schema["patternProperties"].items():
        names = names_of(pattern)
        if names is not None and names <= properties.keys():
            del patterns[pattern]
            properties |= {name: {"allOf": [properties[name], asked]} for name in sorted(names)}
    schema |= {"properties": properties, "patternProperties": patterns}
    if not patterns:
        del schema["patternProperties"]


def names_of(pattern: str) -> set[str] | None:
    """All names that a regular expression matches, if it is anchored on both sides and they are few."""
    begins, ends = (_parser.AT, _parser.AT_BEGINNING), (_parser.AT, _parser.AT_END)
    try:
        parts = list(_parser.parse(pattern))
        if len(parts) < 2 or parts[0] != begins or parts[-1] != ends:
            return None
        return _texts(parts[1:-1])
    except (re.error, ValueError, RecursionError, OverflowError):
        return None


def _texts(parts: Iterable[tuple[Any, Any]]) -> set[str]:
    """All texts that a parsed regular expression matches. Raises ``ValueError`` if they are too many."""
    found = {""}
    for kind, value in parts:
        match str(kind):
            case "LITERAL":
                texts = {chr(value)}
            case "RANGE" if value[1] - value[0] < MOST_NAMES:
                texts = set(map(chr, range(value[0], value[1] + 1)))
            case "IN":
                texts = set[str]().union(*(_texts([one]) for one in value))
            case "BRANCH":
                texts = set[str]().union(*map(_texts, value[1]))
            case "SUBPATTERN":
                texts = _texts(value[3])
            case "MAX_REPEAT" | "MIN_REPEAT" if value[1] <= MOST_NAMES:
                counts = range(value[0], value[1] + 1)
                texts = set[str]().union(*(_texts(list(value[2]) * count) for count in counts))
            case _:
                raise ValueError("too many, or not known")
        if len(texts) * len(found) > MOST_NAMES:
            raise ValueError("too many")
        found = {before + text for before in found for text in texts}
    return found


def _narrowed(bound: float, rounding: str) -> float:
    """The bound, or the next number inside it that a double holds and that has few digits."""
    if not abs(bound) <= EXACT:
        raise ValueError(f"is to be within ±2^53, not {bound}"[:80])
    if bound == int(bound):
        return int(bound)
    few = Context(prec=DIGITS, rounding=rounding).create_decimal(repr(bound))
    return float(few if few.adjusted() >= 0 else few.quantize(Decimal(1).scaleb(-DIGITS), rounding))


def _check_constants(value: Any) -> None:
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            _check_constants(one)
    elif isinstance(value, int) and abs(value) > EXACT:
        raise ValueError(f"holds constants beyond ±2^53, such as {value}: give them as text"[:80])
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("holds constants that are not finite")
