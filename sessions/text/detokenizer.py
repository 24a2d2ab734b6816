"""Ids to text as they come: whole characters only, and in all exactly what decoding at once would give.

Knows nothing of end tokens, stop strings or tool calls.
"""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

BROKEN = "\ufffd"
"""What bytes decode to that are no whole character, or not yet."""


class Detokenizer:
    """Turns one reply's ids into text, one id or some at a time; special tokens give none."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._told = 0
        self._unstreamed = 0  # leading ids that were decoded at once

    def step(self, token: int) -> str:
        """The text that became certain with this id; empty while a character is still in pieces."""
        return self.steps([token])

    def steps(self, tokens: list[int]) -> str:
        """The same of several at once; what precedes a character in pieces may come with the rest of it."""
        if not tokens:
            return ""
        first = not self._ids
        self._ids += tokens
        if first and len(tokens) > 1:  # often all there is, which the stream would decode twice
            whole: str = self._backend.decode(tokens, skip_special_tokens=True)
            if not whole.endswith(BROKEN):
                self._told, self._unstreamed = len(whole), len(tokens)
                return whole
        if self._unstreamed:
            self._stream.step(self._backend, self._ids[: self._unstreamed])
            self._unstreamed = 0
        text = self._stream.step(self._backend, tokens) or ""
        self._told += len(text)
        return text

    def flush(self) -> str:
        """What is left at the end: bytes that never became a character, as U+FFFD."""
        if self._unstreamed:
            return ""
        text: str = self._backend.decode(self._ids, skip_special_tokens=True)[self._told :]
        self._told += len(text)
        return text
