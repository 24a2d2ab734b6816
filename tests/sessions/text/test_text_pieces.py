"""Long text tokenized in pieces has the ids of the same text tokenized at once; a quick lower bound."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from holdfast.sessions.text import streaming_tokenizer
from holdfast.sessions.text.streaming_tokenizer import GrowingPrefix, StablePrefixRule
from holdfast.sessions.text.tokenizer import ChatTokenizer

from .chat_languages import FAMILIES, ours
from .test_streaming_tokenizer import KINDS, SNIPPETS, odd, tokenizer

ODD = ["cuts within characters", "strips", "begins anew", "takes white space"]
LETTERS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
written = st.lists(
    st.one_of(st.sampled_from(SNIPPETS), st.sampled_from([" ", " the", "x" * 70]), LETTERS)
).map("".join)
HEAD, TAIL = "<|im_start|>user\n", "<|im_end|>\n"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming_tokenizer, "PIECE", 40)
    monkeypatch.setattr(streaming_tokenizer, "BEHIND", 8)


def chat_of(kind: str) -> ChatTokenizer:
    return tokenizer(kind) if kind in KINDS else odd(kind)


@pytest.mark.parametrize("kind", [*KINDS, *ODD])
@given(said=written)
def test_the_pieces_of_a_text_are_the_whole(kind: str, said: str) -> None:
    chat = chat_of(kind)
    text = HEAD + chat.mark(said * 3) + TAIL
    assert StablePrefixRule(chat).encode(text, leads=True).tolist() == chat.encode(text, leads=True)


@pytest.mark.parametrize("kind", KINDS)
@given(said=written, step=st.integers(1, 300))
def test_a_long_text_that_grows_has_the_same_tokens(kind: str, said: str, step: int) -> None:
    chat = chat_of(kind)
    said = said * 4
    whole = chat.encode(HEAD + chat.mark(said) + TAIL, leads=True)
    grown = GrowingPrefix(StablePrefixRule(chat))
    for cut in range(0, len(said) + step, step):
        early = grown.ids(HEAD + chat.mark(said[:cut]), leads=True).tolist()
        assert whole[: len(early)] == early


@pytest.mark.parametrize("kind", KINDS)
def test_plain_text_is_really_cut(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = chat_of(kind)
    text = "The weather in Paris is sunny and warm. " * 40
    ends = [end for _, end in StablePrefixRule(chat).pieces(text, leads=True)]
    assert ends[-1] == len(text) and max(b - a for a, b in zip([0, *ends], ends, strict=False)) <= 40 + 200
    assert len(ends) > 5


@pytest.mark.parametrize("kind", KINDS)
def test_no_more_is_tokenized_than_is_wanted(kind: str) -> None:
    chat = chat_of(kind)
    text = "The weather in Paris is sunny and warm. " * 400
    whole = chat.encode(text, leads=True)
    some = StablePrefixRule(chat).encode(text, leads=True, most=50).tolist()
    assert 50 <= len(some) < len(whole) / 4 and whole[: len(some)] == some
    asked = iter([False, False, True])
    some = StablePrefixRule(chat).encode(text, leads=True, stopped=lambda: next(asked)).tolist()
    assert 0 < len(some) < len(whole) / 4 and whole[: len(some)] == some


@pytest.mark.parametrize("kind", [*KINDS, *ODD, *FAMILIES])
@given(said=written)
def test_a_text_has_no_fewer_tokens_than_its_bound(kind: str, said: str) -> None:
    chat = ours(kind) if kind in FAMILIES else chat_of(kind)
    text = HEAD + chat.mark(said) + TAIL
    assert chat.least(text) <= len(chat.encode(text, leads=True))


@pytest.mark.parametrize(
    ("kind", "bound"), [("gpt2", 1), ("qwen", 4), ("sentencepiece", 1), ("letters", None)]
)
def test_the_bound_is_the_longest_token_of_those_that_have_one(kind: str, bound: int | None) -> None:
    chat = chat_of(kind)
    vocabulary = [token for token in chat.backend.get_vocab() if token.isascii()]
    if bound is None:
        assert chat.longest is None and chat.least("a" * 1000) == 0
    else:
        assert chat.longest is not None and chat.longest >= bound * max(map(len, vocabulary))
        assert chat.least("a" * 100_000) >= 100_000 // chat.longest


def _bpe(**changes: object) -> Tokenizer:
    """A byte-level one in which something is unusual."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = changes.get("split", pre_tokenizers.ByteLevel(add_prefix_space=False))
    if "rewrite" in changes:
        backend.normalizer = changes["rewrite"]
    return backend


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        (Tokenizer(models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True)), "b" * 99),
        (Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")), "b" * 99),
        (_bpe(rewrite=normalizers.Replace("spam", "")), "spam" * 99),
        (_bpe(rewrite=normalizers.Replace(Regex(" +"), " ")), " " * 99),
        (_bpe(rewrite=normalizers.StripAccents()), "\u0301" * 99),
        (
            _bpe(
                split=pre_tokenizers.Sequence(
                    [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
                )
            ),
            " " * 99,
        ),
    ],
)
def test_a_tokenizer_that_drops_text_has_no_bound(backend: Tokenizer, text: str) -> None:
    chat = ChatTokenizer(backend, FAMILIES["chatml"].template)
    assert chat.longest is None and chat.least(text) == 0 and len(chat.encode(text, leads=True)) < 20


def test_composed_letters_are_within_the_bound() -> None:
    chat = ChatTokenizer(_bpe(rewrite=normalizers.NFC()), FAMILIES["chatml"].template)
    for text in ("\u1fbe\u0308\u0301" * 50, "\u1100\u1161\u11a8" * 50, "\u212b\u0301" * 50, "\u212a" * 50):
        assert chat.least(text) <= len(chat.encode(text, leads=True))


def test_white_space_that_a_token_takes_in_counts_for_nothing() -> None:
    backend = _bpe()
    backend.add_tokens([AddedToken("<x>", rstrip=True)])
    chat = ChatTokenizer(backend, FAMILIES["chatml"].template)
    text = "<x>" + " " * 500
    assert chat.longest and chat.least(text) <= len(chat.encode(text, leads=True)) == 1


@given(tokens=st.sets(st.text("ab<|", max_size=5), max_size=12), text=st.text("ab<|"))
def test_of_special_tokens_the_longest_is_found(tokens: set[str], text: str) -> None:
    backend = _bpe()
    backend.add_special_tokens([AddedToken(token, special=True) for token in sorted(tokens - {""})])
    plain = "|".join(map(re.escape, sorted(tokens - {""}, key=len, reverse=True))) or "(?!)"
    assert ChatTokenizer(backend, "").specials_in(text) == re.findall(plain, text)
