"""Token ids to text while they come: only whole characters, and together the text of decoding all ids at
once."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

BROKEN = "\ufffd"
"""What bytes that are no whole character decode to."""


class Detokenizer:
    """Decodes one reply, one or more ids at a time. Special tokens give no text."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._delivered = 0
        self._unstreamed = 0  # leading ids that were decoded at once

    def step(self, token: int) -> str:
        """The text that is certain with this id; empty while a character is incomplete."""
        return self.steps([token])

    def steps(self, tokens: list[int]) -> str:
        """`step` for several ids at once; text before an incomplete character may come with a later call."""
        if not tokens:
            return ""
        first = not self._ids
        self._ids += tokens
        if first and len(tokens) > 1:  # often the whole reply; the stream would decode it twice
            whole: str = self._backend.decode(tokens, skip_special_tokens=True)
            if not whole.endswith(BROKEN):
                self._delivered, self._unstreamed = len(whole), len(tokens)
                return whole
        if self._unstreamed:
            self._stream.step(self._backend, self._ids[: self._unstreamed])
            self._unstreamed = 0
        text = self._stream.step(self._backend, tokens) or ""
        self._delivered += len(text)
        return text

    def flush(self) -> str:
        """The rest of the text at the end: bytes that never became a character, as U+FFFD."""
        if self._unstreamed:
            return ""
        text: str = self._backend.decode(self._ids, skip_special_tokens=True)[self._delivered :]
        self._delivered += len(text)
        return text
