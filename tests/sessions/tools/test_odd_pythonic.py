"""Calls as Python that models write though Python would not: names that are its own words, long strings."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.sessions.tools.python_calls import PythonCallParser
from holdfast.sessions.tools.scanner import CallArguments, CallClosed, CallOpened, Piece, TextPiece

from .call_pieces import read_all, split


def parse(pieces: list[str]) -> list[Piece]:
    return read_all(PythonCallParser(), pieces, cut=False)


WRITTEN = [
    ('[convert(from="USD", to="EUR")]', {"from": "USD", "to": "EUR"}),
    ("[f(class=1, if = 2, x=[3])]", {"class": 1, "if": 2, "x": [3]}),
    (
        '[f(from="import=1, class=2", in={"is": "not=3"})]',
        {"from": "import=1, class=2", "in": {"is": "not=3"}},
    ),
    ("[f(global=None, a=(1, 2))]", {"global": None, "a": [1, 2]}),
    ('[f(code="""it\'s "x")\nprint("]")""", n=1)]', {"code": 'it\'s "x")\nprint("]")', "n": 1}),
    ("[f(code='''a\"b)''')]", {"code": 'a"b)'}),
    ("[f(code=\"\", b='')]", {"code": "", "b": ""}),
    ('[f(code="""")", """)]', {"code": '")", '}),
    ("[f(a='\\'', b=\"\\\\\")]", {"a": "'", "b": "\\"}),
]


@pytest.mark.parametrize(("text", "arguments"), WRITTEN)
def test_a_call_is_read_as_it_was_meant(text: str, arguments: dict[str, Any]) -> None:
    for pieces in ([text], list(text)):
        opened, told, closed = parse(pieces)
        assert isinstance(opened, CallOpened) and closed == CallClosed(True)
        assert isinstance(told, CallArguments) and json.loads(told.delta) == arguments


@given(
    st.lists(
        st.sampled_from(
            [
                '"""',
                "'''",
                '"',
                "'",
                "\\",
                "from=",
                "class",
                "=",
                "==",
                "(",
                ")",
                "[",
                "]",
                ",",
                " ",
                "f(",
                "a=",
                "1",
            ]
        ),
        max_size=14,
    ).map("".join),
    st.lists(st.integers(0, 60), max_size=8),
)
def test_any_split_equals_one_shot(inner: str, cuts: list[int]) -> None:
    text = f"[f({inner}"
    assert parse(split(text, cuts)) == parse([text]) == parse(list(text))


def test_what_is_no_call_stays_text() -> None:
    for text in ('[f("""x""")]', "[f(from)]", "[f(1=from)]"):
        assert parse(list(text)) == [TextPiece(text)]
