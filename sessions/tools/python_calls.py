"""Tool calls in Python, ``[get_weather(city="Oslo"), add(a=1, b=2)]``, read from streamed text.

A call's arguments are delivered when its parenthesis closes. They are Python literals, given by name, and
become JSON. Nothing is evaluated.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator
from enum import Enum, auto

from ..conversation.items import MAX_NAME
from ..text.stop_strings import first_tag
from .scanner import CallArguments, CallClosed, CallOpened, CallParser, Piece

MAX_CALL = 65_536
"""The most characters of one call; a longer one is not parsed."""

_OPENS = re.compile(r"\s*\[\s*[A-Za-z_][\w.]*\s*\(")
_MAY_OPEN = re.compile(r"\s*(?:\[\s*(?:[A-Za-z_][\w.]*\s*)?)?")
_NAME = re.compile(r"[\s,\[]*([A-Za-z_][\w.]*)\s*\(")
_ARGUMENT_OR_CONTROL = re.compile(r"(?P<control>[\x00-\x1f])|[(,]\s*(?P<name>[^\s()\[\]{},'\"=]+)\s*=(?!=)")
_PAIRS = {")": "(", "]": "[", "}": "{"}
_WORDS = {"true": True, "false": False, "null": None}


class _ListState(Enum):
    """Where in a reply the next text is: in text, where a list of calls may begin, in the list, or behind
    it."""

    TEXT = auto()
    BEGINNING = auto()
    CALLS = auto()
    END = auto()  # the list is over: what follows is dropped


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

    @property
    def in_line(self) -> bool:
        """Whether the next text is in a string that has to end on its line."""
        return len(self._quote) == 1

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


class PythonCallParser(CallParser):
    """Splits one reply into text and calls that are written in Python. Without an ``opening`` tag, the reply is
    a list of calls from its beginning on, or it is all text. With one, a list of calls stands between it and
    the ``closing`` tag, and a call that cannot be read is told as broken."""

    def __init__(self, opening: str = "", closing: str = "") -> None:
        super().__init__(_ListState.TEXT if opening else _ListState.BEGINNING)
        self._opening, self._closing = opening, closing
        self._called = False  # a call of this list was delivered
        self._open = False  # the call that is being read was told
        self._scanner = _ParenthesisScanner()

    def _read_on(self) -> Iterator[Piece]:
        match self._state:
            case _ListState.TEXT:
                yield from self._in_text()
            case _ListState.BEGINNING:
                yield from self._begin()
            case _ListState.CALLS:
                yield from self._in_calls()
            case _ListState.END:
                self._behind()

    def passes(self, text: str) -> bool:
        """Whether ``text`` is outside calls, and cannot be a part of their tags or of white space before."""
        free = self._opening and self._state is _ListState.TEXT and not (self._held or self._trim)
        return bool(free) and self._opening[0] not in text and not text[-1].isspace()

    def finish(self, *, cut: bool) -> Iterator[Piece]:
        """The rest; see `CallParser.finish`. If it is ``cut``, an incomplete call without tags is dropped."""
        held, self._held = self._held, ""
        unknown = self._state is _ListState.CALLS and not self._called and not cut
        if self._open:
            yield CallClosed(complete=False)
        elif self._state is _ListState.TEXT:
            yield from self._text(held)
        elif unknown or (self._state is _ListState.BEGINNING and not (cut and self._opening)):
            yield from self._text(self._before + held)
        self._state, self._open = _ListState.END, False

    def _in_text(self) -> Iterator[Piece]:
        if tag := (yield from self._text_before((self._opening,) if self._opening else ())):
            self._state, self._called = _ListState.BEGINNING, False
            self._before, self._held = self._before + tag, self._held[len(tag) :]

    def _begin(self) -> Iterator[Piece]:
        if _OPENS.match(self._held):
            self._state = _ListState.CALLS
        elif _MAY_OPEN.fullmatch(self._held) is None:
            yield from self._no_list()

    def _no_list(self) -> Iterator[Piece]:
        """What is held is no list of calls: it is text."""
        self._state = _ListState.TEXT
        yield from self._text(self._before)

    def _in_calls(self) -> Iterator[Piece]:
        """Read on in the list: tell each call with the parenthesis that closes it, or its name first if there
        are tags. Then the list cannot reach beyond the closing tag."""
        if self._called and self._held.lstrip().startswith("]"):
            self._state = _ListState.END
            return
        end, tag = self._end()
        name = None if self._open or not self._opening else _NAME.match(self._held, 0, end)
        if name is not None and len(name[1]) <= MAX_NAME:
            self._called = self._open = True
            yield CallOpened(name[1])
        closed = self._scanner.feed(self._held[:end])
        if closed and self._scanner.read <= MAX_CALL:
            written, self._held = self._held[: self._scanner.read], self._held[self._scanner.read :]
            self._scanner = _ParenthesisScanner()
            yield from self._call(written)
        elif tag or self._scanner.read > MAX_CALL:
            self._scanner = _ParenthesisScanner()
            if self._open:
                yield CallClosed(complete=False)
            self._open, self._state = False, _ListState.END
            yield from () if self._called else self._no_list()

    def _end(self) -> tuple[int, str]:
        """Where the closing tag is, as `first_tag` tells it. Only text that was not read yet is searched."""
        if not self._closing:
            return len(self._held), ""
        start = max(0, self._scanner.read - len(self._closing))
        at, tag = first_tag(self._held[start:], (self._closing,))
        return start + at, tag

    def _behind(self) -> None:
        """Drop what follows the list, up to the closing tag if there is one."""
        at, tag = first_tag(self._held, (self._closing,)) if self._closing else (len(self._held), "")
        self._held = self._held[at + len(tag) :]
        if tag:
            self._state, self._trim, self._before = _ListState.TEXT, True, ""

    def _call(self, written: str) -> Iterator[Piece]:
        name = _NAME.match(written)
        arguments = None if name is None else _arguments(written[name.start(1) :])
        known = name is not None and len(name[1]) <= MAX_NAME
        if name is None or not (known and (arguments is not None or self._called)):
            if not self._called:
                self._held = written + self._held
                yield from self._no_list()
            return
        if not self._open:
            yield CallOpened(name[1])
        self._called, self._open = True, False
        if arguments is not None:
            yield CallArguments(arguments)
        yield CallClosed(complete=arguments is not None)


def _parsed(written: str) -> tuple[ast.expr, list[str]]:
    """The call's syntax tree, and names that stand for its arguments' names, which are numbered then. Raises
    what `ast.parse` raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the parser warns of odd escapes in the model's text
        try:
            return ast.parse(written, mode="eval").body, []
        except (SyntaxError, ValueError):
            mended, names = _mended(written)
            return ast.parse(mended, mode="eval").body, names


def _mended(written: str) -> tuple[str, list[str]]:
    """A call that is no Python, mended: its arguments' names, which may be no names of Python, replaced by
    numbered ones, and control characters in its strings, such as line breaks, written as escapes. Also returns
    the names."""
    kept, names, at, scanner = list[str](), list[str](), 0, _ParenthesisScanner()
    for found in _ARGUMENT_OR_CONTROL.finditer(written):
        scanner.feed(written[: found.end() if found["control"] else found.start("name")])
        if found["control"] and scanner.in_line and written[found.start() - 1] != "\\":
            kept += [written[at : found.start()], f"\\x{ord(found['control']):02x}"]
            at = found.end()
        elif found["name"] and scanner.between_arguments:
            kept += [written[at : found.start("name")], f"_{len(names)}"]
            names.append(found["name"])
            at = found.end("name")
    return "".join([*kept, written[at:]]), names


class _JSONWords(ast.NodeTransformer):
    """Replaces JSON's ``true``, ``false`` and ``null``, which models mix in, by Python's constants, and sets
    by lists."""

    def visit_Set(self, node: ast.Set) -> ast.AST:
        """Called for each set in the syntax tree: returns it as a list, because JSON has no sets."""
        return self.generic_visit(ast.List(node.elts, ast.Load()))

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """Called for each name in the syntax tree: returns Python's constant for one of JSON's words, else the
        same node."""
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node


def _arguments(written: str) -> str | None:
    """A call's arguments as JSON text; None unless all are literals and given by name."""
    if len(written) > MAX_CALL:
        return None
    try:
        call, names = _parsed(written)
        if not isinstance(call, ast.Call) or call.args or any(one.arg is None for one in call.keywords):
            return None
        given = {
            names[at] if names else str(one.arg): ast.literal_eval(_JSONWords().visit(one.value))
            for at, one in enumerate(call.keywords)
        }
        arguments = json.dumps(given, ensure_ascii=False, allow_nan=False)
        arguments.encode()  # refuse a lone surrogate
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return arguments
