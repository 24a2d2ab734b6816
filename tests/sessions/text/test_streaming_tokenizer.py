"""The stable prefix of a text that grows begins the tokens of the whole text, for the tokenizers in use."""

from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from holdfast.sessions.text.streaming_tokenizer import GrowingPrefix, StablePrefixRule
from holdfast.sessions.text.tokenizer import ChatTokenizer

from .chat_languages import CORPUS, FAMILIES, ours

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIALS = ["<|im_start|>", "<|im_end|>"]
KINDS = ["gpt2", "llama3", "qwen", "o200k", "sentencepiece", "letters"]


@cache
def tokenizer(kind: str) -> ChatTokenizer:
    """A few hundred entries, cut as the family cuts."""
    backend = Tokenizer(models.BPE(byte_fallback=kind == "sentencepiece"))
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>"], show_progress=False)
    if kind == "letters":
        alphabet = sorted(set("".join(CORPUS)))
        backend = Tokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
        backend.decoder = decoders.Fuse()
    elif kind == "sentencepiece":
        backend.normalizer = normalizers.Replace(" ", "▁")
        # its trainer keeps words apart although its encoder does not
        backend.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
        bytes_too = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(
            vocab_size=900, special_tokens=["<unk>", *bytes_too], show_progress=False
        )
        backend.train_from_iterator(CORPUS * 4, trainer)
        backend.pre_tokenizer = None
    else:
        pattern = {"gpt2": GPT2, "llama3": LLAMA3, "qwen": LLAMA3.replace("{1,3}", ""), "o200k": O200K}[kind]
        if kind == "qwen":
            backend.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
        backend.decoder = decoders.ByteLevel()
        backend.train_from_iterator(CORPUS * 4, trainer)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return ChatTokenizer(backend, FAMILIES["chatml"].template)


@cache
def odd(kind: str) -> ChatTokenizer:
    """One that makes other tokens of a part of a text than of all of it."""
    backend = Tokenizer.from_str(tokenizer("gpt2").backend.to_str())
    if kind == "cuts within characters":  # as Falcon's does
        backend.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            pre_tokenizers.Digits(individual_digits=False),
        ])  # fmt: skip
    elif kind == "strips":
        backend.normalizer = normalizers.Strip()
    elif kind == "begins anew":  # as Llama 2's does behind each control token
        backend = Tokenizer.from_str(tokenizer("sentencepiece").backend.to_str())
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.add_tokens([AddedToken("<x>", rstrip=True)])
    return ChatTokenizer(backend, FAMILIES["chatml"].template)


SNIPPETS = [
    *(
        "'s",
        "'ll",
        "it'",
        "I'VE",
        "12345",
        "3.14",
        "  ",
        "\n",
        "\n\n",
        " \n",
        "\t",
        "\r\n",
        ".",
        "...",
        "?!",
        "\n  \n",
    ),
    *(
        "你好",
        "，",
        "天气",
        "привет",
        "नमस्ते",
        "مرحبا",
        "한국어",
        "👩‍👩‍👧",
        "😀",
        "e\u0301",
        "\u0301",
        "\u3000",
    ),
    *("<|im_", "start|>", "<|", "a", "word", " word", "Hello", "ΑΣ", "ß", "/", '{"a": 1}'),
]
pieces = st.lists(
    st.one_of(st.sampled_from(SNIPPETS), st.text(st.characters(exclude_categories=["Cs"]), max_size=5)),
    max_size=12,
)


@pytest.mark.parametrize("kind", KINDS)
@given(written=pieces, cut=st.integers(0, 60))
def test_settled_tokens_begin_those_of_the_whole_text(kind: str, written: list[str], cut: int) -> None:
    chat = tokenizer(kind)
    text = "".join(written)
    head, tail = "<|im_start|>user\n", "<|im_end|>\n"
    whole = chat.encode(head + chat.mark(text) + tail, leads=True)
    early = StablePrefixRule(chat).prefix_of(head + chat.mark(text[:cut]), leads=True).ids
    assert whole[: len(early)] == early


@pytest.mark.parametrize("kind", [*KINDS, "cuts within characters", "strips", "begins anew", "takes space"])
@pytest.mark.parametrize("special", [True, False])
def test_a_long_text_in_pieces_has_the_ids_of_the_tokenizer(kind: str, special: bool) -> None:
    """With the names of control tokens in it, words longer than a piece, white space, and what the tokenizer
    puts around a text."""
    chat = tokenizer(kind) if kind in KINDS else odd(kind)
    backend = Tokenizer.from_str(chat.backend.to_str())
    begins, ends = (chat.backend.token_to_id(name) for name in SPECIALS)
    if begins is not None and ends is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{SPECIALS[0]} $A {SPECIALS[1]}",
            special_tokens=[(SPECIALS[0], begins), (SPECIALS[1], ends)],
        )
    rule = StablePrefixRule(ChatTokenizer(backend, FAMILIES["chatml"].template))
    rng = random.Random(5)
    words = "".join(rng.choice((*SNIPPETS, *SPECIALS, " and so on", *CORPUS)) for _ in range(4_000))
    texts = [
        "",
        "a",
        "Hello there",
        " " * 40_000,
        "a" * 40_000,
        "你好天气" * 10_000,
        words,
        words + "b" * 40_000,
    ]
    for text in texts:
        if kind == "letters":
            text = "".join(one for one in text if one in set("".join(CORPUS)))
        assert rule.raw(text, special=special) == backend.encode(text, add_special_tokens=special).ids
    some = rule.raw(words, special=special, most=100)
    assert 100 <= len(some) < 20_000, "it ends early"


@pytest.mark.parametrize("kind", KINDS)
@given(written=pieces, cuts=st.lists(st.integers(0, 60), min_size=2, max_size=8))
def test_the_same_is_settled_of_a_text_that_grows(kind: str, written: list[str], cuts: list[int]) -> None:
    chat = tokenizer(kind)
    text = "".join(written)
    head, tail = "<|im_start|>user\n", "<|im_end|>\n"
    whole = chat.encode(head + chat.mark(text) + tail, leads=True)
    rule = StablePrefixRule(chat)
    grown = GrowingPrefix(rule)
    for cut in sorted(cuts):
        early = grown.ids(head + chat.mark(text[:cut]), leads=True).tolist()
        assert whole[: len(early)] == early
        assert len(early) >= len(rule.prefix_of(head + chat.mark(text[:cut]), leads=True).ids)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("cuts within characters", "１２'ll)ーч and ９８ more"),
        ("strips", "one two three four five six"),
        ("begins anew", "<|im_start|>user\none two three four five six"),
        ("takes white space", "so one <x> \n two three four five"),
    ],
)
def test_a_text_is_parted_only_where_each_part_has_its_own_tokens(kind: str, text: str) -> None:
    chat = odd(kind)
    whole = chat.encode(text, leads=True)
    grown, most = GrowingPrefix(StablePrefixRule(chat)), 0
    for cut in range(len(text) + 1):
        early = grown.ids(text[:cut], leads=True).tolist()
        assert whole[: len(early)] == early
        most = max(most, len(early))
    assert most > len(whole) / 2


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_text_that_grows_only_its_end_is_tokenized(kind: str) -> None:
    chat = tokenizer(kind)
    rule, seen = StablePrefixRule(chat), []
    prefix_of = rule.prefix_of
    rule.prefix_of = lambda text, *, leads: seen.append(len(text)) or prefix_of(text, leads=leads)
    grown = GrowingPrefix(rule)
    text = "<|im_start|>user\n"
    for word in " ".join(CORPUS).split()[:80]:
        text += f" {word}"
        ids = grown.ids(text, leads=True).tolist()
        assert ids == chat.encode(text, leads=True)[: len(ids)]
    assert len(text) > 300 and max(seen) < 80
    other = grown.ids("<|im_start|>system\n" + text, leads=True).tolist()
    assert other == chat.encode("<|im_start|>system\n" + text, leads=True)[: len(other)]
    assert other != ids[: len(other)]


@pytest.mark.parametrize("kind", KINDS)
def test_all_but_the_last_words_are_settled(kind: str) -> None:
    chat = tokenizer(kind)
    said = "The weather in Paris is sunny and warm, and I am fine"
    early = StablePrefixRule(chat).prefix_of("<|im_start|>user\n" + said, leads=True).ids
    whole = chat.encode("<|im_start|>user\n" + said, leads=True)
    text = chat.backend.decode(early, skip_special_tokens=False).replace("▁", " ")
    text = " ".join(text.split())
    assert whole[: len(early)] == early
    assert "and I" in text or text.endswith("I am"), text


def test_what_could_become_a_control_token_waits() -> None:
    chat = tokenizer("gpt2")
    settled = StablePrefixRule(chat)
    held = settled.prefix_of("so one two three four <|im_", leads=True).ids
    assert held == chat.encode("so one two three four", leads=True)[: len(held)]
    assert len(held) < len(chat.encode("so one two three four", leads=True))


def test_a_family_of_these_tests_settles_too() -> None:
    chat = ours("qwen3")
    assert StablePrefixRule(chat).prefix_of("<|im_start|>user\none two three four five", leads=True).ids
