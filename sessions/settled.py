"""Which tokens of a text that is still being written no later text can change.

Tokenizers cut text into words (pre-tokens) and then each word into tokens on its own, so all words are settled
but the last ones: those a letter, a mark or a line break could still grow into or be drawn into. Held back are
trailing white space (it joins what follows, and templates strip it), the last two words (``it'`` and ``s`` are
one word in some tokenizers), and what could become a control token. Tokenizers without words (SentencePiece's
merges run over the whole text) settle at a space that no token of theirs has in its middle. Where every token
is a single character nothing is held back.

The rule is of what pre-tokenizers in use do, not of what one could: whoever prefills settled tokens still
compares them with those of the whole text, and what differs costs a recompute, never a wrong token.
Knows nothing of templates or sessions.
"""

from __future__ import annotations

import re

from .tokenizer import ChatTokenizer

HELD_WORDS = 2
"""How many words at the end later text may still change."""

SPACE_PIECE = "▁"
"""A space, as SentencePiece writes it into tokens."""

_WORD_BEGINS = re.compile(r"(?<=\S) (?=\S)")


class Settled:
    """The rule for one tokenizer."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        backend = tokenizer.backend
        probe = backend.encode("one two three", add_special_tokens=False).word_ids
        self._words = len(set(probe)) > 1
        inner = re.compile(f"[^{SPACE_PIECE}]{SPACE_PIECE}")
        vocabulary = backend.get_vocab(with_added_tokens=False)
        self._single = backend.normalizer is None and max(map(len, vocabulary), default=0) == 1
        self._spaces_settle = not self._words and not any(map(inner.search, backend.get_vocab()))
        added = [known.content for known in backend.get_added_tokens_decoder().values()]
        self._beginnings = frozenset(token[:end] for token in added for end in range(1, len(token)))
        self._longest = max(map(len, added), default=0)

    def ids(self, text: str, *, leads: bool) -> list[int]:
        """Leading ids of rendered text that is still being written at its end.

        They begin `ChatTokenizer.encode` of the text and whatever comes behind it. ``leads`` as there.
        """
        end = len(self.standing(text))
        fixed = self._tokenizer.last_control(text[:end])
        head = self._tokenizer.encode(text[:fixed], leads=leads) if fixed else []
        return head + self._words_of(text[fixed:end], leads=leads and not fixed)

    def standing(self, text: str) -> str:
        """The text without its end that could yet be stripped, or become a control token."""
        stripped = text.rstrip()
        return stripped[: len(stripped) - self._unfinished(stripped)]

    def _unfinished(self, text: str) -> int:
        """Length of the longest end of ``text`` that could become a control token."""
        for length in range(min(self._longest, len(text)), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0

    def _words_of(self, text: str, *, leads: bool) -> list[int]:
        if not text:
            return []
        if self._single:
            return self._tokenizer.encode(text, leads=leads)
        if not self._words:
            spaces = [found.start() for found in _WORD_BEGINS.finditer(text)] if self._spaces_settle else []
            return self._tokenizer.encode(text[: spaces[-1]], leads=leads) if spaces else []
        ids, words = self._tokenizer.words(text, leads=leads)
        last = words[-1] if words else None
        if last is None:
            return []
        known = [at for at, word in enumerate(words) if word is None or word <= last - HELD_WORDS]
        settled = 0
        while settled < len(known) and known[settled] == settled:
            settled += 1
        return ids[:settled]
