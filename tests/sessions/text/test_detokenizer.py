"""Deltas add up to decoding at once, whole characters at a time, for any ids at all."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from holdfast.sessions.text.detokenizer import Detokenizer, TokenTexts

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


REPLACE = decoders.Replace("\u2581", " ")
PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES += [
    *"abcxyz0189.,",
    "\u2581",
    "\u2581a",
    "\u2581the",
    "the",
    "ing",
    "\u2581\u2581",
    "é",
    "🦀",
    "\ufffd",
    "\n",
]
WORDS = ["[UNK]", *"abcxyz.,", "the", "##a", "##ing", "'", "s", "é"]


def pieces(decoder: object, words: Sequence[str] = PIECES) -> Tokenizer:
    """A vocabulary of these tokens, with a control token and an added one that is text."""
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token=words[0]))
    made.decoder = decoder
    made.add_special_tokens([AddedToken("</s>", special=True)])
    made.add_tokens([AddedToken("<tool>", special=False)])
    return made


VOCABULARIES = {
    **{name: backend(name) for name in sorted(FAMILIES)},
    "Llama 2": pieces(
        decoders.Sequence([REPLACE, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    ),
    "Gemma": pieces(decoders.Sequence([REPLACE, decoders.ByteFallback(), decoders.Fuse()])),
    "Metaspace": pieces(decoders.Metaspace()),
    "WordPiece": pieces(decoders.WordPiece(), WORDS),
    "BPE with suffixes": pieces(decoders.BPEDecoder("</w>"), [*WORDS, "a</w>", "the</w>"]),
}
BYTES = ("Llama 2", "Gemma")


def read(data: bytes) -> str:
    """Its characters, and U+FFFD for each byte that is in none."""
    text, at = "", 0
    while at < len(data):
        for size in range(1, 5):
            with suppress(UnicodeDecodeError):
                text += data[at : at + size].decode()
                break
        else:
            text, size = text + "\ufffd", 1
        at += size
    return text


def whole(name: str, tokens: list[int]) -> str:
    """What the library makes of all tokens, but for its runs of bytes: of those the characters count."""
    known = VOCABULARIES[name]
    if name not in BYTES:
        return str(known.decode(tokens, skip_special_tokens=True))
    tokens = [token for token in tokens if known.id_to_token(token) != "</s>"]
    text = ""
    for bytes_, found in groupby(tokens, lambda token: token < 256):
        run = list(found)  # a letter stands before it, so that no space is dropped inside
        text += read(bytes(run)) if bytes_ else known.decode([256, *run])[1:]
    return text.removeprefix(" ") if name == "Llama 2" else text


@settings(max_examples=600, deadline=None)
@given(
    st.sampled_from(sorted(VOCABULARIES)),
    st.lists(st.lists(st.integers(0, VOCABULARY - 1), max_size=20), max_size=5),
)
def test_so_do_those_of_several_at_once_in_any_vocabulary(name: str, runs: list[list[int]]) -> None:
    known = VOCABULARIES[name]
    detokenizer, texts, told, said = Detokenizer(known), TokenTexts(known), "", list[int]()
    for run in runs:
        tokens = [token % known.get_vocab_size() for token in run]
        alone = detokenizer.alone(tokens[0]) if len(tokens) == 1 else None
        delta = detokenizer.steps(tokens)
        assert alone is None or alone == delta
        told, said = told + delta, said + tokens
        if texts.independent:
            sure = whole(name, said).rstrip("\ufffd")
            assert told.startswith(sure), "a whole character is told with its last byte"
    assert told + detokenizer.flush() == whole(name, said)
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("name", BYTES)
def test_bytes_between_pieces_of_text_break_nothing(name: str) -> None:
    """Of a run with a bad byte the library recalls the good ones; its own stream raises then."""
    known = VOCABULARIES[name]
    a, the = known.token_to_id("a"), known.token_to_id("\u2581the")
    crab = list("🦀".encode())
    for tokens, deltas in (
        ([a, 10, *crab[:2], the], ["a", "\n", "", "", "\ufffd\ufffd the"]),
        ([a, *crab, 0xFF, the], ["a", "", "", "", "🦀", "\ufffd", " the"]),
    ):
        detokenizer = Detokenizer(known)
        assert [detokenizer.step(token) for token in tokens] == deltas
        assert detokenizer.flush() == ""


@pytest.mark.parametrize("name", ["Llama 2", "Metaspace", "Gemma", "chatml"])
def test_a_reply_that_goes_on_in_a_text_keeps_its_first_space(name: str) -> None:
    known = VOCABULARIES[name]
    space = known.token_to_id("\u2581the")
    tokens = ids("chatml", " the") if space is None else [space]
    assert "".join(map(Detokenizer(known, leads=False).step, tokens)) == " the"
    leading = "".join(map(Detokenizer(known).step, tokens))
    assert leading == known.decode(tokens) == ("the" if name in ("Llama 2", "Metaspace") else " the")


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
