"""Hypothesis strategies from the schemas of the OpenAPI and AsyncAPI documents.

Values favour what reaches far into the server: the served model, short replies, ids that go together, and each
number, text and list at its bounds. ``@response`` and the like stand for ids that the server has given: the
client puts them in.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Json = dict[str, Any]
Shape = st.SearchStrategy[Any]

MODEL = "pocket"
WORDS = ["Hello!", "My name is Marisol.", "What is my name?", "", " ", "\0", "é", "🦊", "two\nlines"]
TEXTS = st.sampled_from(WORDS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
LEAVES = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, 1e308, 2**70, "", "x", "\0"])
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=4,
)
OBJECTS = st.dictionaries(st.sampled_from(["a", "b", "type", ""]), ANYTHING, max_size=3)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SCHEMAS = st.sampled_from(
    [
        CITY,
        {**CITY, "additionalProperties": False},
        {"type": "object"},
        {"type": "integer", "minimum": 0, "maximum": 3},
        {"type": "string", "pattern": "["},
        {"enum": ["a", 1, None]},
        {"$ref": "#"},
        {"$ref": "#/nowhere"},
        {"anyOf": []},
        {"type": "array", "items": CITY, "minItems": 5, "maxItems": 2},
        {"type": "odd"},
        {"not": {}},
        {"allOf": [CITY, False]},
    ]
)
FEW = st.sampled_from([1, 2, 3, 4])
IDS = st.sampled_from(["c1", "c2", "@call", "a" * 64])
TOKENS = st.lists(st.integers(0, 500), max_size=8) | st.lists(st.sampled_from(["Hello!", ""]), max_size=3)
LIMIT = st.one_of(FEW, FEW, FEW, st.sampled_from([2**31 - 1, 1]))
NAMED: dict[str, Shape] = {
    "arguments": st.sampled_from(["{}", '{"city": "Rome"}', "", "[", "null"]),
    "at": st.sampled_from(["@item", "item_0"]),
    "call_id": IDS,
    "children": FEW,
    "conversation": st.sampled_from(["@conversation", {"id": "@conversation"}, "conv_0", None]),
    "event_id": st.sampled_from(["e1", "e2", "e" * 512]),
    "grammar": st.sampled_from(['start: "a"', "start: x", "", 'start: "a" start | "b"']),
    "handle": st.sampled_from(["@handle", "h" * 22, ""]),
    "id": IDS,
    "item_id": st.sampled_from(["@item", "item_0"]),
    "lark": st.sampled_from(['start: "a"', "start: x", ""]),
    "model": st.sampled_from([MODEL] * 12 + ["gpt-x", "", "a" * 300]),
    "n": st.sampled_from([1, 1, 2, 3, 16]),
    "name": st.sampled_from(["get_weather", "f", "a" * 64, "a.b-c_d"]),
    "previous_item_id": st.sampled_from(["@item", "root", "item_0"]),
    "previous_response_id": st.sampled_from(["@response", "@response", "resp_0"]),
    "CompletionRequest.prompt": st.one_of(TEXTS, TOKENS, st.lists(TOKENS, max_size=3)),
    "regex": st.sampled_from(["[ab]{1,3}", "(", "", "a*", r"\p{L}+"]),
    "response_id": st.sampled_from(["@response", "resp_0"]),
    "session": st.sampled_from(["@handle", "@session", "sess_0"]),
    "session_id": st.sampled_from(["@session", "@session", "sess_0"]),
    "stream": st.booleans(),
    "stream_id": st.sampled_from(["left", "right", "s" * 128]),
    "to": st.sampled_from(["@item", "item_0", 0, 1]),
    "tool_call_id": IDS,
    "tool_use_id": IDS,
    "ttl": st.sampled_from([0, 0.5, 1]),
    **dict.fromkeys(("parameters", "schema", "input_schema", "json", "guided_json"), SCHEMAS | OBJECTS),
    **dict.fromkeys(("max_tokens", "max_output_tokens", "max_completion_tokens"), LIMIT),
    **dict.fromkeys(("min_tokens", "min_output_tokens"), st.sampled_from([0, 1, 2, 2**31 - 1])),
    **dict.fromkeys(("guided_regex", "pattern"), st.sampled_from(["[ab]{1,3}", "(", "a*"])),
    **dict.fromkeys(("guided_grammar",), st.sampled_from(['start: "a"', "start: x"])),
}
"""Fields, by their name or with that of their component before it. Their schema says less than the server asks
of them, or their values should fit together."""


USUAL = {
    **dict.fromkeys(("CreateBody", "LaneCreate", "CompactBody", "CountBody"), ("input",)),
    "AssistantMessage": ("content",),
    "TokenizeRequest": ("prompt",),
}
"""Fields that are not required, and without which little happens."""


class Shapes:
    """Strategies for the components of one document."""

    def __init__(self, document: Json) -> None:
        self._schemas: Json = document["components"]["schemas"]
        self._made: dict[str, Shape] = {}

    def of(self, schema: Json, name: str = "") -> Shape:
        """The values of a schema. ``name``: of the field that holds it."""
        if name in NAMED and "object" not in (schema.get("type"), self._kind(schema)):
            return NAMED[name]
        if name in NAMED and schema.get("type") == "object" and "properties" not in schema:
            return NAMED[name]
        if "$ref" in schema:
            return self._component(schema["$ref"].rpartition("/")[2])
        if "anyOf" in schema:
            return st.one_of([self.of(one, name) for one in schema["anyOf"]])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        match schema.get("type"):
            case "object":
                return self._object(schema)
            case "array":
                return self._array(schema, name)
            case "string":
                return _string(schema)
            case "integer" | "number" as kind:
                return _number(schema, whole=kind == "integer")
            case "boolean":
                return st.booleans()
            case "null":
                return st.none()
        return ANYTHING

    def _kind(self, schema: Json) -> str:
        """The type of a component, "" for a schema that names none."""
        return self._schemas[schema["$ref"].rpartition("/")[2]].get("type", "") if "$ref" in schema else ""

    def _component(self, name: str) -> Shape:
        if name not in self._made:
            self._made[name] = st.deferred(lambda: self.of(self._schemas[name]))
        return self._made[name]

    def _object(self, schema: Json) -> Shape:
        if "properties" not in schema:
            inner = schema.get("additionalProperties")
            if not isinstance(inner, dict):
                return OBJECTS
            keys = st.sampled_from(["5", "17", "a", ""])
            return st.dictionaries(keys, self.of(inner), max_size=min(3, schema.get("maxProperties", 3)))
        shapes = {
            name: NAMED.get(f"{schema['title']}.{name}", self.of(one, name))
            for name, one in schema["properties"].items()
        }
        needed = [*schema.get("required", ()), *USUAL.get(schema["title"], ())]
        others = [name for name in shapes if name not in needed]
        chosen = st.lists(st.sampled_from(others), max_size=4, unique=True) if others else st.just([])
        return chosen.flatmap(
            lambda more: st.fixed_dictionaries({name: shapes[name] for name in (*needed, *more)})
        )

    def _array(self, schema: Json, name: str) -> Shape:
        inner = self.of(schema.get("items", {}), name.removesuffix("s"))
        least, most = schema.get("minItems", 0), schema.get("maxItems", 4)
        short = st.lists(inner, min_size=least, max_size=min(most, max(4, least)))
        if not 4 < most <= 300:
            return short
        full = st.builds(lambda one: [one] * most, inner)
        return st.one_of(*[short] * 9, full)


def _string(schema: Json) -> Shape:
    if "pattern" in schema:
        return st.from_regex(schema["pattern"])
    least, most = schema.get("minLength", 0), schema.get("maxLength", 1 << 30)
    plain = TEXTS.filter(lambda text: least <= len(text) <= most)
    bounds = [("a" * size) for size in (least, most) if size <= 1 << 16]
    return st.one_of(*[plain] * 6, st.sampled_from(bounds))


def _number(schema: Json, *, whole: bool) -> Shape:
    least = schema.get("minimum", schema.get("exclusiveMinimum", -(2**31)))
    most = schema.get("maximum", 2**31)
    if whole:
        return st.sampled_from([least, most]) | st.integers(least, min(most, max(least, 0) + 9))
    open_low = "exclusiveMinimum" in schema
    bounds = [most] if open_low else [least, most]
    inside = st.floats(least, most, exclude_min=open_low, allow_nan=False, width=64)
    return st.sampled_from(bounds) | inside
