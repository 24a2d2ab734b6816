"""Tokenizes text piece by piece while it grows: the ids of its stable prefix, which no later text can change.

Tokenizers cut text into words (pre-tokens) and then tokenize each word on its own. So all words are stable but
the last ones, which more text may change. Not stable are: white space at the end (it joins what follows, and
templates strip it), the last two words (``it'`` and ``s`` are one word in some tokenizers), and an end that may
become a control token. Tokenizers without words (SentencePiece merges over the whole text) are stable up to the
last single space, if no token of theirs has a space inside. If every token is one character, all is stable.

The rule describes the pre-tokenizers in use, not all possible ones. So the turn still compares the prefilled
tokens with those of the whole text: a difference costs a recompute and never a wrong token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from tokenizers import normalizers

from ..token_ids import NONE, Ids, frozen, ids_of
from .stop_strings import overlap
from .tokenizer import ChatTokenizer, TokenizedText

PIECE = 16_384
"""Characters of a long text that are tokenized together."""

BEHIND = 512
"""Characters behind a piece that are tokenized with it, to see that the piece may end there."""

HELD_WORDS = 2
"""How many words at the end later text may still change."""

SPACE_PIECE = "▁"
"""A space, as SentencePiece writes it into tokens."""

_WORD_BEGINS = re.compile(r"(?<=\S) (?=\S)")


@dataclass(frozen=True, slots=True)
class StablePrefix:
    """Ids of a text that later text cannot change.

    The first ``tokens`` of them are the text's first ``characters``; the text behind these can be tokenized on
    its own.
    """

    ids: list[int] = field(default_factory=list)
    tokens: int = 0
    characters: int = 0


class StablePrefixRule:
    """The rule for one tokenizer. Making one reads the whole vocabulary, so all sessions share it."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        backend = tokenizer.backend
        probe = backend.encode("one two three", add_special_tokens=False).word_ids
        self._words = len(set(probe)) > 1
        self._rewrites = backend.normalizer is not None
        self._composes = isinstance(backend.normalizer, normalizers.NFC)
        inner = re.compile(f"[^{SPACE_PIECE}]{SPACE_PIECE}")
        vocabulary = backend.get_vocab(with_added_tokens=False)
        self._single = not self._rewrites and max(map(len, vocabulary), default=0) == 1
        self._spaces_split = not any(map(inner.search, backend.get_vocab()))
        self._added = [known.content for known in backend.get_added_tokens_decoder().values()]
        self._behind = max(BEHIND, 4 * max(map(len, self._added), default=0))

    def encode(
        self, text: str, *, leads: bool, most: int | None = None, stopped: Callable[[], bool] = bool
    ) -> Ids:
        """The ids of `ChatTokenizer.encode`, made piece by piece if the text is long.

        Stops after the piece that makes them ``most`` or more, or after which ``stopped`` is true.
        """
        if len(text) <= PIECE:
            return ids_of(self._tokenizer.encode(text, leads=leads))
        ids, count = [NONE], 0
        for piece, _ in self.pieces(text, leads=leads):
            ids.append(ids_of(piece))
            count += len(piece)
            if stopped() or (most is not None and count >= most):
                break
        return frozen(np.concatenate(ids))

    def raw(
        self,
        text: str,
        *,
        special: bool,
        most: int | None = None,
        stopped: Callable[[], bool] = bool,
    ) -> list[int]:
        """The ids of a text without marks, as the tokenizers library makes them: names of control tokens in it
        count as those tokens. ``special``: with the tokens that the tokenizer puts around a text. Stops early
        as `encode` does; then the ids are incomplete."""
        before, after = self._tokenizer.around if special else ([], [])
        ids = list(before)
        for piece, _ in self._plain_pieces(text, 0, len(text), leads=True):
            ids += piece
            if stopped() or (most is not None and len(ids) >= most):
                break
        return ids + after

    def pieces(self, text: str, *, leads: bool, start: int = 0) -> Iterator[tuple[list[int], int]]:
        """The ids of rendered text from ``start`` on in pieces, each with the character it ends at.

        The text behind ``start`` and behind each piece can be tokenized on its own.
        """
        for begin, end, token in self._tokenizer.marked(text, start):
            yield from self._plain_pieces(text, start, begin, leads=leads and not start)
            yield [] if token is None else self._tokenizer.spell(token), end
            start = end
        yield from self._plain_pieces(text, start, len(text), leads=leads and not start)

    def _plain_pieces(
        self, text: str, start: int, end: int, *, leads: bool
    ) -> Iterator[tuple[list[int], int]]:
        """Yield the ids of ``text[start:end]``, which has no marks, in pieces, each with the character in
        ``text`` at which it ends. ``leads``: the text begins the prompt."""
        size = PIECE
        while end - start > size + self._behind:
            piece = self._beginning(text[start : start + size + self._behind], size, leads=leads)
            if piece.characters:
                start += piece.characters
                leads, size = False, PIECE
                yield piece.ids[: piece.tokens], start
            else:
                size *= 2  # a word is longer than that
        if start < end:
            yield self._tokenizer.split(text[start:end], leads=leads).ids, end

    def prefix_of(self, text: str, *, leads: bool) -> StablePrefix:
        """The stable prefix of rendered text that is still being written at its end.

        Its ids begin those of `ChatTokenizer.encode` for the text and anything behind it. ``leads`` as there.
        """
        end = len(self.stable_text(text))
        fixed = self._tokenizer.last_control(text[:end])
        head = self._tokenizer.encode(text[:fixed], leads=leads) if fixed else []
        leads = self._tokenizer.leads(text[:fixed]) if fixed else leads
        rest = self._beginning(text[fixed:end], end - fixed, leads=leads)
        if not rest.tokens:  # a control token may take in white space behind it
            return StablePrefix(head + rest.ids)
        return StablePrefix(head + rest.ids, len(head) + rest.tokens, fixed + rest.characters)

    def stable_text(self, text: str) -> str:
        """The text without an end that may be stripped, or may become a control token."""
        stripped = text.rstrip()
        return stripped[: len(stripped) - overlap(stripped, self._added)]

    def _beginning(self, text: str, size: int, *, leads: bool) -> StablePrefix:
        """The stable prefix of text without marks; its ``characters`` are at most ``size``."""
        if not self._words or self._single:
            end = size if self._single else 0
            if self._spaces_split and not self._single:
                end = max((found.start() for found in _WORD_BEGINS.finditer(text, 0, size)), default=0)
            ids = self._tokenizer.split(text[:end], leads=leads).ids
            return StablePrefix(ids, len(ids), end)
        split = self._tokenizer.split(text, leads=leads)
        stable = _stable_tokens(split)
        seam = self._seam(text, split, stable, size)
        end = split.end(seam - 1) if seam else 0
        if not self._separable(text, split, seam, end, leads=leads):
            seam = end = 0
        return StablePrefix(split.ids[:stable], seam, end)

    def _seam(self, text: str, split: TokenizedText, stable: int, size: int) -> int:
        """At which token ``text`` can be cut in two: how many of the first ``stable`` tokens end where a word
        does, within ``size`` characters and not in white space. 0 if there is no such offset.

        No seam is next to an added token, because some of those take in white space.
        """
        for at in range(stable, 0, -1):
            word, end = split.word(at - 1), split.end(at - 1)
            ends = word is not None and word != split.word(at) and end <= size
            if (
                ends
                and text[end - 1 : end].strip()
                and self._tokenizer.added.keys().isdisjoint(split.ids[at - 1 : at + 1])
            ):
                return at
        return 0

    def _separable(self, text: str, split: TokenizedText, seam: int, end: int, *, leads: bool) -> bool:
        """Whether both sides of the seam, tokenized on their own, have the same ids as in the whole text.

        Some tokenizers strip both ends of a text, or cut words inside a character. The head is tokenized again
        only if the normalizer may join characters across the seam.
        """
        if self._tokenizer.split(text[end:], leads=False).ids != split.ids[seam:]:
            return False
        if not self._rewrites or (self._composes and text[end - 1 : end + 1].isascii()):
            return True
        return self._tokenizer.split(text[:end], leads=leads).ids == split.ids[:seam]


def _stable_tokens(split: TokenizedText) -> int:
    """How many tokens come before the last `HELD_WORDS` words."""
    stable = len(split.ids)
    last = split.word(stable - 1) if stable else None
    if last is None:
        return 0
    for at in range(stable - 1, -1, -1):
        word = split.word(at)
        if word is not None and word <= last - HELD_WORDS:
            break
        stable = at if word is not None else stable
    return stable


class GrowingPrefix:
    """The stable prefix of a text that grows. Each call tokenizes only the end of the text again."""

    def __init__(self, rule: StablePrefixRule) -> None:
        self._rule = rule
        self._text = ""
        self._leads = False
        self._ids = NONE

    def ids(self, text: str, *, leads: bool) -> Ids:
        """The ids of ``text`` that no later text can change: those of `StablePrefixRule.prefix_of`, or some
        more. ``text`` should begin with the text of the call before; if it does not, all of it is tokenized.
        """
        if leads != self._leads or not text.startswith(self._text):
            self._text, self._leads, self._ids = "", leads, NONE
        there = len(self._text)
        if len(text) - there > 2 * PIECE:
            there = self._take_pieces(text, there, leads=leads)
        more = self._rule.prefix_of(text[there:], leads=leads and not there)
        whole = frozen(np.concatenate([self._ids, ids_of(more.ids)]))
        self._text, self._ids = text[: there + more.characters], whole[: len(self._ids) + more.tokens]
        return whole

    def _take_pieces(self, text: str, there: int, *, leads: bool) -> int:
        """Add the pieces of the text from character ``there`` on that end far from its end. Returns where the
        last of them ends."""
        ids = [self._ids]
        for piece, end in self._rule.pieces(text, leads=leads, start=there):
            if end > len(text) - PIECE:
                break
            ids.append(ids_of(piece))
            there = end
        self._ids = frozen(np.concatenate(ids))
        return there
