"""Types of `msgspec.inspect` in words, with their bounds."""

from __future__ import annotations

from typing import Any

import msgspec


def in_words(kind: Any) -> str:
    """A type of `msgspec.inspect` in words: ``string of at most 64 characters``. Raises ``TypeError`` for a
    kind without words."""
    match type(kind).__name__:
        case "UnionType":
            return " or ".join(in_words(inner) for inner in kind.types)
        case "Metadata":
            return in_words(kind.type)
        case "LiteralType":
            return " or ".join(f"`{msgspec.json.encode(value).decode()}`" for value in kind.values)
        case "ListType":
            return f"list of {in_words(kind.item_type)}{_bounds(kind, 'entries')}"
        case "DictType":
            return (
                f"object: {in_words(kind.key_type)} to {in_words(kind.value_type)}{_bounds(kind, 'entries')}"
            )
        case "StructType":
            return str(kind.cls.__name__)
        case "StrType":
            pattern = f" matching `{kind.pattern}`" if kind.pattern else ""
            return f"string{_bounds(kind, 'characters')}{pattern}"
        case "IntType" | "FloatType" as name:
            return ("integer" if name == "IntType" else "number") + _range(kind)
        case "BoolType":
            return "boolean"
        case "NoneType":
            return "null"
        case "AnyType":
            return "any JSON"
        case other:
            raise TypeError(f"no words for {other}")


def _bounds(kind: Any, unit: str) -> str:
    least, most = kind.min_length, kind.max_length
    if least and most:
        return f" of {least} to {most} {unit}" if least != most else f" of {most} {unit}"
    return f" of at most {most} {unit}" if most else f" of at least {least} {unit}" if least else ""


def _range(kind: Any) -> str:
    signs = (("≥", kind.ge), (">", kind.gt), ("≤", kind.le), ("<", kind.lt))
    told = [f"{sign} {value}" for sign, value in signs if value is not None]
    return f" ({', '.join(told)})" if told else ""
