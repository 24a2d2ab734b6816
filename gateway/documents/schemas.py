"""JSON Schemas of types, as the OpenAPI and the AsyncAPI document have them: one component for each struct,
with its docstring; and types in words, as the reference of the protocol has them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, get_args

import msgspec
from msgspec.inspect import Field, Metadata, StructType, UnionType, type_info

REFERENCE = "#/components/schemas/{name}"


def schemas_of(types: Iterable[Any]) -> tuple[dict[Any, dict[str, Any]], dict[str, Any]]:
    """The JSON Schema of each type, by type, and the components (schemas of structs) that these refer to, by
    name.

    https://json-schema.org/draft/2020-12, which OpenAPI 3.1 and AsyncAPI 3.0 both read.
    """
    types = list(types)
    schemas, components = msgspec.json.schema_components(types, ref_template=REFERENCE)
    for component in components.values():
        if "description" in component:
            component["description"] = inspect.cleandoc(component["description"])
    return dict(zip(types, schemas, strict=True)), dict(sorted(components.items()))


def fields_of(struct: type) -> tuple[Field, ...]:
    """The fields of a struct, with their types."""
    info = type_info(struct)
    assert isinstance(info, StructType)
    return info.fields


def members_of(union: Any) -> tuple[type, ...]:
    """The structs of a union, sorted by their tag. A single struct is a union of one."""
    return tuple(sorted(get_args(union) or (union,), key=tag_of))


def tag_of(struct: Any) -> str:
    """The value that a struct has in its field ``type`` on the wire; the struct's name if it has no tag."""
    return str(struct.__struct_config__.tag or struct.__name__)


def text_of(documented: Any) -> str:
    """The docstring of a type, without indentation; empty if it has none."""
    return inspect.cleandoc(documented.__doc__ or "")


def summary_of(documented: Any) -> str:
    """The first paragraph of a type's docstring, in one line."""
    return " ".join(text_of(documented).split("\n\n")[0].split())


def description_of(kind: Any) -> str:
    """What the `Meta` of a type of `msgspec.inspect` says of it; "" if it says nothing."""
    kinds = kind.types if isinstance(kind, UnionType) else (kind,)
    told = (one.extra_json_schema or {} for one in kinds if isinstance(one, Metadata))
    return next((str(one["description"]) for one in told if "description" in one), "")


def parameters_of(query: type | None) -> list[tuple[str, bool, dict[str, Any], str]]:
    """The fields of a query struct, each as its name, whether it is required, its JSON Schema without the
    description, and its description. Empty for None."""
    if query is None:
        return []
    properties = msgspec.json.schema(query)["$defs"][query.__name__]["properties"]
    found = []
    for field in fields_of(query):
        schema = dict(properties[field.encode_name])
        text = schema.pop("description", "")
        found.append((field.encode_name, field.required, schema, text))
    return found


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
