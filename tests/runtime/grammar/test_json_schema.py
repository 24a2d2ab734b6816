"""Schemas that the library would follow otherwise than they say: it gets them in a form that it follows
exactly, or they are refused at once."""

from __future__ import annotations

import datetime
import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.runtime.grammar.json_schema import EXACT, FORMATS, UNFOLLOWED, exact, names_of

from ..schemas import SCHEMAS

llguidance = pytest.importorskip("llguidance")
BYTES = llguidance.LLTokenizer("byte")


def fits(schema: Any, text: str) -> bool:
    """Whether the library lets a model write this."""
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(exact(schema)))
    matcher = llguidance.LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and bool(matcher.is_accepting())


@pytest.mark.parametrize("number", [EXACT + 1, -EXACT - 1, 1234567890123456789, 2**64, float("inf")])
@pytest.mark.parametrize("inside", [lambda one: one, lambda one: [1, {"a": [one]}]])
def test_a_constant_that_would_be_rounded_is_refused(number: float, inside: Any) -> None:
    for schema in ({"const": inside(number)}, {"anyOf": [{"enum": ["a", inside(number)]}]}):
        with pytest.raises(ValueError, match="constants"):
            exact({"properties": {"a": schema}})


@pytest.mark.parametrize(
    "value", [EXACT, -EXACT, 0, 0.1, 1.5, True, None, "1234567890123456789", [1, {"a": 2}]]
)
def test_other_constants_are_written_as_they_are(value: Any) -> None:
    assert fits({"const": value}, json.dumps(value)) and fits({"enum": [value, "other"]}, json.dumps(value))


BOUNDS = st.one_of(
    st.sampled_from(
        [0, 1, -1, EXACT, -EXACT, 2**63 - 1, -(2**63), 2**63, 2**64, -(2**64), 1e300, -1e300, 1e-300]
    ),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(-1000, 1000),
)


@settings(max_examples=3 * settings().max_examples)
@given(
    st.sampled_from(["integer", "number"]),
    st.dictionaries(
        st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]), BOUNDS, max_size=2
    ),
    st.one_of(st.integers(-(2**65), 2**65), st.integers(-20, 20), st.decimals(-50, 50, places=3)),
)
def test_what_fits_the_bounds_that_are_followed_fits_those_that_were_given(
    kind: str, bounds: dict[str, float], number: Any
) -> None:
    schema = {"type": kind, **bounds}
    try:
        followed = fits(schema, str(number))
    except ValueError:  # nothing within 2^53 fits
        lowest = max((bounds[key] for key in bounds if "inimum" in key), default=0)
        highest = min((bounds[key] for key in bounds if "aximum" in key), default=0)
        assert lowest > EXACT or highest < -EXACT
        return
    except AssertionError:  # nothing fits
        low = max((bounds[key] for key in bounds if "inimum" in key), default=-EXACT)
        high = min((bounds[key] for key in bounds if "aximum" in key), default=EXACT)
        assert low >= high or high - low <= 1
        return
    value = json.loads(str(number))
    fit = jsonschema.Draft202012Validator(schema).is_valid(value)
    assert fit or not followed
    if fit and abs(value) < EXACT and (isinstance(value, int) or kind == "number"):
        near = any(abs(value - bound) < 1e-9 for bound in bounds.values())
        assert followed or near


def test_names_of_properties_are_no_keywords() -> None:
    schema = {"type": "object", "properties": {"format": {"type": "string"}, "const": {"maximum": 2**60}}}
    assert exact(schema)["properties"] == {"format": {"type": "string"}, "const": {"maximum": EXACT}}
    assert exact({"default": {"const": 2**60}}) == {"default": {"const": 2**60}}


@pytest.mark.parametrize("text", ["2024-02-29", "2000-02-29", "2023-12-31", "1999-04-30", "2023-02-28"])
def test_days_that_are_there_are_dates(text: str) -> None:
    datetime.date.fromisoformat(text)
    assert fits({"type": "string", "format": "date"}, f'"{text}"')
    assert fits({"type": "string", "format": "date-time"}, f'"{text}T23:59:60.25+01:00"')


@pytest.mark.parametrize(
    "text", ["2023-02-29", "1900-02-29", "2023-04-31", "2023-13-01", "2023-00-10", "2023-01-32"]
)
def test_days_that_are_not_there_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"day|month|date"):
        datetime.date.fromisoformat(text)
    assert not fits({"type": "string", "format": "date"}, f'"{text}"')
    assert not fits({"type": "string", "format": "date-time"}, f'"{text}T10:00:00Z"')


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("^a$", {"a"}),
        ("^(a|bc)$", {"a", "bc"}),
        ("^[a-c]_(x|y)$", {"a_x", "a_y", "b_x", "b_y", "c_x", "c_y"}),
        ("^ab?$", {"a", "ab"}),
        ("^a{1,2}$", {"a", "aa"}),
        ("^a", None),
        ("a$", None),
        ("a", None),
        ("^a*$", None),
        ("^[^a]$", None),
        ("^\\d$", None),
        ("^(?=a)a$", None),
        ("^[a-z]{3}$", None),
        ("(", None),
        ("^a$|^b$", None),
    ],
)
def test_the_names_that_a_pattern_matches(pattern: str, names: set[str] | None) -> None:
    assert names_of(pattern) == names


def test_no_comma_follows_where_no_further_name_can() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
        "patternProperties": {"^a$": {"maximum": 5}, "^[ab]$": True},
        "additionalProperties": False,
    }
    assert fits(schema, '{"a": 5, "b": "x"}') and fits(schema, '{"a": 5}')
    assert not fits(schema, '{"a": 6}'), "what the pattern asks for is followed"
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(exact({**schema, "required": ["a"]})))
    for begun in ('{"a": 5', '{"a": 5, "b": "x"'):
        matcher = llguidance.LLMatcher(BYTES, grammar, log_level=0)
        assert matcher.consume_tokens(list(begun.encode()))
        after = matcher.compute_bitmask()
        comma = bool(after[ord(",") // 8] & 1 << ord(",") % 8)
        assert comma == ("b" not in begun)
    open_ = {**schema, "patternProperties": {"^c": {"type": "integer"}}}
    assert exact(open_) == open_ and fits(open_, '{"a": 5, "c1": 2}')


STANDARD = """
$anchor $comment $defs $dynamicAnchor $dynamicRef $id $recursiveAnchor $recursiveRef $schema additionalItems
additionalProperties allOf anyOf const contains contentEncoding contentMediaType contentSchema default
definitions dependencies dependentRequired dependentSchemas deprecated description else enum examples
exclusiveMaximum exclusiveMinimum format if items maxContains maxItems maxLength maxProperties maximum
minContains minItems minLength minProperties minimum multipleOf not oneOf pattern patternProperties
prefixItems properties propertyNames readOnly required then title type unevaluatedItems
unevaluatedProperties uniqueItems writeOnly discriminator nullable example xml x-order
"""


def refusal(schema: Any, *, lenient: bool = False) -> str:
    """Why the library does not compile this; empty if it does."""
    text = json.dumps({**schema, "x-guidance": {"lenient": lenient}})
    try:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(text)
    except ValueError as error:
        return str(error)
    return str(llguidance.LLMatcher.validate_grammar(grammar, None))


def test_the_keywords_and_formats_that_the_library_cannot_follow_are_known() -> None:
    unknown = {key for key in STANDARD.split() if refusal({key: True}).startswith("Unimplemented keys")}
    assert unknown == UNFOLLOWED
    formats = {*FORMATS, "idn-email", "iri", "uri-reference", "regex", "json-pointer", "int32", "password"}
    known = {name for name in formats if not refusal({"type": "string", "format": name})}
    assert known == FORMATS
    assert exact({"type": "integer", "format": "int32"}) == {"type": "integer", "format": "int32"}


@pytest.mark.parametrize(
    "regular", ["a\\/b", "\\(?=", "[(?=]\\]", "(?:a)", "(?<n>a)", "[]\\-b]", "^\\d+$", "\\\\b"]
)
@pytest.mark.parametrize(
    "other", ["(?=a)", "b(?!a)", "(?<=a)b", "(?<!a)b", "(a)\\1", "\\bx", "a\\\\\\B", "[a"]
)
def test_a_pattern_that_no_automaton_follows_is_found(regular: str, other: str) -> None:
    for pattern in (regular, other, regular + other):
        schema = {"type": "string", "pattern": pattern}
        if other in pattern:
            assert refusal(schema)
            with pytest.raises(ValueError, match="`pattern` cannot be"):
                exact(schema)
            assert exact(schema, lenient=True) == {"type": "string"}
        else:
            assert not refusal(schema) and exact(schema) == schema


DAMAGE = {
    **dict.fromkeys(UNFOLLOWED, (True, {}, [{"type": "string"}])),
    "type": (None, 5, [], "float", ["string", "any"], [{}]),
    "enum": ([], None, {"a": 1}, [2**60]),
    "const": (2**60, [float("inf")]),
    "format": (7, None),
    "pattern": ("(?!a)", 5, None),
    "required": (True, None, [1]),
    "additionalProperties": (None, 5),
    "items": (None, 5, [5]),
    "prefixItems": (None, {}),
    "allOf": (None, {}, [5]),
    "anyOf": (None, {}, []),
    "oneOf": (None, {}, []),
    "minimum": (None, "5", True, 2**60),
    "exclusiveMaximum": (None, "5", -(2**60)),
    "multipleOf": (None, 0, -1, "5"),
    "minLength": (None, -1, 1.5, True),
    "maxItems": (None, -1, "5"),
    "minProperties": (None, -1, {}),
    "$ref": ("#/nowhere", "#/properties/ / ", "https://a.b/c", 5),
}


def schemas_in(schema: Any) -> list[Any]:
    """A schema and all inside it."""
    inside = [*schema.get("properties", {}).values(), *schema.get("anyOf", [])]
    inside += [schema["items"]] if "items" in schema else []
    return [schema, *(found for one in inside for found in schemas_in(one))]


@given(SCHEMAS, st.data())
def test_keywords_that_cannot_be_followed_are_refused_or_left_out_and_no_others(
    schema: Any, data: st.DataObject
) -> None:
    damaged = json.loads(json.dumps(schema))
    assert exact(damaged) == exact(damaged, lenient=True) == exact(schema)
    key = data.draw(st.sampled_from(sorted(DAMAGE)))
    nodes = [node for node in schemas_in(damaged) if key not in node]
    if not nodes:
        return
    chosen = data.draw(st.lists(st.sampled_from(range(len(nodes))), min_size=1, max_size=3, unique=True))
    for at in chosen:
        nodes[at][key] = data.draw(st.sampled_from(DAMAGE[key]))
    with pytest.raises(ValueError, match=re.escape(f"`{key}`")):
        exact(damaged)
    assert exact(damaged, lenient=True) == exact(schema)


def test_what_is_left_out_leaves_no_schema_narrower() -> None:
    """Names that a pattern allowed are allowed still."""
    schema = {"type": "object", "patternProperties": {"^(?!a)": {}}, "additionalProperties": False}
    assert exact(schema, lenient=True) == {"type": "object"}
    several = {"properties": {"a": {}, "b": {}}, "required": ["a"], "minProperties": 2}
    assert exact(several, lenient=True) == {"properties": {"a": {}, "b": {}}, "required": ["a"]}
    assert exact({**several, "required": ["b", "a"]})["minProperties"] == 2


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"a/b": {"type": "string"}}, "$ref": "#/$defs/a~1b"},
        {"$defs": {"a b": {"type": "string"}}, "$ref": "#/$defs/a%20b"},
        {"anyOf": [{"type": "string"}, {"$ref": "#/anyOf/0"}]},
        {"properties": {"a": {"$ref": "#"}}},
        {"$id": "https://a.b/c", "$defs": {"a": {}}, "$ref": "https://a.b/c#/$defs/a"},
        {"$defs": {"a": {"$anchor": "here"}}, "$ref": "#here"},
    ],
)
def test_references_within_a_schema_are_followed(schema: Any) -> None:
    assert not refusal(schema) and exact(schema) == schema


def test_a_dialect_that_the_library_does_not_know_is_left_out() -> None:
    for known in ("http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema"):
        assert not refusal({"$schema": known}) and exact({"$schema": known}) == {"$schema": known}
    for other in ("https://json-schema.org/draft-07/schema", "http://json-schema.org/schema#", "mine", None):
        assert exact({"type": "string", "$schema": other}) == {"type": "string"}
