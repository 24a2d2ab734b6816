"""A toy model that calls a tool in each reply: its grammar forces the call, its weights choose an argument.

Its vocabulary of byte pairs is learnt from this repository's source, so that a token has about as many
characters as in a real model. Each digit is a token in any text: a call that is sent back has the tokens that
were sampled.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

import holdfast
from holdfast.sdk import Tool, tool

from ..toys import SHAPES, make_toy

TOOL = "step"
"""The name of the tool that every reply calls."""
OUTPUT_TOKENS = 48
PIECES = 12
"""The number of pieces in which a streamed output comes."""
USER, ASSISTANT, OPEN, CLOSE, END = MARKS = (
    "<|user|>",
    "<|assistant|>",
    "<tool_call>",
    "</tool_call>",
    "<|end|>",
)
"""Marks of the chat template; they are the last tokens of the vocabulary, in this order."""
ROOMS = ("gateway", "sessions")
"""The folders of this package with the source that words are learnt from."""

_SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TEMPLATE = """\
{%- if tools -%}{{- '<|user|>' ~ (tools | tojson) -}}{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- '<|assistant|>' ~ message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' -}}
{{- (call.function.arguments | tojson) ~ '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- else -%}{{- '<|user|>' ~ message.content -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


@dataclass(frozen=True, slots=True)
class Caller:
    """The toy model: its ``folder``, its tokenizer, and as ``said`` the source's text in tokens, from which
    words are taken."""

    folder: Path
    tokenizer: Tokenizer
    said: tuple[int, ...]

    @classmethod
    def make(cls, model: str, folder: Path, seed: int, dtype: str) -> Caller:
        size = int(SHAPES[model]["vocab_size"])
        make_toy(model, folder, seed=seed, dtype=dtype, eos_token_id=size - 1)
        tokenizer, said = _learnt(size)
        tokenizer.save(str(folder / "tokenizer.json"))
        # The class says that the file is read as it stands: that of the model would split text in another way.
        told = {"chat_template": _TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(told))
        return cls(folder, tokenizer, said)

    @property
    def closing(self) -> int:
        """The id of the token that closes a call's arguments: the one after the last digit."""
        token: int = self.tokenizer.encode(f"7}}}}\n{CLOSE}", add_special_tokens=False).ids[1]
        return token

    def forced(self) -> dict[str, Any]:
        """The session fields that make every reply one tool call, and nothing else."""
        return {"temperature": 0, "tool_choice": {"type": "function", "name": TOOL}, "max_output_tokens": 64}

    def words(self, count: int, seed: int) -> str:
        """A text of ``count`` tokens, from a random point in the source."""
        at = random.Random(seed).randrange(len(self.said) - 2 * count)
        while True:
            text: str = self.tokenizer.decode(list(self.said[at : at + count]), skip_special_tokens=False)
            if len(self.tokenizer.encode(text, add_special_tokens=False).ids) == count:
                return text
            at += 1  # a cut word has other tokens

    def tool(self, seed: int, seconds: float = 0.0, tokens: int = OUTPUT_TOKENS) -> Tool:
        """The tool that is called. It answers with ``tokens`` tokens of text: at once, or, if ``seconds`` is
        set, streamed in `PIECES` over so many seconds."""
        rng = random.Random(seed)

        @tool(name=TOOL)
        async def step(path: Literal["src/main.py"], line: Annotated[int, Meta(ge=100, le=999)]) -> str:
            """Look at a line."""
            return self.words(tokens, rng.randrange(1 << 30))

        @tool(name=TOOL)
        async def slow_step(
            path: Literal["src/main.py"], line: Annotated[int, Meta(ge=100, le=999)]
        ) -> AsyncIterator[str]:
            """Look at a line."""
            began, words = time.perf_counter(), self.words(tokens, rng.randrange(1 << 30))
            for piece in range(PIECES):
                await asyncio.sleep(began + (piece + 1) / PIECES * seconds - time.perf_counter())
                yield words[piece * len(words) // PIECES : (piece + 1) * len(words) // PIECES]

        return slow_step if seconds else step


def _source() -> str:
    """The ASCII text of the source files, in the order of their names."""
    root = Path(holdfast.__file__).parent
    files = (path for room in ROOMS for path in sorted((root / room).rglob("*.py")))
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    return text.encode("ascii", errors="ignore").decode()


@cache
def _learnt(size: int) -> tuple[Tokenizer, tuple[int, ...]]:
    """A tokenizer with byte pairs learnt from the source, and `MARKS`: ``size`` tokens in all; and the source
    as tokens."""
    source = _source()
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    vocabulary = size - len(MARKS)
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, show_progress=False)
    tokenizer.train_from_iterator([source], trainer)
    assert tokenizer.get_vocab_size() == vocabulary, "the source has words enough"
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    return tokenizer, tuple(tokenizer.encode(source, add_special_tokens=False).ids)
