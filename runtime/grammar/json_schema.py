"""JSON schemas as llguidance has to get them, so that it follows them exactly.

The library reads numbers as doubles and writes bounds as regular expressions, which it cannot do for very large
or small ones. So bounds are narrowed to numbers that a double holds exactly: what is written then fits the
schema that was given, too. Constants that a double does not hold are refused, since they would be written
rounded. Dates get a pattern of their own, as the library's takes February 29 in every year. A pattern of names
that are all declared is dropped: the library lets a comma follow for a further name, and finds none. Knows no
library.
"""

from __future__ import annotations

import math
import re
import re._parser as _parser  # type: ignore[import-not-found]  # the only parser of regular expressions there is
from collections.abc import Iterable
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any

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
_FORMATS = {"date": f"^{DATE}$", "date-time": f"^{DATE}[Tt]{TIME}$"}
_BOUNDS = {
    "minimum": ROUND_CEILING,
    "exclusiveMinimum": ROUND_CEILING,
    "maximum": ROUND_FLOOR,
    "exclusiveMaximum": ROUND_FLOOR,
}
"""Keywords of bounds, and how each is narrowed."""
_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords with an object of schemas by name."""
_VALUES = ("default", "examples", "example", "required", "dependentRequired", "x-guidance")
"""Keywords with a value that holds no schema."""


def exact(schema: Any) -> Any:
    """This schema, as parsed, in the form in which it is followed exactly. Raises ``ValueError`` with the
    reason if there is none."""
    if isinstance(schema, list):
        return [exact(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for key, value in schema.items():
        if key in _BOUNDS and isinstance(value, int | float) and not isinstance(value, bool):
            made[key] = _narrowed(key, value)
        elif key in ("const", "enum"):
            _check_constants(value)
        elif key in _NAMES and isinstance(value, dict):
            made[key] = {name: exact(one) for name, one in value.items()}
        elif key not in _VALUES:
            made[key] = exact(value)
    name = schema.get("format")
    if isinstance(name, str) and name in _FORMATS and "pattern" not in schema:
        del made["format"]
        made["pattern"] = _FORMATS[name]
    if isinstance(made.get("properties"), dict) and isinstance(made.get("patternProperties"), dict):
        _drop_declared(made)
    return made


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
    try:
        parts = list(_parser.parse(pattern))
    except (re.error, RecursionError, OverflowError):
        return None
    begins, ends = (_parser.AT, _parser.AT_BEGINNING), (_parser.AT, _parser.AT_END)
    if len(parts) < 2 or parts[0] != begins or parts[-1] != ends:
        return None
    return _texts(parts[1:-1])


def _texts(parts: Iterable[tuple[Any, Any]]) -> set[str] | None:
    found = {""}
    for kind, value in parts:
        match str(kind):
            case "LITERAL":
                texts: set[str] | None = {chr(value)}
            case "IN":
                texts = _letters(value)
            case "BRANCH":
                texts = _union(map(_texts, value[1]))
            case "SUBPATTERN":
                texts = _texts(value[3])
            case "MAX_REPEAT" | "MIN_REPEAT" if value[1] <= MOST_NAMES:
                texts = _union(_texts(list(value[2]) * count) for count in range(value[0], value[1] + 1))
            case _:
                return None
        if texts is None or len(texts) * len(found) > MOST_NAMES:
            return None
        found = {before + text for before in found for text in texts}
    return found


def _letters(ranges: Iterable[tuple[Any, Any]]) -> set[str] | None:
    found = set[str]()
    for kind, value in ranges:
        match str(kind):
            case "LITERAL":
                found.add(chr(value))
            case "RANGE" if value[1] - value[0] < MOST_NAMES:
                found |= set(map(chr, range(value[0], value[1] + 1)))
            case _:
                return None
    return found


def _union(parts: Iterable[set[str] | None]) -> set[str] | None:
    found = set[str]()
    for part in parts:
        if part is None:
            return None
        found |= part
    return found


def _narrowed(key: str, bound: float) -> float:
    """The bound, or the next number inside it that a double holds and that has few digits."""
    rounding = _BOUNDS[key]
    narrow = min(bound, EXACT) if rounding == ROUND_FLOOR else max(bound, -EXACT)
    if not abs(narrow) <= EXACT:
        raise ValueError(f"a {key} within ±2^53, not {bound}"[:80])
    if narrow == int(narrow):
        return int(narrow)
    few = Context(prec=DIGITS, rounding=rounding).create_decimal(repr(narrow))
    return float(few if few.adjusted() >= 0 else few.quantize(Decimal(1).scaleb(-DIGITS), rounding))


def _check_constants(value: Any) -> None:
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            _check_constants(one)
    elif isinstance(value, int) and abs(value) > EXACT:
        raise ValueError(f"constants within ±2^53, not {value}, or as text"[:80])
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("finite constants")
