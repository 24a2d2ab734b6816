"""Deltas add up to decoding at once, whole characters at a time, for any ids at all."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream

from holdfast.sessions.text.detokenizer import Detokenizer

from .chat_languages import FAMILIES, backend, ids

VOCABULARY = backend("chatml").get_vocab_size()


def streamed(tokens: list[int]) -> tuple[list[str], str]:
    detokenizer = Detokenizer(backend("chatml"))
    return [detokenizer.step(token) for token in tokens], detokenizer.flush()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=40))
def test_deltas_of_any_ids_equal_decoding_at_once(tokens: list[int]) -> None:
    deltas, rest = streamed(tokens)
    assert "".join(deltas) + rest == backend("chatml").decode(tokens, skip_special_tokens=True)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.lists(st.lists(st.integers(0, VOCABULARY - 1), max_size=20), max_size=5),
)
def test_so_do_those_of_several_at_once_each_as_the_library_has_it(name: str, runs: list[list[int]]) -> None:
    known = backend(name)
    runs = [[token % known.get_vocab_size() for token in run] for run in runs]
    detokenizer, stream = Detokenizer(known), DecodeStream(skip_special_tokens=True)
    said = [detokenizer.steps(run) for run in runs]
    assert said == [(stream.step(known, run) or "") if run else "" for run in runs]
    whole = known.decode([token for run in runs for token in run], skip_special_tokens=True)
    assert "".join(said) + detokenizer.flush() == whole
    assert detokenizer.flush() == ""


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=30))
def test_no_delta_of_good_text_has_a_replacement_character(text: str) -> None:
    deltas, rest = streamed(ids("llama3", text))  # no normalizer: the text comes back as it was
    assert "\ufffd" not in "".join(deltas) + rest


def test_a_character_in_pieces_waits_for_its_last_byte() -> None:
    tokens = ids("chatml", "🦀")
    assert len(tokens) > 1
    deltas, rest = streamed(tokens)
    assert deltas == [""] * (len(tokens) - 1) + ["🦀"]
    assert rest == ""


def test_bytes_that_never_become_a_character_are_told_at_the_end() -> None:
    tokens = ids("chatml", "ok 🦀")[:-1]
    deltas, rest = streamed(tokens)
    assert "\ufffd" not in "".join(deltas)
    assert "\ufffd" in rest


def test_special_tokens_give_no_text() -> None:
    special = backend("chatml").token_to_id("<|im_start|>")
    mark = backend("chatml").token_to_id("<tool_call>")
    deltas, rest = streamed([special, *ids("chatml", "Hello"), mark, special])
    assert "".join(deltas) + rest == "Hello<tool_call>"


@pytest.mark.parametrize("text", ["\ufffd", "a\ufffdb", "\ufffd\ufffd"])
def test_a_replacement_character_that_was_written_is_delivered(text: str) -> None:
    deltas, rest = streamed(ids("chatml", text))
    assert "".join(deltas) + rest == text
