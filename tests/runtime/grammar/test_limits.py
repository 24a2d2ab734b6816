"""What makes a grammar large is counted before it is compiled."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.benchmarks.schemas import REAL, REFUSED
from holdfast.runtime.errors import GrammarInvalid
from holdfast.runtime.grammar.limits import MAX_POSITIONS, check, positions
from holdfast.runtime.verbs import Grammar, GrammarKind


@pytest.mark.parametrize(
    ("regex", "count"),
    [
        ("", 0),
        ("abc", 3),
        ("a{3}b", 4),
        ("a{2,5}", 5),
        ("a{2,}", 2),
        ("(ab){3}", 6),
        ("((a{9}){9}b){9}", 738),
        ("[a-z]{4}", 4),
        (r"[\]{9}]{4}", 4),
        (r"\(a{3}\)", 5),
        ("a?b*|c+", 3),
        ("a{0}", 1),
        ("(a?){5000}a{5000}", 10_000),
        ("a{99999999999999999999}", 999_999_999),
        ("(a", 1),
        ("a)", 2),
        ("{3}", 0),
    ],
)
def test_positions_of_a_regular_expression(regex: str, count: int) -> None:
    assert positions(regex) == count


@pytest.mark.parametrize("name", [name for name in REFUSED if not name.startswith("no ")])
def test_bombs_are_refused_by_their_text(name: str) -> None:
    with pytest.raises(GrammarInvalid):
        check(REFUSED[name])


@pytest.mark.parametrize("schema", REAL.values(), ids=REAL)
def test_schemas_as_people_have_them_are_within_bounds(schema: dict[str, Any]) -> None:
    check(Grammar(GrammarKind.JSON, json.dumps(schema)))


def test_what_is_at_its_bound_is_taken() -> None:
    check(Grammar(GrammarKind.REGEX, f"a{{{MAX_POSITIONS}}}"))
    with pytest.raises(GrammarInvalid, match="positions"):
        check(Grammar(GrammarKind.REGEX, f"a{{{MAX_POSITIONS}}}b"))
    with pytest.raises(GrammarInvalid, match="no JSON"):
        check(Grammar(GrammarKind.JSON, "{"))
