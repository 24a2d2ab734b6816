"""The scanner accepts what Python's json reads as an object, and nothing else."""

from __future__ import annotations

import json
import string

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.sessions.tools.scanner import ObjectScanner, is_object

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.text(max_size=6), values, max_size=4)


def refuse(constant: str) -> None:
    raise ValueError(constant)


def reads(text: str) -> bool:
    try:
        return isinstance(json.loads(text, parse_constant=refuse), dict)
    except ValueError:
        return False


@settings(max_examples=200, deadline=None)
@given(objects, st.booleans(), st.sampled_from([None, 1, 4]))
def test_objects_are_accepted(value: dict, ascii_only: bool, indent: int | None) -> None:
    assert is_object(json.dumps(value, ensure_ascii=ascii_only, indent=indent))


@settings(max_examples=200, deadline=None)
@given(objects, st.integers(0, 200), st.sampled_from(string.printable + "é\x00"), st.sampled_from("dirt"))
@example({}, 0, "[", "i")
def test_damaged_objects_are_judged_as_json_judges_them(value: dict, at: int, new: str, how: str) -> None:
    text = json.dumps(value)
    at %= len(text)
    damaged = {
        "d": text[:at] + text[at + 1 :],
        "i": text[:at] + new + text[at:],
        "r": text[:at] + new + text[at + 1 :],
        "t": text[:at],
    }[how]
    assert is_object(damaged) == reads(damaged)


@settings(max_examples=200, deadline=None)
@given(st.text('{}[]:,"\\0123456789.eE+-truefalsn ua', max_size=14))
def test_random_text_is_judged_as_json_judges_it(text: str) -> None:
    assert is_object(text) == reads(text)


@settings(max_examples=200, deadline=None)
@given(objects, st.text(max_size=5))
def test_the_end_of_the_object_is_found(value: dict, after: str) -> None:
    text = json.dumps(value)
    scanner = ObjectScanner()
    assert scanner.feed(text + after) == len(text)
    assert scanner.done


@pytest.mark.parametrize("text", ["[1]", '"a"', "1", "", "}", ",", "{}}", "{} {}"])
def test_what_is_no_single_object(text: str) -> None:
    assert not is_object(text)
