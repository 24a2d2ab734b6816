"""Every field of a schema, in a body that holds it: for tests that put values there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Field:
    """A field of a body. ``path``: as an error names it, ``tools[0].type``. ``schemas``: what it may be,
    without references and unions. ``holding``: the body with a value there."""

    path: str
    schemas: list[Json]
    holding: Callable[[Any], Any]

    @property
    def bounds(self) -> Iterator[tuple[Any, Any]]:
        """Values at a bound, each with the next one beyond it."""
        for schema in self.schemas:
            step = 1 if schema.get("type") == "integer" else 1e-6
            for name, sign in (("minimum", -1), ("maximum", 1)):
                if name in schema:
                    yield schema[name], schema[name] + sign * step
            if "exclusiveMinimum" in schema:
                yield schema["exclusiveMinimum"] + 1e-9, schema["exclusiveMinimum"]
            if "maxLength" in schema and schema["maxLength"] < 1 << 20:
                yield "a" * schema["maxLength"], "a" * (schema["maxLength"] + 1)
            if schema.get("minLength") == 1:
                yield "a", ""

    @property
    def misfits(self) -> list[Any]:
        """Values of types that it may not be."""
        kinds = {schema.get("type", "enum" if "enum" in schema else "any") for schema in self.schemas}
        if "any" in kinds:
            return []
        others = {
            "null": None,
            "boolean": True,
            "integer": 7,
            "number": 7.5,
            "array": [[7]],
            "object": {"\0": 7},
        }
        wrong = [value for kind, value in others.items() if kind not in kinds]
        if "number" in kinds and 7 in wrong:
            wrong.remove(7)
        if "object" in kinds or "array" in kinds:
            wrong = [value for value in wrong if not isinstance(value, list | dict)]
        return wrong if kinds & {"string", "enum"} else [*wrong, "7"]


class SchemaFields:
    """The fields of a document's components."""

    def __init__(self, document: Json) -> None:
        self._schemas: Json = document["components"]["schemas"]

    def of(self, schema: Json, whole: Json) -> Iterator[Field]:
        """All fields below ``schema``. ``whole``: a valid body, to which each is added."""
        for one in self.plain(schema):
            yield from self._inside(one, "", lambda value: value, whole, ())

    def objects(self, schema: Json, whole: Json) -> Iterator[tuple[str, Any]]:
        """The path of each object below, with a body in which it has a field ``surprise``."""
        yield "surprise", {**whole, "surprise": 1}
        for field in self.of(schema, whole):
            for one in field.schemas:
                if one.get("additionalProperties") is False:
                    yield f"{field.path}.surprise", field.holding({**self.least(one), "surprise": 1})

    def plain(self, schema: Json) -> list[Json]:
        """The alternatives of a schema, without references."""
        if "$ref" in schema:
            return self.plain(self._schemas[schema["$ref"].rpartition("/")[2]])
        if "anyOf" in schema:
            return [one for part in schema["anyOf"] for one in self.plain(part)]
        return [schema]

    def least(self, schema: Json) -> Any:
        """The smallest value of a schema."""
        schema = self.plain(schema)[0]
        match schema.get("type"):
            case "object":
                properties = schema.get("properties", {})
                return {name: self.least(properties[name]) for name in schema.get("required", ())}
            case "array":
                return [self.least(schema["items"])] * schema.get("minItems", 0)
            case "string":
                return "a"
            case "integer" | "number":
                return max(schema.get("minimum", 0), 0)
            case "boolean":
                return False
        return schema["enum"][0] if "enum" in schema else None

    def _inside(
        self, schema: Json, path: str, holding: Callable[[Any], Any], least: Json, above: tuple[str, ...]
    ) -> Iterator[Field]:
        title = schema.get("title", "")
        if title in above:
            return
        for name, inner in schema.get("properties", {}).items():
            inner_path = f"{path}.{name}".removeprefix(".")

            def with_field(value: Any, name: str = name) -> Any:
                return holding({**least, name: value})

            yield from self._field(inner, inner_path, with_field, (*above, title))

    def _field(
        self, schema: Json, path: str, holding: Callable[[Any], Any], above: tuple[str, ...]
    ) -> Iterator[Field]:
        alternatives = self.plain(schema)
        yield Field(path, alternatives, holding)
        for one in alternatives:
            if "properties" in one:
                yield from self._inside(one, path, holding, self.least(one), above)
            elif one.get("type") == "array" and "items" in one:
                few = one.get("minItems", 0)

                def in_list(value: Any, few: int = few) -> Any:
                    return holding([value] * max(1, few))

                yield from self._field(one["items"], f"{path}[0]", in_list, above)
