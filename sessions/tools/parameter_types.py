"""Turns arguments that a model wrote as plain text into JSON, by the types in the tool's schema.

The rules are those of Qwen's parser and of vLLM's (``qwen3_coder``): ``null`` is null in any type, and a value
that does not fit its type stays text. In addition, types in ``anyOf``, ``oneOf`` and ``$ref`` count.
"""

from __future__ import annotations

import ast
import json
import warnings
from typing import Any

MAX_VALUE = 65_536
"""The most characters of a number, object or other value that is not text. A longer value stays text."""
MAX_SCHEMAS = 64
"""The most schemas that are read to find a parameter's types."""

_TEXTS = frozenset({"string", "str", "text", "varchar", "char", "enum", "null"})
_INTEGERS = ("int", "uint", "long", "short", "unsigned")
_FRACTIONS = ("num", "float")
NULL = "null"
"""A value that is null in any type, in upper or lower case."""


def writes_text(schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Whether a value of a parameter with this schema is written as plain text, not as JSON. ``root``: the
    schema that ``$ref`` refers to."""
    return only_text(types_of(schema, root))


def only_text(types: list[str]) -> bool:
    """Whether each value of these types is text. True for an empty list, which means that the types are
    unknown; false if null is the only type."""
    return all(kind in _TEXTS for kind in types) and set(types) != {NULL}


def types_of(schema: Any, root: dict[str, Any]) -> list[str]:
    """The types that a schema allows; empty if it names none. ``root``: the schema that ``$ref`` refers to."""
    types: list[str] = []
    left = [schema]
    for _ in range(MAX_SCHEMAS):
        one = left.pop(0) if left else None
        if not isinstance(one, dict):
            continue
        reference, kinds = one.get("$ref"), one.get("type")
        if isinstance(reference, str) and reference.startswith("#/"):
            left.append(_found(reference[2:].split("/"), root))
        types += [
            str(kind).strip().lower() for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind
        ]
        for union in (one.get("anyOf"), one.get("oneOf")):
            left += union if isinstance(union, list) else []
    return types


def _found(keys: list[str], root: Any) -> Any:
    """The part of ``root`` at the path ``keys``, which is that of a reference; None if there is none."""
    for key in keys:
        root = root.get(key) if isinstance(root, dict) else None
    return root


def converted(text: str, types: list[str]) -> str:
    """Turn the text of a value into JSON, as the first of ``types`` that it fits. If it fits none, it becomes
    a JSON string. Not for values that are always text (`only_text`)."""
    if text.lower() == NULL:
        return NULL
    for kind in types:
        if kind in ("boolean", "bool", "binary") and (len(types) == 1 or text.lower() in ("true", "false")):
            return json.dumps(text.lower() == "true")
        value = None if kind in _TEXTS or len(text) > MAX_VALUE else _json_of(text, kind)
        if value is not None:
            return value
    return json.dumps(text, ensure_ascii=False)


def _json_of(text: str, kind: str) -> str | None:
    """The JSON of a value of the type ``kind``; None if it is not of that type."""
    try:
        if kind.startswith(_INTEGERS):
            return json.dumps(int(text))
        if kind.startswith(_FRACTIONS):
            number = float(text)
            return json.dumps(int(number) if number == int(number) else number)
        try:
            value = json.loads(text)
        except ValueError:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the parser warns of odd escapes in the model's text
                value = ast.literal_eval(text)
        found = json.dumps(value, ensure_ascii=False, allow_nan=False)
        found.encode()  # refuse a lone surrogate
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, OverflowError):
        return None
    return found
