"""Small tokenizers with the chat templates of well-known families, for the sessions' tests.

Each comes twice: as ours, and as transformers' tokenizer of the same files, which is the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from holdfast.sessions.text.tokenizer import ChatTokenizer

CORPUS = [
    "Hello there, how are you today? I am fine, thank you.",
    "The weather in Paris is sunny and warm, 21 degrees.",
    "Привет, как дела? Всё хорошо, спасибо.",
    "你好，今天天气怎么样？天气很好。",
    "مرحبا كيف حالك اليوم",
    "नमस्ते आप कैसे हैं",
    "emoji 😀 🎉 👩‍👩‍👧 and combining é ñ",
    '{"name": "weather", "arguments": {"city": "Paris"}}',
    "system user assistant tool instructions function parameters description type object properties",
]

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _template(name: str) -> str:
    return (Path(__file__).parents[1] / "templates" / f"{name}.jinja").read_text()


CHATML = _template("chatml")
THINKS_OPEN = CHATML.replace(
    "<|im_start|>assistant\\n'", "<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n'"
)
assert THINKS_OPEN != CHATML

IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
INST = ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]")
INST += ("[TOOL_RESULTS]", "[/TOOL_RESULTS]")
TURNS = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
HEADERS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")


@dataclass(frozen=True)
class Family:
    """One template with the tokens it writes."""

    template: str
    specials: tuple[str, ...]
    marks: tuple[str, ...]
    end: str
    named: tuple[tuple[str, str], ...] = ()
    normalized: bool = False


FAMILIES = {
    "chatml": Family(CHATML, IM, MARKS, "<|im_end|>", normalized=True),
    "qwen3": Family(_template("qwen3"), IM, MARKS, "<|im_end|>", normalized=True),
    "llama3": Family(_template("llama3"), HEADERS, (), "<|eot_id|>", (("bos_token", "<|begin_of_text|>"),)),
    "tools-last": Family(_template("tools_last"), IM, (), "<|im_end|>"),
    "thinks-open": Family(THINKS_OPEN, IM, MARKS, "<|im_end|>"),
}
MISTRAL = (("bos_token", "<s>"), ("eos_token", "</s>"))
STRICT = {
    "mistral-v1": Family(_template("mistral_v1"), INST, (), "</s>", MISTRAL),
    "mistral-v2": Family(_template("mistral_v2"), INST, (), "</s>", MISTRAL),
    "mistral-v3": Family(_template("mistral_v3"), INST, (), "</s>", MISTRAL),
    "mistral-nemo": Family(_template("mistral_nemo"), INST, (), "</s>", MISTRAL),
    "gemma-2": Family(_template("gemma2"), TURNS, (), "<end_of_turn>", (("bos_token", "<bos>"),)),
    "gemma-3": Family(_template("gemma3"), TURNS, (), "<end_of_turn>", (("bos_token", "<bos>"),)),
}
"""Families with templates that want users and assistants to alternate."""
FAMILIES |= STRICT


@cache
def backend(name: str) -> Tokenizer:
    """A byte-level BPE of a few hundred entries with the family's tokens added."""
    family = FAMILIES[name]
    tokenizer = Tokenizer(models.BPE())
    if family.normalized:
        tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text in family.specials]
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in family.marks])
    return tokenizer


@cache
def ours(name: str) -> ChatTokenizer:
    """The family's tokenizer as sessions use it."""
    family = FAMILIES[name]
    return ChatTokenizer(backend(name), family.template, dict(family.named))


@cache
def reference(name: str) -> PreTrainedTokenizerFast:
    """The same as transformers has it."""
    family = FAMILIES[name]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend(name),
        chat_template=family.template,
        clean_up_tokenization_spaces=False,
        **dict(family.named),
    )


def end_id(name: str) -> int:
    """The id that ends a turn."""
    found = backend(name).token_to_id(FAMILIES[name].end)
    assert found is not None
    return found


def ids(name: str, text: str) -> list[int]:
    """Ids of a canonical text without control tokens."""
    return list(backend(name).encode(text, add_special_tokens=False).ids)
