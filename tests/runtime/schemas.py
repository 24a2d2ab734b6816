"""Random JSON schemas with finite documents only, for hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]
NAMES = st.text('abcxyzäß0_ -"\\/{}', min_size=1, max_size=5)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-999, 999), st.text(max_size=6))


def _integers(bounds: tuple[int, int]) -> Schema:
    return {"type": "integer", "minimum": min(bounds), "maximum": max(bounds)}


def _strings(bounds: tuple[int, int]) -> Schema:
    return {"type": "string", "minLength": min(bounds), "maxLength": max(bounds)}


def _arrays(items: Schema, bounds: tuple[int, int]) -> Schema:
    return {"type": "array", "items": items, "minItems": min(bounds), "maxItems": max(bounds)}


def _objects(properties: dict[str, Schema], chance: list[bool]) -> Schema:
    required = [name for name, owed in zip(properties, chance, strict=False) if owed]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


LEAVES = st.one_of(
    st.builds(_integers, st.tuples(st.integers(-5000, 5000), st.integers(-5000, 5000))),
    st.builds(_strings, st.tuples(st.integers(0, 6), st.integers(0, 6))),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}]),
    st.builds(lambda values: {"enum": values}, st.lists(SCALARS, min_size=1, max_size=4)),
    st.builds(lambda value: {"const": value}, SCALARS),
    st.sampled_from(["[a-f]{2,4}", "(ab|c)?d", "x[0-9]{3}"]).map(
        lambda pattern: {"type": "string", "pattern": f"^{pattern}$"}
    ),
    st.sampled_from([{"type": "string", "format": form} for form in ("date", "time", "ipv4", "uuid")]),
)


def _grown(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    few = st.tuples(st.integers(0, 3), st.integers(0, 3))
    objects = st.builds(
        _objects, st.dictionaries(NAMES, inner, max_size=4), st.lists(st.booleans(), min_size=4, max_size=4)
    )
    either = st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3))
    return st.one_of(objects, objects, st.builds(_arrays, inner, few), either)


SCHEMAS = st.recursive(LEAVES, _grown, max_leaves=8)
"""Any JSON value."""

ARGUMENTS = st.builds(
    _objects, st.dictionaries(NAMES, SCHEMAS, max_size=4), st.lists(st.booleans(), min_size=4, max_size=4)
)
"""Objects, as a tool's parameters are."""
