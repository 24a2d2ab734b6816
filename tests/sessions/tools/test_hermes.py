"""The call parser: what comes in pieces equals what comes at once, and what is a call is read as one."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.sessions.conversation.items import Tool
from holdfast.sessions.tools.formats import Forms
from holdfast.sessions.tools.scanner import CallArguments, CallClosed, CallOpened, Piece, PlainText

from .call_pieces import read_all, split

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
        '{"arguments": {"b": 1}, "name": "g"}',
        '{"name": "h"}',
        "[",
        "]",
        ",",
        "\u00a0",
    ]
)


def written(name: str, given: dict, space: str, *, ascii_only: bool) -> str:
    call = json.dumps({"name": name, "arguments": given}, ensure_ascii=ascii_only)
    return f"<tool_call>{space}{call}{space}</tool_call>"


def ordinary(name: str, given: dict) -> str:
    return json.dumps({"name": name, "arguments": given})


def arguments_first(name: str, given: dict) -> str:
    return json.dumps({"arguments": given, "name": name})


def with_more(name: str, given: dict) -> str:
    return json.dumps({"name": name, "arguments": given, "meta": {"name": "no", "arguments": {"call": 1}}})


def parse(pieces: list[str], *, cut: bool = False) -> list[Piece]:
    return read_all(Forms().call_parser(), pieces, cut=cut)


@settings(max_examples=5 * settings().max_examples)
@given(
    st.lists(fragments, max_size=12).map("".join), st.lists(st.integers(0, 500), max_size=12), st.booleans()
)
@example('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>x', [30, 40, 50], False)
def test_any_split_of_any_text_equals_one_shot(text: str, cuts: list[int], cut: bool) -> None:
    assert parse(split(text, cuts), cut=cut) == parse([text], cut=cut)
    assert parse(list(text), cut=cut) == parse([text], cut=cut)


@settings(max_examples=settings().max_examples * 3 // 2)
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
        expected += [PlainText(words)] * bool(words)
        expected += [
            CallOpened(name),
            CallArguments(json.dumps(value, ensure_ascii=ascii_only)),
            CallClosed(True),
        ]
    expected += [PlainText(last.lstrip())] * bool(last.lstrip())
    assert parse(split(text, cuts)) == expected


@settings(max_examples=3 * settings().max_examples)
@given(
    st.lists(
        st.tuples(names, arguments, st.sampled_from([ordinary, arguments_first, with_more])),
        min_size=2,
        max_size=4,
    ),
    st.booleans(),
    spaces,
    plain,
    st.lists(st.integers(0, 500), max_size=12),
)
def test_several_calls_in_one_tag_are_read(
    calls: list, listed: bool, space: str, last: str, cuts: list[int]
) -> None:
    objects = [write(name, value) for name, value, write in calls]
    body = f"[{space}{f',{space}'.join(objects)}{space}]" if listed else f"{space}\n".join(objects)
    expected: list[Piece] = []
    for name, value, _ in calls:
        expected += [CallOpened(name), CallArguments(json.dumps(value)), CallClosed(True)]
    expected += [PlainText(last.lstrip())] * bool(last.lstrip())
    text = f"<tool_call>{space}{body}{space}</tool_call>{last}"
    assert parse(split(text, cuts)) == expected
    assert parse(list(text)) == parse([text]) == expected


@settings(max_examples=3 * settings().max_examples)
@given(
    st.text(max_size=40).filter(lambda text: "<tool_call>" not in text),
    st.lists(st.integers(0, 50), max_size=6),
)
def test_text_without_calls_is_delivered_whole(text: str, cuts: list[int]) -> None:
    assert parse(split(text, cuts)) == [PlainText(text)] * bool(text)


def test_arguments_come_as_they_are_written() -> None:
    parser = Forms().call_parser()
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
    ("opening", "between"), [("", "\n"), ("[", ", "), ("\n[\n", ",\n"), ("", ""), ("", " \n\n")]
)
def test_each_call_of_a_tag_is_told_the_moment_its_arguments_close(opening: str, between: str) -> None:
    parser = Forms().call_parser()
    pieces = [f'<tool_call>{opening}{{"name": "f", "arguments": {{"a": 1', "}", f'}}{between}{{"name": "g"']
    told = [list(parser.feed(piece)) for piece in [*pieces, ', "arguments": {}', "}"]]
    assert told == [
        [CallOpened("f"), CallArguments('{"a": 1')],
        [CallArguments("}"), CallClosed(True)],
        [],
        [CallOpened("g"), CallArguments("{}"), CallClosed(True)],
        [],
    ]
    assert list(parser.feed('{"name": "h"')) == [] == list(parser.feed(', "id": 7'))
    assert list(parser.feed("}")) == [CallOpened("h"), CallArguments("{}"), CallClosed(True)]


@pytest.mark.parametrize(
    "rest",
    [
        '}\n{"city": "Rome"}',
        '}\n{"name": "", "arguments": {}}',
        '}\n{"name": "g", "argum',
        '} so {"name": "g", "arguments": {}}',
        '}]{"name": "g", "arguments": {}}',
        ', {"name": "g", "arguments": {}}',
        ', "then": [{"name": "g", "arguments": {}}]}',
    ],
)
def test_what_is_no_call_behind_one_is_left_out(rest: str) -> None:
    text = (
        f'<tool_call>{{"name": "f", "arguments": {{}}{rest}</tool_call>\nDone. <tool_call>{ordinary("h", {})}'
    )
    expected: list[Piece] = [CallOpened("f"), CallArguments("{}"), CallClosed(True), PlainText("Done.")]
    expected += [CallOpened("h"), CallArguments("{}"), CallClosed(True)]
    assert parse([text]) == parse(list(text)) == expected


@pytest.mark.parametrize("between", ['{"city": "Rome"}', '{"arguments": {}, "name": "h"}'])
def test_a_call_behind_another_object_is_read(between: str) -> None:
    text = f"<tool_call>{ordinary('f', {})}\n{between}\n{ordinary('g', {'a': 1})}</tool_call>"
    calls = [piece.name for piece in parse([text]) if isinstance(piece, CallOpened)]
    assert calls == (["f", "h", "g"] if "name" in between else ["f", "g"])
    assert parse(list(text)) == parse([text])


def test_a_call_that_breaks_takes_those_behind_it_in_its_tag() -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {{nil}}}}\n{ordinary("g", {})}</tool_call>'
    expected = [CallOpened("f"), CallArguments("{"), CallClosed(False)]
    assert parse([text]) == parse(list(text)) == expected


@pytest.mark.parametrize(
    "body",
    [
        "not json",
        "{}",
        '{"name": 1, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "text"}',
        "[1, 2]",
        "[]",
        '[{"name": "f"}, 3]',
        '[[{"name": "f"}]]',
        '{"name": "f"} and so on',
        '{"city": "Rome"}\n{"name": "f", "arguments": {}}',
        '{"name": "' + "n" * 129 + '", "arguments": {}}',
        "[" * 5000,
    ],
)
def test_what_is_no_call_is_delivered_as_text(body: str) -> None:
    text = f"see \n<tool_call>{body}</tool_call> there"
    assert parse([text]) == [PlainText(text)]
    assert parse(list(text)) == [PlainText(text)]


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
    "given", ['{"a": 1</tool_call>', '{"a": nil}}</tool_call>', '{"a": 1,,}}</tool_call>', "{a}"]
)
def test_a_call_that_breaks_ends_not_complete(given: str) -> None:
    events = parse(['<tool_call>{"name": "f", "arguments": ' + given + " after"])
    assert events[0] == CallOpened("f")
    assert CallClosed(False) in events
    assert CallClosed(True) not in events


def test_a_cut_reply_leaves_out_a_call_that_has_only_begun() -> None:
    assert parse(['Hm. \n<tool_call>\n{"na'], cut=True) == [PlainText("Hm.")]
    assert parse(['Hm. \n<tool_call>\n{"na']) == [PlainText('Hm. \n<tool_call>\n{"na')]
    assert parse(['<tool_call>{"name": "f", "arguments": {"a'], cut=True)[-1] == CallClosed(False)


LISTING = "def f():\n\treturn 1\n"


@pytest.mark.parametrize(
    ("written", "given"),
    [
        ('{"name": "f", "arguments": {"code": "' + LISTING + '"}}', {"code": LISTING}),
        ('{"name": "f", "arguments": {"a": [1, 2,], "b": {"c": 1,},}}', {"a": [1, 2], "b": {"c": 1}}),
        ('{"name": "f", "arguments": null}', {}),
        ('{"arguments": null, "name": "f"}', {}),
        ('{"function": {"name": "f", "arguments": {"a": 1}}}', {"a": 1}),
        ('{"type": "function", "function": {"name": "f", "arguments": "{\\"a\\": 1,}"}}', {"a": 1}),
        ('```json\n{"name": "f", "arguments": {"a": "\n"}}\n```', {"a": "\n"}),
    ],
)
@pytest.mark.parametrize("by_letter", [False, True])
def test_calls_with_a_mistake_that_shows_what_is_meant_are_read(
    written: str, given: dict, by_letter: bool
) -> None:
    text = f"Well. <tool_call>\n{written}\n</tool_call>"
    said, opened, arguments, closed = read_all(Forms().call_parser(), list(text) if by_letter else [text])
    assert (said, opened, closed) == (PlainText("Well."), CallOpened("f"), CallClosed(complete=True))
    assert isinstance(arguments, CallArguments) and json.loads(arguments.delta) == given


BARE = '{"name": "f", "arguments": {"a": [1, {"b": "}"}]}}'


@pytest.mark.parametrize("reply", [BARE, f"\n{BARE}\n", f"```json\n{BARE}\n```", f"```\n{BARE}```\n"])
@pytest.mark.parametrize("by_letter", [False, True])
def test_a_reply_that_is_nothing_but_a_call_of_an_offered_tool_is_that_call(
    reply: str, by_letter: bool
) -> None:
    pieces = list(reply) if by_letter else [reply]
    found = read_all(Forms().call_parser([Tool(name="f")]), pieces)
    assert found == [CallOpened("f"), CallArguments('{"a": [1, {"b": "}"}]}'), CallClosed(complete=True)]
    for parser in (Forms().call_parser(), Forms().call_parser([Tool(name="g")])):
        assert read_all(parser, pieces) == [PlainText(reply)]
    assert read_all(Forms().call_parser([Tool(name="f")]), pieces, cut=True) == [PlainText(reply)]


@pytest.mark.parametrize(
    "reply",
    [
        f"{BARE} That is it.",
        f"{BARE}{BARE}",
        f"Like so: {BARE}",
        '{"name": "f"',
        '{"a": 1}',
        "```\ncode```",
        BARE[:-1],
    ],
)
def test_other_replies_that_begin_so_are_text(reply: str) -> None:
    for pieces in ([reply], list(reply)):
        assert read_all(Forms().call_parser([Tool(name="f")]), pieces) == [PlainText(reply)]
    tagged = f"{BARE} <tool_call>{BARE}</tool_call>"
    found = read_all(Forms().call_parser([Tool(name="f")]), list(tagged))
    assert found[:2] == [PlainText(BARE), CallOpened("f")]
