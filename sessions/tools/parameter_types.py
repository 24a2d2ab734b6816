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


def may_be_text(types: list[str]) -> bool:
    """Whether a value of these types may be a text. True for an empty list."""
    return not types or any(kind in _TEXTS and kind != NULL for kind in types)


def only_text(types: list[str]) -> bool:
    """Whether each value of these types is text. True for an empty list, which means that the types are
    unknown; false if null is the only type."""
    return all(kind in _TEXTS for kind in types) and set(types) != {NULL}


def types_of(schema: Any, root: dict[str, Any]) -> list[str]:
    """The types that a schema allows, each once; empty if it names none, and has no ``enum`` or ``const`` to
    tell them. ``root``: the schema that ``$ref`` refers to."""
    types: list[str] = []
    left = [schema]
    for _ in range(MAX_SCHEMAS):
        one = left.pop(0) if left else None
        if not isinstance(one, dict):
            continue
        reference, kinds = one.get("$ref"), one.get("type")
        if isinstance(reference, str):
            left.append(found_at(reference, root))
        kinds = kinds if isinstance(kinds, list) else [kinds] if kinds else map(_type_of, values_in(one))
        types += [str(kind).strip().lower() for kind in kinds if kind]
        for union in (one.get("anyOf"), one.get("oneOf")):
            left += union if isinstance(union, list) else []
    return list(dict.fromkeys(types))


def constants(schema: Any, root: dict[str, Any], depth: int = 8) -> list[Any] | None:
    """All values that a schema allows, if ``enum``, ``const`` or the type null name them, also in a union; else
    None. ``root``: the schema that ``$ref`` refers to. ``depth``: of references and unions."""
    if not isinstance(schema, dict) or not depth:
        return None
    if isinstance(schema.get("$ref"), str):
        return constants(found_at(schema["$ref"], root), root, depth - 1)
    options = schema.get("anyOf", schema.get("oneOf"))
    if isinstance(options, list):
        found = [constants(one, root, depth - 1) for one in options]
        return None if None in found else [value for values in found for value in values or ()] or None
    return [None] if schema.get("type") == NULL else values_in(schema) or None


def values_in(schema: dict[str, Any]) -> list[Any]:
    """The values of ``const`` or ``enum`` in a schema; empty if it has neither."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else []


def _type_of(value: Any) -> str:
    """The name of a JSON value's type."""
    match value:
        case None:
            return NULL
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
    return "array" if isinstance(value, list) else "object"


def found_at(reference: str, root: Any) -> Any:
    """The part of ``root`` that a reference refers to; None if there is none."""
    if not reference.startswith("#/"):
        return None
    for key in reference[2:].split("/"):
        root = root.get(key) if isinstance(root, dict) else None
    return root


def converted(text: str, types: list[str]) -> str:
    """Turn the text of a value into JSON, as the first of ``types`` that it fits. If it fits none, it becomes
    a JSON string. Not for values that are always text (`only_text`)."""
    word = text.strip().lower()
    if word == NULL:
        return NULL
    strict = may_be_text(types)  # what does not fit is a text
    for kind in types:
        if kind in ("boolean", "bool", "binary"):
            if len(types) == 1 or word in ("true", "false"):
                return json.dumps(word == "true")
            continue
        value = None if kind in _TEXTS or len(text) > MAX_VALUE else _json_of(text, kind, strict=strict)
        if value is not None:
            return value
    return json.dumps(text, ensure_ascii=False)


def _json_of(text: str, kind: str, *, strict: bool) -> str | None:
    """The JSON of a value of the type ``kind``; None if it is not of that type. If not ``strict``, any JSON may
    stand for an object or list."""
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
        if strict and not isinstance(value, {"object": dict, "array": list}.get(kind, object)):
            return None
        found = json.dumps(value, ensure_ascii=False, allow_nan=False)
        found.encode()  # refuse a lone surrogate
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, OverflowError):
        return None
    return found
