"""Tool calls as JSON without tags of their own: the forms of Llama 3 and of Mistral, from streamed text.

    llama3-json   {"name": "f", "parameters": {…}}; {"name": "g", "parameters": {…}}      the whole reply
    mistral       [TOOL_CALLS] [{"name": "f", "arguments": {…}}, …]  or  [TOOL_CALLS]f[ARGS]{…}[TOOL_CALLS]g…

A call is told the moment the object of its arguments closes. The result does not depend on how the text was cut
into pieces. Knows nothing of items or ids.
"""

from __future__ import annotations

from collections.abc import Iterator

import regex

from ..items import MAX_NAME
from .hermes import CallArguments, CallClosed, CallOpened, Piece, Splitter, State, Text, name_in, whole_call
from .json_scanner import ObjectScanner

PYTHON_TAG, TOOL_CALLS = "<|python_tag|>", "[TOOL_CALLS]"

_OBJECT = regex.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*\{'
)
_NAMED = regex.compile(r"(?P<name>[A-Za-z0-9_.-]+)\s*(?:\[CALL_ID\][^\[\s]*\s*)?(?:\[ARGS\])?\s*\{")
_FIRST_KEY = regex.compile(r'\{\s*"([^"\\]*)"')
_KEYS = frozenset({"name", "type", "id", "arguments", "parameters"})


class JSONCalls(Splitter):
    """Splits one reply's text into words and calls. ``tag``: what calls begin with; None: the reply itself."""

    def __init__(self, tag: str | None) -> None:
        super().__init__(State.TEXT if tag else State.HEAD)
        self._tag = tag
        self._space = ""  # before what is held of a head
        self._listed = False  # in the list that follows a tag
        self._told = False  # whether a call was
        self._scanned = 0  # of what is held, by the scanner

    def finish(self, *, cut: bool) -> Iterator[Piece]:
        """The rest. ``cut``: the reply did not end by itself, so a call that has only begun is left out."""
        held, self._held = self._held, ""
        if self._state is State.ARGUMENTS:
            yield CallClosed(complete=False)
        elif self._state is State.HEAD and not self._told and not cut:
            yield from _words(self._opening() + self._space + held)
        elif self._state is State.TEXT:
            yield from _words(held)
        self._state = State.TAIL

    def _in_text(self) -> Iterator[Piece]:
        if self._tag is None:  # the reply is no call: all of it is words
            words, self._held = self._held, ""
            yield from _words(words)
            return
        before, tag, after = self._held.partition(self._tag)
        if tag:
            self._begin(after)
            yield from _words(before.rstrip())
            return
        free = len(self._held[: len(self._held) - _begun(self._held, self._tag)].rstrip())
        words, self._held = self._held[:free], self._held[free:]
        yield from _words(words)

    def _begin(self, held: str, *, listed: bool = False) -> None:
        """A call is due."""
        self._state, self._held, self._listed = State.HEAD, held, listed
        self._scanner, self._scanned, self._space = ObjectScanner(), 0, ""

    def _in_head(self) -> Iterator[Piece]:
        bare = self._held.lstrip()
        self._space += self._held[: len(self._held) - len(bare)]
        self._held = bare
        if not bare:
            return
        if self._tag is None and not self._told and PYTHON_TAG.startswith(bare[: len(PYTHON_TAG)]):
            if len(bare) >= len(PYTHON_TAG):
                self._begin(bare[len(PYTHON_TAG) :])
        elif self._tag and not self._listed and bare[0] == "[":
            self._begin(bare[1:], listed=True)
        elif bare[0] == "{":
            yield from self._object_head(bare)
        elif self._tag and not self._listed:
            yield from self._named_head(bare)
        else:
            self._no_call()
            yield from self._undone()

    def _object_head(self, bare: str) -> Iterator[Piece]:
        """A whole object may be a call written otherwise; one that begins with another key is none."""
        head, key = _OBJECT.match(bare), _FIRST_KEY.match(bare)
        name = None if head is None else name_in(head["name"])
        if head is not None and name is not None:
            yield from self._opened(name, bare[head.end() - 1 :])
            return
        if head is None and (key is None or key[1] in _KEYS):
            self._scanned += self._scanner.feed(bare[self._scanned :])
            if not self._scanner.broken and not self._scanner.done:
                return
            call = whole_call(bare[: self._scanned], none=b"") if self._scanner.done else None
            if call is not None:
                self._state, self._held, self._told = State.TAIL, bare[self._scanned :], True
                yield CallOpened(call[0])
                yield CallArguments(call[1])
                yield CallClosed(complete=True)
                return
        self._no_call()
        yield from self._undone()

    def _named_head(self, bare: str) -> Iterator[Piece]:
        head = _NAMED.match(bare, partial=True)
        if head is not None and not head.partial and len(head["name"]) <= MAX_NAME:
            yield from self._opened(head["name"], bare[head.end() - 1 :])
        elif head is None or not head.partial:
            self._no_call()
            yield from self._undone()

    def _opened(self, name: str, held: str) -> Iterator[Piece]:
        self._state, self._held, self._told = State.ARGUMENTS, held, True
        self._scanner = ObjectScanner()
        yield CallOpened(name)

    def _no_call(self) -> None:
        """What is held is words, or after a call nothing the model meant to say."""
        if self._told:
            self._state, self._held = State.TAIL, self._held[1:]

    def _undone(self) -> Iterator[Piece]:
        """What opened the call that is none is words too."""
        if self._state is State.HEAD:
            self._state = State.TEXT
            yield from _words(self._opening() + self._space)

    def _opening(self) -> str:
        return f"{self._tag}{'[' if self._listed else ''}" if self._tag else ""

    def _in_tail(self) -> None:
        """Between calls stands what the form writes."""
        tag = self._tag or ""
        tagged = self._held.find(tag) if tag else -1
        listed = self._held.find("{") if not tag or self._listed else -1
        if listed >= 0 and (tagged < 0 or listed < tagged):
            self._begin(self._held[listed:], listed=self._listed)
        elif tagged >= 0:
            self._begin(self._held[tagged + len(tag) :])
        else:
            self._held = self._held[len(self._held) - _begun(self._held, tag) :]


def _begun(text: str, tag: str) -> int:
    """How many characters at the end of the text could begin the tag."""
    return next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)


def _words(words: str) -> Iterator[Piece]:
    if words:
        yield Text(words)
