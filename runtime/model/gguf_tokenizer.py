"""The tokenizer in a GGUF file's metadata, as a ``tokenizer.json`` and a ``tokenizer_config.json``. No torch.

A GGUF file stores the vocabulary and the merges, but of the pre-tokenizer, which cuts text into words before
the merges, only a name. `PRE_TOKENIZERS` has the known names. Other names are refused, because a wrong cut
gives wrong tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .fields import Fields
from .gguf_file import GGUFFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""The kinds of tokens, as ``tokenizer.ggml.token_type`` numbers them."""

_LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_CASED = r"[^\r\n\p{{L}}\p{{N}}]?{0}*{1}+|[^\r\n\p{{L}}\p{{N}}]?{0}+{1}*"
_REST = r"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n{slash}]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS + _REST.format(digits=r"\p{N}{1,3}", slash="")
_QWEN2 = _WORDS + _REST.format(digits=r"\p{N}", slash="")
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_TEKKEN = _CASED.format(*_LETTERS) + _REST.format(digits=r"\p{N}", slash="/")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut into words before the merges.

    ``patterns``: regular expressions of a word, each of which cuts what those before it leave; none: GPT-2's.
    ``digits``: each digit is first cut off as a
    word of its own. ``composed``: text is first brought to Unicode normalization form C. ``whole``: a word
    that is in the vocabulary becomes one token without any merges (``ignore_merges`` in the tokenizers
    library). ``begins``: a text begins with the BOS token, unless the file says otherwise.
    """

    patterns: tuple[str, ...] = ()
    digits: bool = False
    composed: bool = False
    whole: bool = False
    begins: bool = False


TOKENIZER = "tokenizer.ggml."
"""How the keys of the metadata that describe the tokenizer begin."""
DEFAULT = "default"
"""llama.cpp's rule for a file that names no pre-tokenizer: it need not be the model's own."""
_GPT2, _DIGITS = PreTokenizer(), PreTokenizer(digits=True)
_LLAMA = PreTokenizer((_LLAMA3,), whole=True, begins=True)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "refact": _DIGITS,
    "starcoder": _DIGITS,
    "llama-bpe": _LLAMA,
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "dbrx": PreTokenizer((_LLAMA3,)),
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "olmo": _GPT2,
    "qwen2": PreTokenizer((_QWEN2,), composed=True),
    "deepseek-r1-qwen": PreTokenizer((_QWEN2,), composed=True),
    "tekken": PreTokenizer((_TEKKEN,), whole=True, begins=True),
    DEFAULT: PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
"""The pre-tokenizers by the name in ``tokenizer.ggml.pre``. Patterns are from the ``tokenizer.json`` of these
models; which begin a text with BOS is from llama.cpp (``src/llama-vocab.cpp``), as are the defaults below."""

DEFAULT_IDS: Mapping[str, Mapping[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "gpt2": {"bos": 11, "eos": 11},
}
"""The ids of special tokens that a file does not name, by ``tokenizer.ggml.model``. They count where these are
control tokens."""
ENDS = frozenset(
    [
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
        *("<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
        *("<|end_of_text|>", "<eos>", "<end_of_utterance>", "<turn|>", "<|tool_response>"),
        *("<｜end▁of▁sentence｜>", "[e~["),
    ]
)
"""Tokens that end a reply, whatever the file says of them."""

_NAMED = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # so spelled in the format
    "pad_token": "padding",
    "mask_token": "mask",
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The vocabulary in a GGUF file: the tokens in the order of their ids, and the kind of each, such as
    `NORMAL` or `CONTROL`. ``fields``: all that the file says of its tokenizer."""

    fields: Fields
    tokens: list[str]
    kinds: list[int]

    @classmethod
    def read(cls, file: GGUFFile) -> Vocabulary:
        """Read the file's vocabulary. Raises ``ConfigInvalid``: an array is missing, or its length or type
        wrong."""
        fields = file.fields(TOKENIZER)
        tokens = _array(fields, "tokens", str)
        kinds = [NORMAL] * len(tokens)
        if fields.get("token_type") is not None:
            kinds = _array(fields, "token_type", int, len(tokens))
        both = zip(tokens, kinds, strict=True)
        return cls(fields, tokens, [CONTROL if token in ENDS else kind for token, kind in both])

    def special(self, name: str) -> int | None:
        """The id of the special token ``name``, such as ``bos``: as the file has it, or else llama.cpp's
        default; None if there is none. Raises ``ConfigInvalid``."""
        token = self.fields.get(f"{name}_token_id")
        if token is None:
            default = DEFAULT_IDS.get(str(self.fields.get("model")), {}).get(name, len(self.kinds))
            return default if self.kinds[default : default + 1] in ([CONTROL], [UNKNOWN]) else None
        if type(token) is not int or not 0 <= token < len(self.tokens):
            raise self.fields.wrong(f"{name}_token_id", f"{token!r:.60} is not the number of a token")
        return token

    def ends(self) -> list[int]:
        """The ids of the tokens that end a reply: those that the file names first, then `ENDS`."""
        texts = ENDS.intersection(self.tokens)
        if {"<|end|>", "<|call|>", "<|return|>"} <= texts or {"<|end|>", "<|calls|>", "<|flush|>"} <= texts:
            texts -= {"<|end|>"}  # it ends a part of a reply
        if "<|tool_response>" in texts:
            texts -= {"</s>"}
        named = [one for name in ("eos", "eot", "eom") if (one := self.special(name)) is not None]
        return list(dict.fromkeys([*named, *(at for at, token in enumerate(self.tokens) if token in texts)]))

    def ids(self, *without: int) -> dict[str, int]:
        """The id of each token, but not those of the kinds ``without``. Raises ``ConfigInvalid`` if a token
        is there twice."""
        ids: dict[str, int] = {}
        for number, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True)):
            if kind not in without and ids.setdefault(token, number) != number:
                told = f"{token!r:.60} is doubled: tokens {ids[token]} and {number}"
                raise self.fields.wrong("tokens", told)
        return ids

    def added(self) -> list[dict[str, Any]]:
        """The entries of ``added_tokens`` in ``tokenizer.json``: control, user-defined and unknown tokens,
        which are found in a text before it is cut into words."""
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        return [
            {"id": number, "content": token, **flags, "special": kind != USER_DEFINED}
            for number, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind in (CONTROL, USER_DEFINED, UNKNOWN) and token
        ]


def tokenizer_of(file: GGUFFile) -> dict[str, Any]:
    """The content that the model's ``tokenizer.json`` would have, without fields that the tokenizers library
    does not need.

    Raises ``ConfigInvalid`` naming the key, ``UnsupportedArchitecture`` for a kind of tokenizer that is not
    served.
    """
    fields = file.fields(TOKENIZER, {"model": "missing"})
    if (kind := str(fields.get("model"))) not in _KINDS:
        raise fields.unserved("model", f"{kind:.40} is not served (served: {', '.join(_KINDS)})")
    vocabulary = Vocabulary.read(file)
    return {
        "version": "1.0",
        "added_tokens": vocabulary.added(),
        "post_processor": _around(vocabulary),
        **_KINDS[kind](vocabulary),
    }


def _around(vocabulary: Vocabulary) -> dict[str, Any] | None:
    """The step that puts BOS before a text and EOS behind it, as the file says, or else as llama.cpp does for
    this kind of vocabulary. None if neither is put."""
    values = vocabulary.fields.values
    rule = PRE_TOKENIZERS.get(pre_tokenizer_of(vocabulary.fields), _GPT2)
    begins = values.get("model") == "llama" or rule.begins
    put = {"bos": values.get("add_bos_token", begins), "eos": values.get("add_eos_token", False)}
    ids = {name: vocabulary.special(name) for name, wanted in put.items() if wanted}
    named = {name: vocabulary.tokens[token] for name, token in ids.items() if token is not None}
    if not named:
        return None
    parts = {name: {"SpecialToken": {"id": token, "type_id": 0}} for name, token in named.items()}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    around = [part for part in (parts.get("bos"), text, parts.get("eos")) if part is not None]
    special = {token: {"id": token, "ids": [ids[name]], "tokens": [token]} for name, token in named.items()}
    return {"type": "TemplateProcessing", "single": around, "pair": around, "special_tokens": special}


def tokenizer_config_of(file: GGUFFile) -> dict[str, Any]:
    """The fields that the model's ``tokenizer_config.json`` would have: the chat templates, and special
    tokens such as ``eos_token``. Raises ``ConfigInvalid``."""
    vocabulary = Vocabulary.read(file)
    ids = {name: vocabulary.special(key) for name, key in _NAMED.items()}
    made: dict[str, Any] = {name: vocabulary.tokens[one] for name, one in ids.items() if one is not None}
    stated = file.fields("tokenizer.")
    named = [
        {
            "name": key.removeprefix("chat_template").removeprefix(".") or "default",
            "template": stated.text(key),
        }
        for key in stated.values
        if key == "chat_template" or key.startswith("chat_template.")
    ]
    return made | ({"chat_template": named} if named else {})


def _byte_level(vocabulary: Vocabulary) -> dict[str, Any]:
    """The parts of ``tokenizer.json`` for byte-level BPE, as in GPT-2. Raises ``UnsupportedArchitecture`` for
    a pre-tokenizer that is not served."""
    fields = vocabulary.fields
    name = pre_tokenizer_of(fields)
    if name not in PRE_TOKENIZERS:
        served = ", ".join(PRE_TOKENIZERS)
        raise fields.unserved("pre", f"the pre-tokenizer {name:.40} is not served (served: {served})")
    rule = PRE_TOKENIZERS[name]
    vocab = vocabulary.ids(UNUSED)
    lines = _array(fields, "merges", str)
    merges = [_merge(fields, line, number, vocab) for number, line in enumerate(lines)]
    steps: list[dict[str, Any]] = []
    if rule.digits:
        steps.append({"type": "Digits", "individual_digits": True})
    for pattern in rule.patterns:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
        steps.append({**split, "invert": False})
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps.append({**bytes_, "use_regex": not rule.patterns})
    return {
        "normalizer": {"type": "NFC"} if rule.composed else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {**bytes_, "use_regex": True},
        "model": {"type": "BPE", "ignore_merges": rule.whole, "vocab": vocab, "merges": merges},
    }


def _merge(fields: Fields, line: str, number: int, vocab: Mapping[str, int]) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    if not left or not right or not {left, right, left + right} <= vocab.keys():
        raise fields.wrong("merges", f"merge {number}, {line!r:.60}, is not of two tokens to a third")
    return left, right


def _sentence_piece(vocabulary: Vocabulary) -> dict[str, Any]:
    """The parts of ``tokenizer.json`` for SentencePiece BPE, as in Llama 2 and Gemma: the best score is
    merged first. Raises ``ConfigInvalid``, ``UnsupportedArchitecture``."""
    fields = vocabulary.fields
    scores = _array(fields, "scores", float, len(vocabulary.tokens))
    for name in ("precompiled_charsmap", "remove_extra_whitespaces"):
        value = fields.get(name)
        if value is not None and value is not False and np.size(value):
            raise fields.unserved(name, "rewriting text is not served")
    if BYTE not in vocabulary.kinds:
        raise fields.wrong("token_type", "no token is a byte: a tokenizer without them is not served")
    vocab = vocabulary.ids(UNUSED)
    merges = _merges_by_score(vocabulary, scores)
    flags = {"byte_fallback": True, "fuse_unk": True}
    unknown = vocabulary.tokens[vocabulary.special("unknown") or 0]
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prefixed = fields.values.get("add_space_prefix", True)
    if prefixed and USER_DEFINED in vocabulary.kinds:  # implementations differ on text after such a token
        told = "a space before text, together with user-defined tokens, is not served"
        raise fields.unserved("add_space_prefix", told)
    steps = [{"type": "Prepend", "prepend": "▁"}, spaces] if prefixed else [spaces]
    spoken = [{**spaces, "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}]
    spoken.append({"type": "Fuse"})
    if prefixed:
        spoken.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": spoken},
        "model": {"type": "BPE", **flags, "unk_token": unknown, "vocab": vocab, "merges": merges},
    }


def _merges_by_score(vocabulary: Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """The merges: each way to cut a normal token into two tokens, ordered by the score of the whole token, as
    transformers makes merges from a SentencePiece model."""
    mergeable = {
        token: number
        for number, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind in (NORMAL, USER_DEFINED)
    }
    found: list[tuple[float, int, int, str, str]] = []
    for token, number in mergeable.items():
        if vocabulary.kinds[number] != NORMAL:
            continue
        for at in range(1, len(token)):
            left, right = mergeable.get(token[:at]), mergeable.get(token[at:])
            if left is not None and right is not None:
                found.append((-scores[number], left, right, token[:at], token[at:]))
    found.sort()
    return [(left, right) for *_, left, right in found]


_KINDS: Mapping[str, Callable[[Vocabulary], dict[str, Any]]] = {
    "gpt2": _byte_level,
    "llama": _sentence_piece,
}
"""The functions that make the parts of ``tokenizer.json``, by ``tokenizer.ggml.model``."""


def pre_tokenizer_of(fields: Fields) -> str:
    """The name of the file's pre-tokenizer; `DEFAULT` if it names none. ``fields``: those of its tokenizer."""
    return str(fields.get("pre") or DEFAULT)


def _array(fields: Fields, name: str, kind: type, length: int | None = None) -> list[Any]:
    """An array of ``kind``, of ``length`` if it is one number for each token. Raises ``ConfigInvalid``."""
    value = fields.get(name)
    if value is None:
        raise fields.wrong(name, "missing")
    items = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(items, list) or (items and type(items[0]) is not kind):
        raise fields.wrong(name, f"an array of {kind.__name__} is expected")
    if length not in (None, len(items)):
        raise fields.wrong(name, f"{len(items)} numbers for {length} tokens")
    return items
