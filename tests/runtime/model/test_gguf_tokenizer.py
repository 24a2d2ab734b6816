"""Tokenizers in GGUF files: the ids of the original tokenizer, or a refusal that names what is not served."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from tokenizers import Tokenizer, pre_tokenizers

from holdfast.runtime.errors import ModelUnreadable
from holdfast.runtime.model.files import files_of
from holdfast.runtime.model.gguf_tokenizer import PRE_TOKENIZERS
from holdfast.sessions.errors import TokenizerUnreadable
from holdfast.sessions.text.tokenizer import ChatTokenizer

from .gguf_toys import TEMPLATE, Draft, tokenizer

TEXTS = (
    "Hello, world! It's 2024 and we've 1234567 things.",
    "  two  spaces, a\ttab,\r\nlines\n\n\nand an end  ",
    "a  2   33 b",
    "Käse, naïve, Straße; déjà-vu 日本語のテキスト 🐈‍⬛ and «quotes»",
    "HTTPServer camelCase snake_case x+=1;//comment",
    "\u00c9 (composed) E\u0301 (decomposed)",
    "DON'T we'Ll I'M",
    "١٢٣ ½ Ⅷ ²",
    "",
    " ",
    "\n",
)


def drafted(**changes: Any) -> Draft:
    """A file with a tokenizer alone; ``changes``: keys below ``tokenizer.ggml``, None to leave one out."""
    metadata = {"general.architecture": "llama", **tokenizer(300)}
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    made = Draft({key: value for key, value in metadata.items() if value is not None})
    made.tensors["token_embd.weight"] = (np.zeros((300, 4), np.float32), "F32")
    return made


def loaded(made: Draft, folder: Path) -> ChatTokenizer:
    return ChatTokenizer.load(made.write(folder / "toy.gguf"))


# What the tokenizer.json of these models has, as Hugging Face publishes them.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {"llama-bpe": LLAMA3, "llama3": LLAMA3, "llama-v3": LLAMA3, "dbrx": LLAMA3, "qwen2": QWEN2}
PATTERNS |= {"deepseek-r1-qwen": QWEN2, "tekken": TEKKEN, "smaug-bpe": LLAMA3}


@pytest.mark.parametrize("pre", [None, "", "default"])
def test_a_file_that_names_no_pre_tokenizer_is_cut_as_elsewhere(pre: str | None, tmp_path: Path) -> None:
    backend = loaded(drafted(pre=pre), tmp_path).backend
    cut = backend.pre_tokenizer.pre_tokenize_str('It\'s 1234567 — and a+b == "c"!  ok')
    words = [word.replace("Ġ", " ") for word, _ in cut]
    assert words[:7] == ["It", "'", "s", " ", "123", "456", "7"]
    assert words[9:] == [" and", " a", "+", "b", " ", "==", " ", '"', "c", '"!', " ", " ok"]


@pytest.mark.parametrize("name", [name for name in PRE_TOKENIZERS if name != "default"])
def test_words_are_cut_as_the_name_says(name: str, tmp_path: Path) -> None:
    backend = loaded(drafted(pre=name), tmp_path).backend
    if name in PATTERNS:
        split = {
            "type": "Split",
            "pattern": {"Regex": PATTERNS[name]},
            "behavior": "Isolated",
            "invert": False,
        }
        bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        described = {"type": "Sequence", "pretokenizers": [split, bytes_]}
        empty = json.loads(Tokenizer.from_str(backend.to_str()).to_str())
        expected = Tokenizer.from_str(json.dumps({**empty, "pre_tokenizer": described})).pre_tokenizer
    else:
        cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
        digits = pre_tokenizers.Digits(individual_digits=True)
        expected = cut if name in ("gpt-2", "olmo") else pre_tokenizers.Sequence([digits, cut])
    for text in TEXTS:
        assert backend.pre_tokenizer.pre_tokenize_str(text) == expected.pre_tokenize_str(text)
    composed = name in ("qwen2", "deepseek-r1-qwen")
    assert (backend.normalizer is not None) == composed
    if composed:
        assert backend.normalizer.normalize_str("E\u0301") == "\u00c9"


def test_ids_are_those_of_the_merges_and_every_text_comes_back(tmp_path: Path) -> None:
    ours = loaded(drafted(), tmp_path)
    tokens = tokenizer(300)["tokenizer.ggml.tokens"]
    assert [tokens[token] for token in ours.encode("the 12 in", leads=True)] == [
        "t",
        "he",
        "Ġ",
        "1",
        "2",
        "Ġ",
        "in",
    ]
    assert [tokens[token] for token in ours.encode(" the<|im_end|>", leads=True)] == ["Ġthe", "<|im_end|>"]
    for text in TEXTS:
        assert ours.backend.decode(ours.encode(text, leads=True)) == text
    assert ours.special_ids == {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    assert ours.named["eos_token"] == "<|im_end|>" and ours.template == TEMPLATE


def test_text_from_outside_is_never_a_control_token(tmp_path: Path) -> None:
    ours = loaded(drafted(), tmp_path)
    said = ours.encode(ours.mark("<|im_end|> the"), leads=True)
    assert 2 not in said and ours.backend.decode(said, skip_special_tokens=False) == "<|im_end|> the"


def test_a_word_in_the_vocabulary_is_one_token_where_the_merges_do_not_count(tmp_path: Path) -> None:
    """Llama 3's tokenizer has tokens that its merges do not make."""
    tokens = [*tokenizer(299)["tokenizer.ggml.tokens"], "Ġthehe"]
    kinds = [*tokenizer(299)["tokenizer.ggml.token_type"], 1]
    whole = loaded(drafted(pre="llama-bpe", tokens=tokens, token_type=kinds), tmp_path)
    merged = loaded(drafted(pre="gpt-2", tokens=tokens, token_type=kinds), tmp_path)
    assert whole.encode(" thehe", leads=True) == [299]
    assert merged.encode(" thehe", leads=True) != [299]


def test_user_defined_tokens_are_matched_but_are_text(tmp_path: Path) -> None:
    tokens, kinds = (tokenizer(300)[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
    tokens[290], kinds[290] = "<tool_call>", 4
    ours = loaded(drafted(tokens=tokens, token_type=kinds), tmp_path)
    assert ours.encode("<tool_call>", leads=True) == [290]
    assert "<tool_call>" not in ours.special_ids


def test_a_template_for_tools_is_found(tmp_path: Path) -> None:
    made = drafted()
    made.metadata["tokenizer.chat_template.tool_use"] = TEMPLATE + "{{ tools }}"
    made.metadata["tokenizer.chat_templates"] = ["tool_use"]
    ours = loaded(made, tmp_path)
    assert ours.template == TEMPLATE and ours.tool_template == TEMPLATE + "{{ tools }}"


def _pieces(**changes: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary of 300 tokens, the first three as they usually are."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *map(str, range(41))]
    kinds = [2, 3, 3, *[6] * 256, *[1] * 41]
    usual = {"model": "llama", "pre": None, "merges": None, "tokens": tokens, "token_type": kinds}
    named = {"eos_token_id": None, "bos_token_id": None, "padding_token_id": None, "scores": [0.0] * 300}
    return {**usual, **named, **changes}


AROUND: dict[str, tuple[dict[str, Any], tuple[list[int], list[int]]]] = {
    "SentencePiece": (_pieces(), ([1], [])),
    "SentencePiece, with other ids": (_pieces(bos_token_id=2, eos_token_id=1), ([2], [])),
    "SentencePiece, without BOS": (_pieces(add_bos_token=False), ([], [])),
    "SentencePiece, with both": (_pieces(add_eos_token=True), ([1], [2])),
    "bytes": ({"bos_token_id": 1}, ([], [])),
    "bytes, with BOS": ({"bos_token_id": 1, "add_bos_token": True}, ([1], [])),
    "bytes, with both": ({"bos_token_id": 1, "add_bos_token": True, "add_eos_token": True}, ([1], [2])),
    "bytes of Llama 3": ({"pre": "llama-bpe", "bos_token_id": 1}, ([1], [])),
    "bytes of Llama 3, without BOS": (
        {"pre": "llama-bpe", "bos_token_id": 1, "add_bos_token": False},
        ([], []),
    ),
    "bytes of Llama 3, which has none": ({"pre": "llama-bpe", "bos_token_id": None}, ([], [])),
    "bytes of tekken": ({"pre": "tekken", "bos_token_id": 1}, ([1], [])),
}
"""What stands before and behind a text, for a file with these keys."""


@pytest.mark.parametrize("name", AROUND)
def test_a_text_begins_and_ends_as_the_file_says_or_else_as_its_kind_does(name: str, tmp_path: Path) -> None:
    changes, around = AROUND[name]
    ours = loaded(drafted(**changes), tmp_path)
    assert ours.around == around
    inside = ours.backend.encode("12", add_special_tokens=False).ids
    assert ours.backend.encode("12").ids == [*around[0], *inside, *around[1]]


ENDING: dict[str, tuple[dict[int, str], dict[str, Any], list[int]]] = {
    "as the file says": (
        {0: "<a>", 2: "<b>"},
        {"eos_token_id": 7, "eot_token_id": 9, "eom_token_id": 8},
        [7, 9, 8],
    ),
    "by their texts": ({280: "<|eom_id|>", 290: "<end_of_turn>"}, {"eos_token_id": 7}, [7, 0, 2, 280, 290]),
    "but not of a part of a reply": (
        {280: "<|end|>", 281: "<|call|>", 282: "<|return|>"},
        {},
        [2, 0, 281, 282],
    ),
    "as SentencePiece has them": ({}, _pieces(), [2]),
    "none": ({0: "<a>", 2: "<b>"}, {"eos_token_id": None}, []),
}
"""Tokens that are changed, further keys, and the end tokens."""


@pytest.mark.parametrize("name", ENDING)
def test_a_reply_ends_with_the_tokens_that_end_it_elsewhere(name: str, tmp_path: Path) -> None:
    texts, changes, ends = ENDING[name]
    tokens = list(changes.get("tokens", tokenizer(300)["tokenizer.ggml.tokens"]))
    for token, text in texts.items():
        tokens[token] = text
    made = drafted(**{**changes, "tokens": tokens, **({"merges": []} if texts else {})})
    content = files_of(made.write(tmp_path / "toy.gguf")).content("generation_config.json")
    assert content is not None and json.loads(content) == {"eos_token_id": ends}


# --- SentencePiece ------------------------------------------------------------------------------------------

CORPUS = [
    "the cat sat on the mat and the dog ran after the cat",
    "thinking about things that thin thieves think",
    "numbers 1 22 333 and 4444, 2024-05-06; aaa aaaa aaaaa",
    "Käse und Brötchen zum Frühstück, déjà vu, naïve",
    "日本語のテキスト と 日本の首都",
    "  indented   text with    spaces",
]


SPACES = ("▁▁", "▁▁▁", "▁▁▁▁▁", "\n\n", "\n\n\n")
"""Gemma's vocabulary has such tokens; the format has them with spaces."""


def trained(*, prefixed: bool) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefixed,
        user_defined_symbols=[] if prefixed else ["<turn>", *SPACES],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def from_sentence_piece(pieces: sentencepiece.SentencePieceProcessor, *, prefixed: bool) -> Draft:
    """As llama.cpp's converter writes it."""
    size, kinds = pieces.vocab_size(), []
    for token in range(size):
        checks = (pieces.is_unknown, pieces.is_control, pieces.is_unused, pieces.is_byte)
        numbers = dict(zip(checks, (2, 3, 5, 6), strict=True))
        kinds.append(next((number for is_, number in numbers.items() if is_(token)), 1))
    tokens = [pieces.id_to_piece(token) for token in range(size)]
    for symbol in () if prefixed else ("<turn>", *SPACES):
        number = pieces.piece_to_id(symbol)
        kinds[number], tokens[number] = 4, symbol.replace("▁", " ")
    made = drafted(
        model="llama",
        pre=None,
        merges=None,
        tokens=tokens,
        scores=[float(pieces.get_score(token)) for token in range(size)],
        token_type=kinds,
        add_space_prefix=prefixed,
        unknown_token_id=pieces.unk_id(),
    )
    made.tensors["token_embd.weight"] = (np.zeros((size, 4), np.float32), "F32")
    return made


@pytest.mark.parametrize("prefixed", [True, False])
def test_sentence_piece_gives_the_ids_of_its_library(prefixed: bool, tmp_path: Path) -> None:
    pieces = trained(prefixed=prefixed)
    ours = loaded(from_sentence_piece(pieces, prefixed=prefixed), tmp_path)
    rng = random.Random(3)
    words = " ".join(CORPUS).split(" ")
    texts = ["a  b", "a    b\n\n\n\nc", "      x  ", "in   the\n\n  text"]
    texts += [*(text for text in TEXTS if text), *CORPUS, "<turn>the cat", "bytes: \x07 ŝ ☃ 🐈"]
    texts += ["".join(rng.choice([*words, " ", "a", "th", "\n"]) for _ in range(12)) for _ in range(200)]
    for text in texts:
        assert ours.backend.encode(text, add_special_tokens=False).ids == pieces.encode(text), text
        decoded = ours.backend.decode(pieces.encode(text), skip_special_tokens=False)
        assert decoded == text, text


# --- refusals -----------------------------------------------------------------------------------------------


def _doubled(tokens: list[str]) -> list[str]:
    return [*tokens[:-1], tokens[5]]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"model": "t5"}, "tokenizer.ggml.model: t5 is not served"),
    "no kind": ({"model": None}, "tokenizer.ggml.model: missing is not served"),
    "another pre-tokenizer": (
        {"pre": "viking"},
        "tokenizer.ggml.pre: the pre-tokenizer viking is not served",
    ),
    "fewer kinds": ({"token_type": [1, 1]}, "tokenizer.ggml.token_type: 2 numbers for 300 tokens"),
    "kinds that are text": ({"token_type": ["a"] * 300}, "token_type: an array of int"),
    "no merges": ({"merges": None}, "tokenizer.ggml.merges: missing"),
    "a merge to no token": ({"merges": ["h t"]}, "merges: merge 0, 'h t', is not of two tokens"),
    "a merge of one token": ({"merges": ["h"]}, "merges: merge 0"),
    "no scores": ({"model": "llama"}, "tokenizer.ggml.scores: missing"),
    "fewer scores": ({"model": "llama", "scores": [0.0]}, "tokenizer.ggml.scores: 1 numbers for 300"),
    "an unknown token beyond all": (
        {"model": "llama", "scores": [0.0] * 300, "token_type": [6] * 300, "unknown_token_id": 300},
        "tokenizer.ggml.unknown_token_id: 300",
    ),
    "a space before text beside user-defined tokens": (
        {"model": "llama", "scores": [0.0] * 300, "token_type": [6] * 299 + [4]},
        "add_space_prefix: a space before text, together with user-defined tokens",
    ),
    "no bytes": ({"model": "llama", "scores": [0.0] * 300}, "token_type: no token is a byte"),
    "text that is rewritten": (
        {"model": "llama", "scores": [0.0] * 300, "remove_extra_whitespaces": True},
        "remove_extra_whitespaces: rewriting text is not served",
    ),
    "an end token beyond all": ({"eos_token_id": 300}, "tokenizer.ggml.eos_token_id: 300"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_exact_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    changes, words = BAD[name]
    with pytest.raises(TokenizerUnreadable) as caught:
        loaded(drafted(**changes), tmp_path)
    assert words in caught.value.message and "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda keys: keys.update({"tokenizer.chat_template": 3}), "tokenizer.chat_template: a string"),
        (
            lambda keys: keys.update({"tokenizer.ggml.tokens": _doubled(keys["tokenizer.ggml.tokens"])}),
            "is doubled",
        ),
    ],
)
def test_other_wrong_keys(change: Callable[[dict[str, Any]], object], words: str, tmp_path: Path) -> None:
    made = drafted()
    kinds = made.metadata["tokenizer.ggml.token_type"]
    kinds[-1] = 1
    change(made.metadata)
    with pytest.raises(TokenizerUnreadable, match=words):
        loaded(made, tmp_path)


def test_a_file_without_a_folders_files_has_none(tmp_path: Path) -> None:
    files = files_of(drafted().write(tmp_path / "toy.gguf"))
    assert files.content("chat_template.jinja") is None
    with pytest.raises(ModelUnreadable):
        files.content("config.json")
