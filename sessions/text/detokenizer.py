"""Token ids to text while they come: only whole characters, and together the text of decoding all ids at
once."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel, DecodeStream

BROKEN = "\ufffd"
"""What bytes that are no whole character decode to."""


class TokenTexts:
    """The text of each token of one vocabulary, where it does not depend on the tokens around it: in a
    byte-level vocabulary, as its decoder only joins the tokens' bytes. One table serves all replies.
    """

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self.independent = isinstance(backend.decoder, ByteLevel)
        """Whether the text of a token does not depend on the tokens around it: the vocabulary is byte-level."""
        self.known: dict[int, str | None] = {}
        """A cache of the results of `of`, by token id: the token's text, or None if that depends on other
        tokens."""

    def of(self, token: int) -> str | None:
        """The token's text; "" for a special token. None if it depends on other tokens: the token may end or
        begin within a character, or the vocabulary is not byte-level."""
        try:
            return self.known[token]
        except KeyError:
            text: str = self._backend.decode([token], skip_special_tokens=True)
            known = None if BROKEN in text or not self.independent else text
            return self.known.setdefault(token, known)


class Detokenizer:
    """Decodes one reply, one or more ids at a time. Special tokens give no text. ``texts``: the table of the
    backend's vocabulary; by default a new one."""

    def __init__(self, backend: Tokenizer, texts: TokenTexts | None = None) -> None:
        self._backend = backend
        self._texts = TokenTexts(backend) if texts is None else texts
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []  # with texts of their own: since the last whole character; else: all
        self._delivered = 0
        self._unstreamed = 0  # leading ids that were decoded at once

    def alone(self, token: int) -> str | None:
        """The text that `step` would return for this token, if it does not depend on other tokens and is not
        empty; else None. Nothing changes."""
        texts = self._texts
        if self._ids or not texts.independent:
            return None
        return texts.known.get(token) or texts.of(token) or None

    def step(self, token: int) -> str:
        """Decode one more id. Returns the text that is certain now; empty while a character is incomplete."""
        return self.steps([token])

    def steps(self, tokens: list[int]) -> str:
        """Decode several more ids in one call. Returns the text that is certain now. If the last character is
        incomplete, it may be empty, and the text before that character comes with a later call."""
        if not tokens:
            return ""
        return self._joined(tokens) if self._texts.independent else self._streamed(tokens)

    def _joined(self, tokens: list[int]) -> str:
        if not self._ids and len(tokens) == 1 and (own := self._texts.of(tokens[0])) is not None:
            return own
        self._ids += tokens
        text: str = self._backend.decode(self._ids, skip_special_tokens=True)
        if text.endswith(BROKEN):
            return ""
        self._ids.clear()
        return text

    def _streamed(self, tokens: list[int]) -> str:
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
        if self._texts.independent:
            self._ids.clear()
        else:
            self._delivered += len(text)
        return text
