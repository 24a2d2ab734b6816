"""Ids to text as they come: whole characters only, and in all exactly what decoding at once would give.

Knows nothing of end tokens, stop strings or tool calls.
"""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Detokenizer:
    """Turns one reply's ids into text, one id or some at a time; special tokens give none."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._told = 0

    def step(self, token: int) -> str:
        """The text that became certain with this id; empty while a character is still in pieces."""
        return self.steps([token])

    def steps(self, tokens: list[int]) -> str:
        """The same of several at once; what precedes a character in pieces may come with the rest of it."""
        if not tokens:
            return ""
        self._ids += tokens
        text = self._stream.step(self._backend, tokens) or ""
        self._told += len(text)
        return text

    def flush(self) -> str:
        """What is left at the end: bytes that never became a character, as U+FFFD."""
        text: str = self._backend.decode(self._ids, skip_special_tokens=True)[self._told :]
        self._told += len(text)
        return text
