"""Reads replies in channels from streamed text: the harmony form of gpt-oss.

A reply is one or more messages, ``<|channel|>CHANNEL to=RECIPIENT <|constrain|>json<|message|>CONTENT<|end|>``,
with ``<|start|>assistant`` between two of them. The part before ``<|message|>`` is the header. A message with a
recipient is a call; one in the channel ``analysis`` is reasoning; any other is text
(https://cookbook.openai.com/articles/openai-harmony). Text without a header is text. The result does not depend
on how the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto

import regex

from ..conversation.items import MAX_NAME
from ..text.stop_strings import first_tag
from .objects import SPACE, ObjectScanner
from .scanner import CallArguments, CallClosed, CallOpened, CallParser, Piece, PlainText, ReasoningText

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
"""The special tokens of the harmony form."""

JOINT = "\n\n"
"""Put between two messages of one reply that follow each other and are both text, or both reasoning."""
MAX_HEADER = 1024
"""The most characters of one header, the part of a message before ``<|message|>``."""

_HEADER = regex.compile(
    r"\s*(?:<\|start\|>)?\s*(?:assistant)?(?P<role>\s*to=[^\s<]+)?\s*"
    r"(?:<\|channel\|>\s*(?P<channel>\w*)(?P<rest>[^<]*))?(?:<\|constrain\|>[^<]*)?<\|message\|>"
)
_RECIPIENT = regex.compile(r"\bto=(?:functions\.)?(?P<name>[^\s<]+)")


class _Content(Enum):
    """What the next text belongs to: a header, or the content of a message of some kind."""

    HEADER = auto()
    REASONING = auto()
    TEXT = auto()
    CALL = auto()
    OVER = auto()  # a call's arguments are whole or broken: skip the rest of the message


class ChannelParser(CallParser):
    """Splits one reply in the harmony form of gpt-oss into reasoning, text and calls. If ``parse_calls`` is
    false, the content of calls is text."""

    def __init__(self, *, parse_calls: bool = True) -> None:
        super().__init__(_Content.HEADER)
        self._parse_calls = parse_calls
        self._said: Enum | None = None  # the kind of the last message that had content
        self._begun = False  # the open message has had content
        self._arguments = ObjectScanner()

    def _read_on(self) -> Iterator[Piece]:
        return self._header() if self._state is _Content.HEADER else self._message()

    def finish(self, *, cut: bool) -> Iterator[Piece]:
        """The rest; see `CallParser.finish`. A header without an end is dropped."""
        held, self._held = self._held, ""
        if self._state is not _Content.HEADER:
            yield from self._more(held)
        elif "<" not in held and held.strip():
            yield from self._words(held, _Content.TEXT)
        yield from self._end(cut=cut)

    def _header(self) -> Iterator[Piece]:
        header = _HEADER.match(self._held, partial=True)
        if header is not None and header.partial and len(self._held) <= MAX_HEADER:
            return
        if header is None or header.partial or header.end() > MAX_HEADER:
            bare = self._held.lstrip()  # no header: what would be one is text
            tag = next((tag for tag in (START, CHANNEL) if bare.startswith(tag)), "")
            self._state, self._held = _Content.TEXT, bare[len(tag) :] if tag else self._held
            return
        self._held = self._held[header.end() :]
        to = _RECIPIENT.search(f"{header['role'] or ''} {header['rest'] or ''}")
        if to is not None and self._parse_calls and len(to["name"]) <= MAX_NAME:
            self._state, self._arguments = _Content.CALL, ObjectScanner()
            self._said = None
            yield CallOpened(to["name"])
        elif header["channel"] == "analysis" and to is None:
            self._state = _Content.REASONING
        else:
            self._state = _Content.TEXT

    def _message(self) -> Iterator[Piece]:
        at, tag = first_tag(self._held, (*ENDS, START, CHANNEL))
        content = self._held[:at]
        self._held = self._held[at + len(tag) :] if tag in ENDS else self._held[at:]
        yield from self._more(content)
        if tag:
            yield from self._end()

    def _more(self, content: str) -> Iterator[Piece]:
        """Yield the pieces for ``content``, more text of the open message."""
        if self._state is _Content.CALL:
            yield from self._argued(content)
        elif self._state is not _Content.OVER:
            yield from self._words(content, self._state)

    def _words(self, words: str, kind: Enum) -> Iterator[Piece]:
        if words:
            words = words if self._begun or self._said is not kind else JOINT + words
            self._begun, self._said = True, kind
            yield ReasoningText(words) if kind is _Content.REASONING else PlainText(words)

    def _argued(self, content: str) -> Iterator[Piece]:
        content = content if self._begun else content.lstrip(SPACE)
        if self._arguments.feed(content):
            self._begun = True
        if self._arguments.written:
            yield CallArguments(self._arguments.written)
        if self._arguments.done or self._arguments.broken:
            self._state = _Content.OVER
            yield CallClosed(self._arguments.done)

    def _end(self, *, cut: bool = False) -> Iterator[Piece]:
        """End the open message, and yield what closes its call if it is one. ``cut``: the reply was ended
        from outside. A call without content gets the arguments ``{}``."""
        if self._state is _Content.CALL:
            empty = not self._begun and not cut
            if empty:
                yield CallArguments("{}")
            yield CallClosed(empty)
        self._state, self._begun = _Content.HEADER, False
