"""The call parser: what comes in pieces equals what comes at once, and what is a call is read as one."""

from __future__ import annotations

import json

import pytest
from call_pieces import read_all, split
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.sessions.toolcalls import CallArguments, CallClosed, CallOpened, CallParser, Piece, Text

arguments = st.dictionaries(
    st.text(max_size=5),
    st.text(max_size=8)
    | st.integers()
    | st.lists(st.dictionaries(st.text(max_size=2), st.none(), max_size=2), max_size=2),
    max_size=3,
)
names = st.text(min_size=1, max_size=10)
spaces = st.sampled_from(["", " ", "\n", "\n\n", "\t "])
plain = st.text(max_size=12).filter(lambda text: "<" not in text)
fragments = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<tool",
        "_call>",
        '{"name": "f", "arguments": ',
        '{"a": "}"}',
        "{}",
        "}",
        "{",
        '"',
        "\\",
        '{"name": "',
        "[1, 2]",
        '"arguments": {}',
        " ",
        "\n",
        "x",
        "é",
        '"</tool_call>"',
        '{"a": "</tool_call>"}',
    ]
)


def written(name: str, given: dict, space: str, *, ascii_only: bool) -> str:
    call = json.dumps({"name": name, "arguments": given}, ensure_ascii=ascii_only)
    return f"<tool_call>{space}{call}{space}</tool_call>"


def parse(pieces: list[str], *, cut: bool = False) -> list[Piece]:
    return read_all(CallParser(), pieces, cut=cut)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(fragments, max_size=12).map("".join), st.lists(st.integers(0, 500), max_size=12), st.booleans()
)
@example('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>x', [30, 40, 50], False)
def test_any_split_of_any_text_equals_one_shot(text: str, cuts: list[int], cut: bool) -> None:
    assert parse(split(text, cuts), cut=cut) == parse([text], cut=cut)
    assert parse(list(text), cut=cut) == parse([text], cut=cut)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(plain, names, arguments, spaces, st.booleans()), min_size=1, max_size=3),
    plain,
    st.lists(st.integers(0, 500), max_size=12),
)
def test_calls_among_text_are_read(calls: list, last: str, cuts: list[int]) -> None:
    text = (
        "".join(before + written(name, value, space, ascii_only=a) for before, name, value, space, a in calls)
        + last
    )
    expected: list[Piece] = []
    for number, (before, name, value, _, ascii_only) in enumerate(calls):
        words = (before.lstrip() if number else before).rstrip()
        expected += [Text(words)] * bool(words)
        expected += [
            CallOpened(name),
            CallArguments(json.dumps(value, ensure_ascii=ascii_only)),
            CallClosed(True),
        ]
    expected += [Text(last.lstrip())] * bool(last.lstrip())
    assert parse(split(text, cuts)) == expected


@settings(max_examples=300, deadline=None)
@given(
    st.text(max_size=40).filter(lambda text: "<tool_call>" not in text),
    st.lists(st.integers(0, 50), max_size=6),
)
def test_text_without_calls_is_delivered_whole(text: str, cuts: list[int]) -> None:
    assert parse(split(text, cuts)) == [Text(text)] * bool(text)


def test_arguments_come_as_they_are_written() -> None:
    parser = CallParser()
    told = [
        list(parser.feed(piece))
        for piece in ['<tool_call>{"name": "f", "arg', 'uments": {"a":', ' "b', '"}}']
    ]
    assert told == [
        [],
        [CallOpened("f"), CallArguments('{"a":')],
        [CallArguments(' "b')],
        [CallArguments('"}'), CallClosed(True)],
    ]


@pytest.mark.parametrize(
    "body",
    [
        "not json",
        "{}",
        '{"name": 1, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "text"}',
        '{"name": "' + "n" * 65 + '", "arguments": {}}',
        "[" * 5000,
    ],
)
def test_what_is_no_call_is_delivered_as_text(body: str) -> None:
    text = f"see \n<tool_call>{body}</tool_call> there"
    assert parse([text]) == [Text(text)]
    assert parse(list(text)) == [Text(text)]


@pytest.mark.parametrize(
    ("body", "given"),
    [
        ('{"arguments": {"a": 1}, "name": "f"}', '{"a": 1}'),
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "f", "id": 7, "arguments": {"a": 1}}', '{"a": 1}'),
    ],
)
def test_other_ways_to_write_a_call(body: str, given: str) -> None:
    text = f"<tool_call>\n{body}\n</tool_call>"
    assert parse([text]) == [CallOpened("f"), CallArguments(given), CallClosed(True)]


@pytest.mark.parametrize("rest", ["", "}</tool_call>", "}}</tool_call>", "} and so on", "}\n<tool_call>"])
def test_a_whole_object_is_a_whole_call_whatever_follows(rest: str) -> None:
    events = parse(['<tool_call>{"name": "f", "arguments": {"a": 1}' + rest])
    assert events[:3] == [CallOpened("f"), CallArguments('{"a": 1}'), CallClosed(True)]


@pytest.mark.parametrize(
    "given", ['{"a": 1</tool_call>', '{"a": nil}}</tool_call>', '{"a": "raw\nline"}}</tool_call>', "{a}"]
)
def test_a_call_that_breaks_ends_not_complete(given: str) -> None:
    events = parse(['<tool_call>{"name": "f", "arguments": ' + given + " after"])
    assert events[0] == CallOpened("f")
    assert CallClosed(False) in events
    assert CallClosed(True) not in events


def test_a_cut_reply_leaves_out_a_call_that_has_only_begun() -> None:
    assert parse(['Hm. \n<tool_call>\n{"na'], cut=True) == [Text("Hm.")]
    assert parse(['Hm. \n<tool_call>\n{"na']) == [Text('Hm. \n<tool_call>\n{"na')]
    assert parse(['<tool_call>{"name": "f", "arguments": {"a'], cut=True)[-1] == CallClosed(False)
