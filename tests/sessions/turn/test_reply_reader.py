"""One reply's ids become the same events and items however the rows cut them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.runtime.verbs import TokenLogprob
from holdfast.sessions.conversation.items import FunctionCall, Message
from holdfast.sessions.tools.formats import HERMES, Forms
from holdfast.sessions.tools.forms import CallForm, ReasoningForm
from holdfast.sessions.turn.events import (
    ReplyArgumentsDelta,
    ReplyCallDone,
    ReplyCallStarted,
    ReplyEvent,
    ReplyReasoningDelta,
    ReplyTextDelta,
)
from holdfast.sessions.turn.reply_reader import ReplyReader
from holdfast.sessions.turn.request import TurnRequest

from ..session_stage import END, LANGUAGE, NAME
from ..text.chat_languages import ids, ours

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "}🎉"}}\n</tool_call>'
parts = st.sampled_from(
    ["one ", "two", "STOP", "ST", "🎉", "\n", " ", CALL, "<tool_call>", "</tool_call>", "{}", "é"]
)


ONLY_CALLS = {"tool_choice": "required"}


def reader(
    stops: tuple[str, ...] = (),
    *,
    asked: dict[str, Any] | None = None,
    forms: Forms = HERMES,
    whole_calls: bool = False,
) -> ReplyReader:
    request = TurnRequest(stop=stops, **(asked or {}))
    language = replace(LANGUAGE, forms=forms)
    return ReplyReader(language, request, frozenset([END]), "response", whole_calls=whole_calls)


def told(reading: ReplyReader, rows: list[list[int]], *, cut: bool = False) -> list[ReplyEvent]:
    events = [event for row in rows for event in reading.feed(row)]
    return events + reading.finish(cut=cut)


def shape(reading: ReplyReader) -> list[tuple]:
    """The items without their random ids."""
    return [
        (item.text, item.complete)
        if isinstance(item, Message)
        else (item.name, item.arguments, item.complete)
        for item in reading.items()
    ]


def rows_of(tokens: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(cut % (len(tokens) + 1) for cut in cuts), len(tokens)]
    return [tokens[a:b] for a, b in pairwise(edges)]


@settings(max_examples=2 * settings().max_examples)
@given(st.lists(parts, max_size=8), st.lists(st.integers(0, 300), max_size=6), st.booleans(), st.booleans())
def test_rows_do_not_matter(said: list[str], cuts: list[int], stop: bool, cut: bool) -> None:
    tokens = [*ids(NAME, "".join(said)), END]
    stops = ("STOP", "two\n") if stop else ()
    one, split = reader(stops), reader(stops)
    told(one, [tokens], cut=cut)
    told(split, rows_of(tokens, cuts), cut=cut)
    assert shape(split) == shape(one)
    assert (split.ids, split.ended, split.matched) == (one.ids, one.ended, one.matched)


@settings(max_examples=2 * settings().max_examples)
@given(st.lists(parts, max_size=8), st.lists(st.integers(0, 300), max_size=6))
def test_events_tell_exactly_the_items(said: list[str], cuts: list[int]) -> None:
    """Each item begins once, its deltas add up to it, and none is told that does not come to be."""
    reading = reader()
    events = told(reading, rows_of([*ids(NAME, "".join(said)), END], cuts))
    for item in reading.items():
        mine = [event for event in events if event.item_id == item.id]
        if isinstance(item, FunctionCall):
            assert isinstance(mine[0], ReplyCallStarted) and isinstance(mine[-1], ReplyCallDone)
            assert (
                "".join(event.delta for event in mine if isinstance(event, ReplyArgumentsDelta))
                == item.arguments
            )
            assert mine[-1].arguments == item.arguments
        else:
            assert "".join(event.text for event in mine) == item.text != ""
    order = list(dict.fromkeys(event.item_id for event in events))
    assert order == [item.id for item in reading.items()]


@given(st.lists(parts, max_size=8), st.lists(st.integers(0, 300), max_size=6))
def test_whole_calls_are_told_without_their_pieces_and_all_else_as_ever(
    said: list[str], cuts: list[int]
) -> None:
    rows = rows_of([*ids(NAME, "".join(said)), END], cuts)
    whole, pieces = reader(whole_calls=True), reader()
    expected = [event for event in told(pieces, rows) if not isinstance(event, ReplyArgumentsDelta)]
    assert told(whole, rows) == expected and whole.items() == pieces.items()


@given(st.lists(parts, max_size=8), st.lists(st.integers(0, 300), max_size=6), st.booleans())
def test_without_parallel_calls_the_reply_ends_behind_its_first_call(
    said: list[str], cuts: list[int], whole: bool
) -> None:
    tokens = [*ids(NAME, "".join(said)), END]
    every = reader()
    told(every, [tokens])
    first = next((at for at, item in enumerate(every.items()) if isinstance(item, FunctionCall)), None)
    one = reader(asked={"parallel_calls": False}, whole_calls=whole)
    told(one, rows_of(tokens, cuts))
    assert one.called is (first is not None and shape(every)[first][-1])
    assert shape(one) == shape(every)[: None if first is None or not one.called else first + 1]
    again = reader()
    told(again, [one.ids])
    assert shape(again) == shape(one), "the ids are those of the items, and none more"
    assert tokens[: len(one.ids)] == one.ids and (one.called or one.ids == tokens)


def test_nothing_after_the_end_token_counts() -> None:
    reading = reader()
    told(reading, [[*ids(NAME, "one"), END, *ids(NAME, "two")]])
    assert shape(reading) == [("one", True)]
    assert reading.ids == [*ids(NAME, "one"), END]
    assert reading.ended


def test_ids_after_the_token_that_completes_a_stop_are_not_taken() -> None:
    tokens = ids(NAME, "one STOP two")
    reading = reader(("STOP",))
    told(reading, [tokens])
    assert reading.matched
    assert shape(reading) == [("one ", True)]
    assert reading.ids == tokens[: len(reading.ids)]
    assert len(reading.ids) < len(tokens)


def test_a_cut_reply_has_an_incomplete_last_item_only() -> None:
    reading = reader()
    events = told(reading, [ids(NAME, f"one {CALL} two")], cut=True)
    assert shape(reading) == [("one", True), ("f", '{"a": "}🎉"}', True), ("two", False)]
    assert isinstance(events[-1], ReplyTextDelta)


def test_a_call_cut_in_its_arguments_is_told_as_incomplete() -> None:
    reading = reader()
    events = told(reading, [ids(NAME, '<tool_call>{"name": "f", "arguments": {"a": 1')], cut=True)
    assert shape(reading) == [("f", '{"a": 1', False)]
    assert isinstance(events[-1], ReplyCallDone) and not events[-1].complete


def test_a_stop_id_ends_it_without_text_and_is_kept() -> None:
    said, stop = ids(NAME, "one "), ids(NAME, "two")[0]
    assert stop not in said
    reading = reader(asked={"stop_ids": (stop,)})
    told(reading, [said, [stop, *said, END]])
    assert [text.strip() for text, _ in shape(reading)] == ["one"]
    assert (reading.ids, reading.halted, reading.ended) == ([*said, stop], True, False)


def test_stop_strings_wait_for_the_least_number_of_tokens() -> None:
    tokens = [*ids(NAME, "STOP a STOP b"), END]
    first = len(ids(NAME, "STOP"))
    soon, late = reader(("STOP",)), reader(("STOP",), asked={"min_output_tokens": first + 1})
    told(soon, [tokens])
    told(late, [tokens])
    assert (shape(soon), len(soon.ids)) == ([], first)
    assert shape(late) == [("STOP a ", True)]


@given(st.lists(parts, max_size=8), st.lists(st.integers(0, 300), max_size=6))
def test_scores_come_with_the_text_of_their_tokens(said: list[str], cuts: list[int]) -> None:
    """In order, none twice; a message's are all of its tokens' and no call's."""
    tokens = ids(NAME, "".join(said))
    reading, events = reader(), []
    for row in rows_of(tokens, cuts):
        events += reading.feed(row, [TokenLogprob(-float(token), [(token, -1.0)]) for token in row])
    events += reading.finish(cut=False)
    deltas = [event for event in events if isinstance(event, ReplyTextDelta)]
    scored = [score for delta in deltas for score in delta.scores]
    left = iter(tokens)
    assert all(score.token in left for score in scored), "a subsequence of the tokens"
    assert all(score.logprob == -score.token == -score.top[0].token for score in scored)
    if not any(isinstance(event, ReplyCallStarted) for event in events) and CALL not in said:
        whole = "".join(delta.text for delta in deltas)
        assert ours(NAME).backend.decode([score.token for score in scored]).startswith(whole)


def test_reasoning_is_told_apart_and_stands_in_no_item() -> None:
    tokens = [*ids(NAME, f"<think>\nOne or two?\n</think>\n\nTwo. {CALL}"), END]
    whole = reader(forms=Forms(reasoning=ReasoningForm.THINK))
    events = told(whole, [[token] for token in tokens])
    assert "".join(event.text for event in events if isinstance(event, ReplyReasoningDelta)) == "One or two?"
    assert shape(whole) == [("Two.", True), ("f", '{"a": "}🎉"}', True)]
    assert whole.ids == tokens


def test_a_special_token_that_opens_a_call_is_seen_by_its_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    language = ours(NAME)
    mark = next(iter(language.special_ids.values()))
    monkeypatch.setattr(language, "special_ids", {"[TOOL_CALLS]": mark})
    reading = reader(forms=Forms(CallForm.MISTRAL))
    events = told(reading, [[mark, *ids(NAME, 'f[ARGS]{"a": 1}'), END]])
    assert shape(reading) == [("f", '{"a": 1}', True)]
    assert any(isinstance(event, ReplyCallStarted) for event in events)


@given(
    st.integers(1, 3),
    st.lists(st.integers(0, 300), max_size=6),
    st.integers(0, 90),
    st.sampled_from(CallForm),
)
def test_calls_are_the_same_when_what_comes_at_once_is_read_at_once(
    calls: int, cuts: list[int], short: int, form: CallForm
) -> None:
    tokens = ids(NAME, "\n".join([CALL] * calls))
    tokens = tokens[: max(1, len(tokens) - short)] if short else [*tokens, END]
    readers = [reader(asked=asked, whole_calls=True, forms=Forms(calls=form)) for asked in ({}, ONLY_CALLS)]
    one, other = (
        [event for row in rows_of(tokens, cuts) for event in reading.feed(row)]
        + reading.finish(cut=bool(short))
        for reading in readers
    )
    assert readers[0].items() == readers[1].items() and readers[0].ids == readers[1].ids
    if form is CallForm.HERMES:
        assert one == other, "and at the same points of the reply"
        assert calls == sum(isinstance(event, ReplyCallDone) for event in one) or short


def test_a_stop_string_is_looked_for_piece_by_piece() -> None:
    tokens = ids(NAME, CALL)
    one, whole = reader(("}",)), reader(("}",), asked=ONLY_CALLS, whole_calls=True)
    told(one, [[token] for token in tokens], cut=True)
    told(whole, [tokens], cut=True)
    assert whole.matched and whole.ids == one.ids


@given(st.lists(st.integers(0, 200), max_size=8), st.booleans())
def test_a_reply_cycles_at_the_same_token_however_its_rows_are_cut(cuts: list[int], together: bool) -> None:
    tokens = [*ids(NAME, "one two three four"), *ids(NAME, "five six") * 60]
    whole = reader(asked={"cycle_tokens": 40})
    for token in tokens:
        whole.feed([token])
    cut = reader(asked={"cycle_tokens": 40, **(ONLY_CALLS if together else {})}, whole_calls=together)
    told(cut, rows_of(tokens, cuts), cut=True)
    assert cut.cycles and cut.ids == whole.ids == tokens[: len(cut.ids)]
    assert len(cut.ids) == len(ids(NAME, "one two three four")) + len(ids(NAME, "five six")) + 40
    again = reader(asked={"cycle_tokens": 40})
    again.feed(whole.ids)
    assert again.cycles and again.ids == whole.ids, "a reply that is told again ends there, too"
    assert shape(cut) == [("".join(item.text for item in cut.items()), False)]
