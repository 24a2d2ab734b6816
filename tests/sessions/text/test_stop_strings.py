"""Streamed stop matching equals a search of the whole text, however it is cut."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.sessions.text.stop_strings import StopMatcher

few = st.text("ab", max_size=30)
stops = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def whole(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The reference: the match that ends first, and of those the one that begins first. The text before it, and
    the stop string."""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    end, begin = min(ends, default=(0, len(text)))
    return text[:begin], text[begin:end] if ends else None


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@settings(max_examples=400, deadline=None)
@given(few, stops, st.lists(st.integers(0, 100), max_size=8))
def test_any_split_equals_search_in_the_whole(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    told = "".join(matcher.feed(piece) for piece in pieces_of(text, cuts))
    assert (told + matcher.flush(), matcher.found) == whole(text, stops)
    assert matcher.matched == (matcher.found is not None)


@settings(max_examples=300, deadline=None)
@given(few, stops)
def test_only_what_could_begin_a_stop_is_held(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    told = matcher.feed(text)
    if not matcher.matched:
        held = text[len(told) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)
        assert matcher.flush() == held


def test_nothing_is_told_after_a_match() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.feed("go ST") == "go "
    assert matcher.feed("OP on") == ""
    assert matcher.matched
    assert matcher.feed("more") == ""
    assert matcher.flush() == ""


def test_a_false_beginning_is_told_when_it_fails() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.feed("a\n") == "a"
    assert matcher.feed("b") == "\nb"
