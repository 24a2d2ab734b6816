"""The scanner accepts what Python's json reads as an object, or would without two mistakes, and no more."""

from __future__ import annotations

import json
import re
import string
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.sessions.tools.objects import ObjectScanner, object_in

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.text(max_size=6), values, max_size=4)


def refuse(constant: str) -> None:
    raise ValueError(constant)


MENDED = re.compile(r'("(?:[^"\\]|\\.)*")|(?<=["\]}\w])([ \t\r\n]*),(?=[ \t\r\n]*[\]}])', re.DOTALL)
"""A string, or a comma before a closing bracket."""


def read(text: str) -> object:
    """The object in the text; None if it is none. It may have control characters in strings, and commas before
    closing brackets."""
    with suppress(ValueError):
        mended = MENDED.sub(lambda found: found[1] or found[2] or "", text)
        value = json.loads(mended, parse_constant=refuse, strict=False)
        return value if isinstance(value, dict) else None
    return None


def check(text: str) -> None:
    found = object_in(text)
    assert (None if found is None else json.loads(found)) == read(text)


@settings(max_examples=2 * settings().max_examples)
@given(objects, st.booleans(), st.sampled_from([None, 1, 4]))
def test_objects_are_accepted(value: dict, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert object_in(text) == text


@settings(max_examples=2 * settings().max_examples)
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
    check(damaged)


@settings(max_examples=2 * settings().max_examples)
@given(st.text('{}[]:,"\\0123456789.eE+-truefalsn ua\n', max_size=14))
def test_random_text_is_judged_as_json_judges_it(text: str) -> None:
    check(text)


@settings(max_examples=2 * settings().max_examples)
@given(objects, st.text(max_size=5))
def test_the_end_of_the_object_is_found(value: dict, after: str) -> None:
    text = json.dumps(value)
    scanner = ObjectScanner()
    assert scanner.feed(text + after) == len(text)
    assert scanner.done


@pytest.mark.parametrize("text", ["[1]", '"a"', "1", "", "}", ",", "{}}", "{} {}"])
def test_what_is_no_single_object(text: str) -> None:
    assert object_in(text) is None


@settings(max_examples=3 * settings().max_examples)
@given(objects, st.lists(st.integers(0, 200), max_size=4), st.data())
def test_it_is_mended_the_same_however_it_is_cut(value: dict, cuts: list[int], data: st.DataObject) -> None:
    """Line breaks and tabs as they are, and commas before closing brackets."""
    text = json.dumps(value).replace("\\n", "\n").replace("\\t", "\t")
    for bracket in "]}":
        at = data.draw(st.integers(0, len(text)))
        text = text[:at] + re.sub(rf'(?<=["\w]){re.escape(bracket)}', f", {bracket}", text[at:])
    scanner, written, offsets = (
        ObjectScanner(),
        "",
        sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)}),
    )
    for begin, end in pairwise(offsets):
        read_now = scanner.feed(text[begin:end])
        written += scanner.written
        if read_now < end - begin:
            break
    assert (json.loads(written) if scanner.done else None) == read(text)
