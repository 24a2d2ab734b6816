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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from tokenizers import normalizers

from ..token_ids import NONE, Ids, frozen, ids_of
from .tokenizer import ChatTokenizer, TokenizedPart, TokenizedText

PIECE = 16_384
"""Characters of a long text that are tokenized together."""

BEHIND = 512
"""Characters behind a piece that are looked at, too, before it is taken to be one."""

HELD_WORDS = 2
"""How many words at the end later text may still change."""

SPACE_PIECE = "▁"
"""A space, as SentencePiece writes it into tokens."""

_WORD_BEGINS = re.compile(r"(?<=\S) (?=\S)")


@dataclass(frozen=True, slots=True)
class StablePrefix:
    """Ids of a text that later text cannot change; ``tokens`` of them are those of its first ``characters``.

    The text behind these characters can be tokenized on its own.
    """

    ids: list[int] = field(default_factory=list)
    tokens: int = 0
    characters: int = 0


class StablePrefixRule:
    """The rule for one tokenizer."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        backend = tokenizer.backend
        probe = backend.encode("one two three", add_special_tokens=False).word_ids
        self._words = len(set(probe)) > 1
        self._rewrites = backend.normalizer is not None
        self._composes = not self._rewrites or isinstance(backend.normalizer, normalizers.NFC)
        inner = re.compile(f"[^{SPACE_PIECE}]{SPACE_PIECE}")
        vocabulary = backend.get_vocab(with_added_tokens=False)
        self._single = backend.normalizer is None and max(map(len, vocabulary), default=0) == 1
        self._spaces_settle = not self._words and not any(map(inner.search, backend.get_vocab()))
        added = [known.content for known in backend.get_added_tokens_decoder().values()]
        self._beginnings = frozenset(token[:end] for token in added for end in range(1, len(token)))
        self._longest = max(map(len, added), default=0)
        self._behind = max(BEHIND, 4 * self._longest)

    def encode(
        self, text: str, *, leads: bool, most: int | None = None, stopped: Callable[[], bool] = bool
    ) -> Ids:
        """The ids of `ChatTokenizer.encode`, made piece by piece where the text is long.

        Stops behind the piece with which there are ``most`` or more, or after which it is ``stopped``.
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

    def pieces(self, text: str, *, leads: bool, start: int = 0) -> Iterator[tuple[list[int], int]]:
        """The ids of rendered text from ``start`` on, in pieces, each with where it ends in the text.

        What stands behind each piece can be tokenized by itself; so can what stands behind ``start``.
        """
        for begin, end, token in self._tokenizer.marked(text, start):
            yield from self._plain_pieces(text, start, begin, leads=leads and not start)
            yield [] if token is None else self._tokenizer.spell(token), end
            start = end
        yield from self._plain_pieces(text, start, len(text), leads=leads and not start)

    def _plain_pieces(
        self, text: str, start: int, end: int, *, leads: bool
    ) -> Iterator[tuple[list[int], int]]:
        """Of a part of the text without marks; ``leads``: it begins the prompt."""
        size = PIECE
        while end - start > size + self._behind:
            ids, characters = self._piece(text[start : start + size + self._behind], size, leads=leads)
            if characters:
                start += characters
                leads, size = False, PIECE
                yield ids, start
            else:
                size *= 2  # a word that is longer than that
        if start < end:
            yield self._tokenizer.encode(text[start:end], leads=leads), end

    def _piece(self, text: str, size: int, *, leads: bool) -> tuple[list[int], int]:
        """Of the text's first ``size`` characters as many as are a piece: their ids, and how many they are."""
        if self._single:
            return self._tokenizer.encode(text[:size], leads=leads), size
        if not self._words:
            ends = (
                [found.start() for found in _WORD_BEGINS.finditer(text, 0, size)]
                if self._spaces_settle
                else []
            )
            return (self._tokenizer.encode(text[: ends[-1]], leads=leads), ends[-1]) if ends else ([], 0)
        try:
            cut = self._tokenizer.cut(text, leads=leads)
        except ValueError:
            return [], 0
        at = self._last_seam(cut, text, size)
        end = cut.end(at - 1) if at else 0
        if not at or not self._stands(text, cut.ids, at, end, leads=leads):
            return [], 0
        return cut.ids[:at], end

    def _last_seam(self, cut: TokenizedPart, text: str, size: int) -> int:
        """How many tokens of the text's first ``size`` characters end with a word that is no white space.

        Where the tokenizer rewrites text no letter may be joined with what is behind it. Added tokens are not
        cut off: some take white space that stands around them.
        """
        last, added = cut.word(len(cut.ids) - 1) if cut.ids else None, self._tokenizer.added
        if last is None:
            return 0
        for at in range(len(cut.ids) - 1, 0, -1):
            word, end = cut.word(at - 1), cut.end(at - 1)
            if word is None or word > last - HELD_WORDS or end > size or word == cut.word(at):
                continue
            around = text[end - 1 : end + 1]
            plain = around.isascii() or not self._rewrites
            if around[:1].strip() and plain and cut.ids[at - 1] not in added and cut.ids[at] not in added:
                return at
        return 0

    def _stands(self, text: str, ids: list[int], seam: int, end: int, *, leads: bool) -> bool:
        """Whether both parts of the text have by themselves the tokens that they have in it."""
        encode = self._tokenizer.encode
        if encode(text[end:], leads=False) != ids[seam:]:
            return False
        return self._composes or encode(text[:end], leads=leads) == ids[:seam]

    def prefix_of(self, text: str, *, leads: bool) -> StablePrefix:
        """What is settled of rendered text that is still being written at its end.

        Its ids begin `ChatTokenizer.encode` of the text and whatever comes behind it. ``leads`` as there.
        """
        end = len(self.stable_text(text))
        fixed = self._tokenizer.last_control(text[:end])
        head = self._tokenizer.encode(text[:fixed], leads=leads) if fixed else []
        words = self._words_of(text[fixed:end], leads=self._tokenizer.leads(text[:fixed]) if fixed else leads)
        if not words.tokens:  # a control token may take white space that comes behind it
            return StablePrefix(head + words.ids)
        return StablePrefix(head + words.ids, len(head) + words.tokens, fixed + words.characters)

    def stable_text(self, text: str) -> str:
        """The text without its end that could yet be stripped, or become a control token."""
        stripped = text.rstrip()
        return stripped[: len(stripped) - self._unfinished(stripped)]

    def _unfinished(self, text: str) -> int:
        """Length of the longest end of ``text`` that could become a control token."""
        for length in range(min(self._longest, len(text)), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0

    def _words_of(self, text: str, *, leads: bool) -> StablePrefix:
        if not text:
            return StablePrefix()
        if self._single:
            return self._up_to(text, len(text), leads=leads)
        if not self._words:
            spaces = [found.start() for found in _WORD_BEGINS.finditer(text)] if self._spaces_settle else []
            return self._up_to(text, spaces[-1], leads=leads) if spaces else StablePrefix()
        cut = self._tokenizer.words(text, leads=leads)
        last = cut.words[-1] if cut.words else None
        if last is None:
            return StablePrefix()
        known = [at for at, word in enumerate(cut.words) if word is None or word <= last - HELD_WORDS]
        settled = 0
        while settled < len(known) and known[settled] == settled:
            settled += 1
        seam = _seam(text, cut, settled)
        end = cut.ends[seam - 1] if seam else 0
        if seam and not self._parts(text, cut, seam, end, leads=leads):
            seam = end = 0
        return StablePrefix(cut.ids[:settled], seam, end)

    def _parts(self, text: str, cut: TokenizedText, seam: int, end: int, *, leads: bool) -> bool:
        """Whether both parts of the text have by themselves the tokens that they have in it.

        Some tokenizers take white space off each end, or cut words within a character; and of letters that a
        normalizer joins only the first counts as theirs.
        """
        words = self._tokenizer.words
        if words(text[end:], leads=False).ids != cut.ids[seam:]:
            return False
        return not self._rewrites or words(text[:end], leads=leads).ids == cut.ids[:seam]

    def _up_to(self, text: str, end: int, *, leads: bool) -> StablePrefix:
        ids = self._tokenizer.encode(text[:end], leads=leads)
        return StablePrefix(ids, len(ids), end)


class GrowingPrefix:
    """A text that grows, and what is settled of it; of more of the same only the end is tokenized."""

    def __init__(self, rule: StablePrefixRule) -> None:
        self._rule = rule
        self._text = ""
        self._leads = False
        self._ids = NONE

    def ids(self, text: str, *, leads: bool) -> Ids:
        """The ids of `StablePrefixRule.beginning`."""
        if leads != self._leads or not text.startswith(self._text):
            self._text, self._leads, self._ids = "", leads, NONE
        there = len(self._text)
        if len(text) - there > 2 * PIECE:
            there = self._run_ahead(text, there, leads=leads)
        more = self._rule.prefix_of(text[there:], leads=leads and not there)
        whole = frozen(np.concatenate([self._ids, ids_of(more.ids)]))
        self._text, self._ids = text[: there + more.characters], whole[: len(self._ids) + more.tokens]
        return whole

    def _run_ahead(self, text: str, there: int, *, leads: bool) -> int:
        """Take in what stands far from the end, piece by piece; where it ends."""
        ids = [self._ids]
        for piece, end in self._rule.pieces(text, leads=leads, start=there):
            if end > len(text) - PIECE:
                break
            ids.append(ids_of(piece))
            there = end
        self._ids = frozen(np.concatenate(ids))
        return there


def _seam(text: str, cut: TokenizedText, settled: int) -> int:
    """How many of the settled tokens end at the end of a word that is no white space: what tokenizers make of
    what stands behind does not depend on what stands before."""
    for at in range(settled, 0, -1):
        word, end = cut.words[at - 1], cut.ends[at - 1]
        if word is not None and word != cut.words[at] and text[end - 1 : end].strip():
            return at
    return 0
