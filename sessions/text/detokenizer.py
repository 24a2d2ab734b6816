"""Token ids to text while they come: whole characters, each with its last byte, and none is taken back.

Most vocabularies give each token bytes of its own, whatever tokens are around it: byte-level ones (GPT-2's
letters), and those of SentencePiece, with or without tokens for single bytes (``<0x0A>``). A reply's text is
these bytes, decoded as they come. Bytes that cannot become a character any more are U+FFFD, as many as the
tokenizers library makes of them. Of a run of byte tokens with a bad one the library makes nothing but U+FFFD;
here its good characters stay, as they were sent before the bad byte came.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from tokenizers import Tokenizer

BROKEN = "\ufffd"
"""What bytes that are no character decode to."""
SPACE = "\u2581"
"""How SentencePiece writes a space."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_EACH = "holdfast.each"
_OWN_TEXT = {"Sequence", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
"""Decoders, and steps of one, that give each token a text of its own, but for a space at the beginning."""


def _each_broken(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError), "it is used to decode"
    return BROKEN * (error.end - error.start), error.end


codecs.register_error(_EACH, _each_broken)


class TokenTexts:
    """What each token of one vocabulary stands for, where that does not depend on the tokens around it. One
    table serves all replies."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._special = {one for one, known in backend.get_added_tokens_decoder().items() if known.special}
        steps = set(_steps_of(backend))
        self._byte_level, self._byte_tokens = steps == {"ByteLevel"}, "ByteFallback" in steps
        words = _words(backend) if steps and steps <= _OWN_TEXT else {}
        self._inside = next((token for word, token in words.items() if word[0] != SPACE), None)
        """A token behind which the text of another one is whole."""
        self.independent = self._byte_level or self._inside is not None
        """Whether each token has bytes of its own."""
        self.errors = _EACH if self._byte_tokens else "replace"
        """How bytes that are no character are decoded: the name of an error handler of `codecs`."""
        self.known: dict[int, str | None] = {}
        """A cache of the results of `of`, by token id."""
        spaced = next((token for word, token in words.items() if word[0] == SPACE), None)
        self.drops_space = spaced is not None and not backend.decode([spaced]).startswith(" ")
        """Whether the library drops a space at the beginning of a text."""

    def of(self, token: int) -> str | None:
        """The token's text; "" for a special token. None if it may end or begin within a character, or if it
        depends on other tokens."""
        try:
            return self.known[token]
        except KeyError:
            try:
                text = self.bytes_of(token).decode() if self.independent else None
            except UnicodeDecodeError:
                text = None
            return self.known.setdefault(token, text)

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token stands for, if the vocabulary is `independent`; none for a special token, and
        for an id that is not in the vocabulary."""
        written = self._backend.id_to_token(token)
        if written is None or token in self._special:
            return b""
        if self._byte_level:
            letters = _letters()
            known = all(letter in letters for letter in written)  # an added token may be written in any
            return bytes(letters[letter] for letter in written) if known else str(written).encode()
        if self._byte_tokens and (byte := _BYTE.fullmatch(written)):
            return bytes([int(byte[1], 16)])
        assert self._inside is not None, "the vocabulary is independent"
        before = self._backend.decode([self._inside])
        return str(self._backend.decode([self._inside, token])[len(before) :]).encode()


class Detokenizer:
    """Decodes one reply, one or more ids at a time. Special tokens give no text. ``texts``: the table of the
    backend's vocabulary; by default a new one. ``leads``: the reply is a text of its own, from which the
    library drops a space at the beginning; otherwise it goes on behind other text."""

    def __init__(self, backend: Tokenizer, texts: TokenTexts | None = None, *, leads: bool = True) -> None:
        self._backend = backend
        self._texts = TokenTexts(backend) if texts is None else texts
        self._decoder = codecs.getincrementaldecoder("utf-8")(self._texts.errors)
        self.within = False
        """Whether the last character is incomplete."""
        self._leads = leads and self._texts.drops_space
        self._ids: list[
            int
        ] = []  # of a vocabulary that is not independent: the last piece of text, and others
        self._told = 0  # how many of these have been told

    def alone(self, token: int) -> str | None:
        """The text that `step` would return for this token, if it does not depend on other tokens and is not
        empty; else None. Nothing changes."""
        texts = self._texts
        if self.within or self._leads:
            return None
        return texts.known.get(token) or texts.of(token) or None

    def step(self, token: int) -> str:
        """Decode one more id. Returns the text that is certain now; empty while a character is incomplete."""
        return self.steps([token])

    def steps(self, tokens: Sequence[int]) -> str:
        """Decode several more ids in one call. Returns the text that is certain now."""
        texts = self._texts
        if not texts.independent:
            return self._streamed(tokens)
        if not self.within:
            own = [text for text in map(texts.of, tokens) if text is not None]
            if len(own) == len(tokens):
                return self._begun("".join(own))
        text = self._decoder.decode(b"".join(map(texts.bytes_of, tokens)))
        self.within = bool(self._decoder.getstate()[0])
        return self._begun(text)

    def flush(self) -> str:
        """The rest of the text at the end: bytes that never became a character, as U+FFFD."""
        if not self._texts.independent:
            return self._streamed((), last=True)
        self.within = False
        return self._begun(self._decoder.decode(b"", final=True))

    def _begun(self, text: str) -> str:
        if self._leads and text:
            self._leads = False
            return text.removeprefix(" ")
        return text

    def _streamed(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """What more ids add to the text of those before. A character may be in several, so only text that does
        not end in U+FFFD is certain."""
        self._ids += tokens
        before = self._decoded(self._ids[: self._told])
        text = self._decoded(self._ids)
        if len(text) <= len(before) or (text.endswith(BROKEN) and not last):
            return ""
        self._ids, self._told = self._ids[self._told :], len(self._ids) - self._told
        return text[len(before) :]

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=True))


def _steps_of(backend: Tokenizer) -> Iterator[str]:
    """The types in the description of a decoder, and of its parts."""
    waiting: list[Any] = [None if backend.decoder is None else json.loads(backend.decoder.__getstate__())]
    while waiting:
        if (part := waiting.pop()) is not None:
            yield part["type"]
            waiting += part.get("decoders", ())


def _words(backend: Tokenizer) -> dict[str, int]:
    """A token of plain letters, and one with a space before them, by their writing; of each the first."""
    found: dict[bool, tuple[str, int]] = {}
    for written, token in backend.get_vocab(with_added_tokens=False).items():
        word = written.removeprefix(SPACE)
        if word.isascii() and word.isalpha():
            found.setdefault(word != written, (written, token))
            if len(found) == 2:
                break
    return dict(found.values())


@cache
def _letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for (GPT-2's ``bytes_to_unicode``)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}
