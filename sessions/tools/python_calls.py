"""Tool calls in Python, ``[get_weather(city="Oslo"), add(a=1, b=2)]``, read from streamed text.

A call is delivered when its parenthesis closes. Its arguments are Python literals, given by name, and become
JSON. Nothing is evaluated.
"""

from __future__ import annotations

import ast
import json
import keyword
import re
import warnings
from collections.abc import Iterator
from enum import Enum, auto

from ..conversation.items import MAX_NAME
from .scanner import CallArguments, CallClosed, CallOpened, Piece, PlainText

MAX_CALL = 65_536
"""The most characters of one call; a longer one is not parsed."""

_OPENS = re.compile(r"\s*\[\s*[A-Za-z_][\w.]*\s*\(")
_MAY_OPEN = re.compile(r"\s*(?:\[\s*(?:[A-Za-z_][\w.]*\s*)?)?")
_NAME = re.compile(r"[\s,\[]*([A-Za-z_][\w.]*)\s*\(")
_KEYWORD = re.compile(rf"[(,]\s*(?P<name>{'|'.join(sorted(keyword.kwlist))})\s*=(?!=)")
_ESCAPED = "__keyword_"
_PAIRS = {")": "(", "]": "[", "}": "{"}
_WORDS = {"true": True, "false": False, "null": None}


class _ListState(Enum):
    """Where in a reply the next text is: at its beginning, in its list of calls, in text, or behind the
    list."""

    BEGINNING = auto()
    CALLS = auto()
    TEXT = auto()
    END = auto()  # the list is over: the rest is dropped


class _ParenthesisScanner:
    """Finds the parenthesis that closes a call, past the brackets and strings inside."""

    def __init__(self) -> None:
        self._opened: list[str] = []
        self._quote = ""
        self._escaped = False
        self._begun = False
        self.read = 0

    @property
    def between_arguments(self) -> bool:
        """Whether the next text is in no string and no inner bracket."""
        return not self._quote and self._opened == ["("]

    def feed(self, text: str) -> bool:
        """Read ``text``, which is all text of the call so far, from the index ``read`` on. Returns whether
        the closing parenthesis was found; then ``read`` is behind it."""
        while self.read < len(text):
            character = text[self.read]
            if self._escaped:
                self._escaped = False
            elif character in "'\"" and self._begun:
                if (quotes := self._quotes(text)) is None:
                    return False
                self.read += quotes
                continue
            elif self._quote:
                self._escaped = character == "\\"
            elif self._begun or character == "(":
                self._begun = True
                if self._bracket(character):
                    self.read += 1
                    return True
            self.read += 1
        return False

    def _quotes(self, text: str) -> int | None:
        """At a quote mark: open or close a string if it does that. Returns how many characters belong to the
        mark (1, or 3 for a triple one); None if more text is needed to tell."""
        mark, three = text[self.read], text[self.read : self.read + 3]
        if self._quote and mark != self._quote[0]:
            return 1
        if len(self._quote) == 1:
            self._quote = ""
            return 1
        if len(three) < 3 and three == mark * len(three):
            return None
        if self._quote:
            closes = three == self._quote
            self._quote = "" if closes else self._quote
            return 3 if closes else 1
        self._quote = mark * 3 if three == mark * 3 else mark
        return len(self._quote)

    def _bracket(self, character: str) -> bool:
        if character in "([{":
            self._opened.append(character)
        elif character in ")]}":
            return self._opened.pop() != _PAIRS[character] or not self._opened
        return False


class PythonCallParser:
    """Splits one reply into text and calls that are written in Python: the reply is a list of calls from its
    beginning on, or it is all text."""

    def __init__(self) -> None:
        self._state = _ListState.BEGINNING
        self._held = ""
        self._called = False  # a call was delivered
        self._scanner = _ParenthesisScanner()

    def feed(self, text: str) -> Iterator[Piece]:
        """Take more text of the reply. Yields what is certain now, in order: text and parts of calls."""
        self._held += text
        if self._state is _ListState.BEGINNING:
            self._begin()
        while self._state is _ListState.CALLS and not self._ends() and self._scanner.feed(self._held):
            written, self._held = self._held[: self._scanner.read], self._held[self._scanner.read :]
            self._scanner = _ParenthesisScanner()
            yield from self._call(written)
        if self._state is _ListState.CALLS and len(self._held) > MAX_CALL:
            self._state = _ListState.END if self._called else _ListState.TEXT
        if self._state is _ListState.TEXT:
            yield from self._text()
        elif self._state is _ListState.END:
            self._held = ""

    def passes(self, text: str) -> bool:
        """Whether `feed` would yield ``text`` unchanged as plain text. Always False here."""
        return False

    def finish(self, *, cut: bool) -> Iterator[Piece]:
        """Called once, when the reply is over: yields the rest of its text and calls. ``cut``: it was ended
        from outside; then an incomplete call is dropped."""
        unknown = self._state is _ListState.CALLS and not self._called and not cut
        if unknown or self._state is _ListState.BEGINNING:
            yield from self._text()
        self._state, self._held = _ListState.END, ""

    def _begin(self) -> None:
        if _OPENS.match(self._held):
            self._state = _ListState.CALLS
        elif _MAY_OPEN.fullmatch(self._held) is None:
            self._state = _ListState.TEXT

    def _ends(self) -> bool:
        """Whether the list of calls is over; if its closing bracket comes now, go to the state END."""
        if self._called and self._held.lstrip().startswith("]"):
            self._state = _ListState.END
        return self._state is _ListState.END

    def _text(self) -> Iterator[Piece]:
        text, self._held = self._held, ""
        if text:
            yield PlainText(text)

    def _call(self, written: str) -> Iterator[Piece]:
        name = _NAME.match(written)
        arguments = None if name is None else _arguments(written[name.start(1) :])
        if name is not None and arguments is not None and len(name[1]) <= MAX_NAME:
            self._called = True
            yield CallOpened(name[1])
            yield CallArguments(arguments)
            yield CallClosed(complete=True)
        elif not self._called:
            self._state, self._held = _ListState.TEXT, written + self._held
        elif name is not None and len(name[1]) <= MAX_NAME:
            yield CallOpened(name[1])
            yield CallClosed(complete=False)


def _parsed(written: str) -> ast.expr:
    """The call's syntax tree. Raises what `ast.parse` raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the parser warns of odd escapes in the model's text
        try:
            return ast.parse(written, mode="eval").body
        except SyntaxError:
            return ast.parse(_escaped_keywords(written), mode="eval").body


def _escaped_keywords(written: str) -> str:
    """The call with a prefix on arguments that are named like Python's keywords, so that it parses."""
    kept, at, scanner = list[str](), 0, _ParenthesisScanner()
    for found in _KEYWORD.finditer(written):
        scanner.feed(written[: found.start("name")])
        if scanner.between_arguments:
            kept += [written[at : found.start("name")], _ESCAPED]
            at = found.start("name")
    return "".join([*kept, written[at:]])


class _JSONWords(ast.NodeTransformer):
    """Replaces JSON's ``true``, ``false`` and ``null``, which models mix in, by Python's constants."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """Called for each name in the syntax tree: returns Python's constant for one of JSON's words, else the
        same node."""
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node


def _arguments(written: str) -> str | None:
    """A call's arguments as JSON text; None unless all are literals and given by name."""
    if len(written) > MAX_CALL:
        return None
    try:
        call = _parsed(written)
        if not isinstance(call, ast.Call) or call.args or any(one.arg is None for one in call.keywords):
            return None
        given = {
            str(one.arg).removeprefix(_ESCAPED): ast.literal_eval(_JSONWords().visit(one.value))
            for one in call.keywords
        }
        arguments = json.dumps(given, ensure_ascii=False, allow_nan=False)
        arguments.encode()  # refuse a lone surrogate
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return arguments
