"""Tool calls with JSON arguments, read from streamed text: one incremental scanner, and a table for each form.

`CallFormat` says how a form writes calls: how a call opens, where its name and its arguments stand, how it
closes. `CallScanner` splits a reply into text and calls by such a table; `formats` holds the tables. A call's
name is told as soon as it is known and its arguments while they come. What only looks like a call is delivered
as text. A call that breaks after its name was told closes as not complete. How the text was cut into pieces
changes no result.

`ObjectScanner` finds where a JSON object ends. It builds no values and keeps only the nesting (RFC 8259).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol, TypeAlias

import msgspec
import regex

from ..items import MAX_NAME

SPACE = " \t\n\r"
"""All the white space that JSON has."""

_LITERAL = re.compile(r"true|false|null|-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')  # in a string: neither its end nor an escape, and allowed there
_HEX = frozenset("0123456789abcdefABCDEF")
_FIRST_KEY = re.compile(r'\{\s*"([^"\\]*)"')
_CALL_KEYS = frozenset({"name", "type", "id", "arguments", "parameters"})
_ARGUMENTS_READ = '{"arguments": {}'


# --- what a reply is split into ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text outside calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallOpened:
    """A call of the tool ``name`` begins."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of its arguments: JSON text."""

    delta: str


@dataclass(frozen=True, slots=True)
class CallClosed:
    """The call ended; ``complete``: its arguments are a JSON object."""

    complete: bool


Piece: TypeAlias = TextPiece | CallOpened | CallArguments | CallClosed


class CallParser(Protocol):
    """Splits one reply's text into text and calls."""

    def feed(self, text: str) -> Iterator[Piece]:
        """The pieces that are certain now."""

    def finish(self, *, cut: bool) -> Iterator[Piece]:
        """The rest. ``cut``: the reply did not end by itself, so a call that has only begun is left out."""


# --- calls ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How one form writes calls whose arguments are JSON objects.

    ``head`` matches a call's object up to the ``{`` of its arguments; its group ``name`` is a JSON string.
    ``opening`` stands before calls; without it the reply itself is calls or is text. ``closing`` stands behind
    calls; without it a call ends with its arguments. ``optional``: a token that may stand before calls without
    ``opening``. ``listed``: a JSON list of calls may follow ``opening``. ``named`` matches a call that is no
    object: a bare ``name``, up to the ``{`` of its arguments. ``no_arguments``: the arguments of an object
    that has a name alone; empty: that object is no call. ``marks``: special tokens of the form, which
    detokenizing leaves out.
    """

    head: re.Pattern[str]
    opening: str = ""
    closing: str = ""
    optional: str = ""
    listed: bool = False
    named: regex.Pattern[str] | None = None
    no_arguments: bytes = b""
    marks: tuple[str, ...] = ()


class _At(Enum):
    """Where in a reply the next text is."""

    TEXT = auto()
    HEAD = auto()  # a call is expected, its name not known yet
    ARGUMENTS = auto()
    BEHIND = auto()  # after a call's arguments, until text or another call may follow


class CallScanner:
    """Splits one reply's text by the table of its form.

    Where a tag closes calls, all between the tags is calls, or all of it is text. Elsewhere text that begins
    like a call is one until it breaks, and what stands behind a call is only searched for more calls.
    """

    def __init__(self, form: CallFormat) -> None:
        self._form = form
        self._at = _At.TEXT if form.opening else _At.HEAD
        self._held = ""
        self._before = ""  # what was taken of a head, the space before it too: text, if there is no call
        self._listed = False  # the head is of a list's element
        self._told = False  # a call was told; where a tag closes calls: since the last tag
        self._object = ObjectScanner()  # the object that is read: a head's, or arguments
        self._scanned = 0  # characters of `_held` that were read of a head's object
        self._around = ObjectScanner()  # the object that holds the arguments, from their end on
        self._lost = False  # what stands behind a call is no list of calls: skip all up to a tag
        self._trim = False  # directly behind a closing tag, white space is the template's

    def feed(self, text: str) -> Iterator[Piece]:
        """The pieces that are certain now."""
        self._held += text
        before: tuple[_At, int] | None = None
        while self._held and before != (self._at, len(self._held)):
            before = (self._at, len(self._held))
            match self._at:
                case _At.TEXT:
                    yield from self._in_text()
                case _At.HEAD if self._form.closing:
                    yield from self._in_another() if self._told else self._in_first()
                case _At.HEAD:
                    yield from self._in_head()
                case _At.ARGUMENTS:
                    yield from self._in_arguments()
                case _At.BEHIND if self._form.closing:
                    self._behind_in_tag()
                case _At.BEHIND:
                    self._behind()

    def finish(self, *, cut: bool) -> Iterator[Piece]:
        """The rest. ``cut``: the reply did not end by itself, so a call that has only begun is left out."""
        held, self._held = self._held, ""
        if self._at is _At.ARGUMENTS:
            yield CallClosed(complete=False)
        elif self._at is _At.TEXT:
            yield from self._text(held)
        elif self._at is _At.HEAD and not self._told and not cut:
            yield from self._judge(held, "") if self._form.closing else self._text(self._before + held)
        self._at = _At.BEHIND

    def _in_text(self) -> Iterator[Piece]:
        opening = self._form.opening
        before, tag, after = self._held.partition(opening) if opening else (self._held, "", "")
        if tag:
            words = before.rstrip()
            self._told = False
            self._expect(after, before[len(words) :] + tag)
        else:
            free = len(_without_begun(before, opening).rstrip()) if opening else len(before)
            words, self._held = before[:free], before[free:]
        yield from self._text(words)

    def _in_arguments(self) -> Iterator[Piece]:
        read = self._object.feed(self._held)
        delta, self._held = self._held[:read], self._held[read:]
        if delta:
            yield CallArguments(delta)
        if self._object.done or self._object.broken:
            self._at = _At.BEHIND
            yield CallClosed(self._object.done)

    def _expect(self, held: str, before: str = "", *, listed: bool = False) -> None:
        """A call may begin in ``held``."""
        self._at, self._held, self._before, self._listed = _At.HEAD, held, before, listed
        self._object, self._scanned = ObjectScanner(), 0

    def _open(self, name: str, held: str) -> Iterator[Piece]:
        """A call's name is known; ``held`` begins with its arguments."""
        self._at, self._held, self._told = _At.ARGUMENTS, held, True
        self._object, self._around, self._lost = ObjectScanner(), ObjectScanner(), False
        self._around.feed(_ARGUMENTS_READ)
        yield CallOpened(name)

    def _opened(self, end: int) -> tuple[str, str] | None:
        """Name of the object's call and its arguments on, where its head stands before ``end``."""
        head = self._form.head.match(self._held, 0, end)
        name = None if head is None else _name_in(head["name"])
        return None if head is None or name is None else (name, self._held[head.end() - 1 :])

    def _text(self, words: str) -> Iterator[Piece]:
        if self._trim:
            words = words.lstrip()
        if words:
            self._trim = False
            yield TextPiece(words)

    # --- where no tag closes calls ---

    def _in_head(self) -> Iterator[Piece]:
        form, bare = self._form, self._held.lstrip()
        self._before += self._held[: len(self._held) - len(bare)]
        self._held = bare
        if not bare:
            return
        if form.optional and not self._told and form.optional.startswith(bare[: len(form.optional)]):
            if len(bare) >= len(form.optional):
                self._expect(bare[len(form.optional) :])
        elif form.listed and not self._listed and bare[0] == "[":
            self._expect(bare[1:], self._before + "[", listed=True)
        elif bare[0] == "{":
            yield from self._in_object()
        elif form.named is not None and not self._listed:
            yield from self._in_named(form.named)
        else:
            yield from self._no_call()

    def _in_object(self) -> Iterator[Piece]:
        """A whole object may be a call written otherwise; one with another first key is no call."""
        opened = self._opened(len(self._held))
        if opened is not None:
            yield from self._open(*opened)
            return
        head, key = self._form.head.match(self._held), _FIRST_KEY.match(self._held)
        if head is None and (key is None or key[1] in _CALL_KEYS):
            self._scanned += self._object.feed(self._held[self._scanned :])
            if not self._object.broken and not self._object.done:
                return
            body = self._held[: self._scanned]
            call = _whole_call(body, self._form.no_arguments) if self._object.done else None
            if call is not None:
                self._at, self._held, self._told = _At.BEHIND, self._held[self._scanned :], True
                yield from _pieces_of(call)
                return
        yield from self._no_call()

    def _in_named(self, named: regex.Pattern[str]) -> Iterator[Piece]:
        head = named.match(self._held, partial=True)
        if head is not None and not head.partial and len(head["name"]) <= MAX_NAME:
            yield from self._open(head["name"], self._held[head.end() - 1 :])
        elif head is None or not head.partial:
            yield from self._no_call()

    def _no_call(self) -> Iterator[Piece]:
        """What is held is text; behind a call it is nothing that the model meant to say."""
        if self._told:
            self._at, self._held = _At.BEHIND, self._held[1:]
        else:
            self._at = _At.TEXT
            yield from self._text(self._before)

    def _behind(self) -> None:
        """Search for the next call."""
        opening = self._form.opening
        tagged = self._held.find(opening) if opening else -1
        begun = self._held.find("{") if not opening or self._listed else -1
        if begun >= 0 and (tagged < 0 or begun < tagged):
            self._expect(self._held[begun:], listed=self._listed)
        elif tagged >= 0:
            self._expect(self._held[tagged + len(opening) :])
        else:
            self._held = self._held[len(_without_begun(self._held, opening)) :]

    # --- where a tag closes calls ---

    def _in_first(self) -> Iterator[Piece]:
        """The first object behind an opening tag: told while it comes, or judged at the closing tag."""
        closing = self._form.closing
        cut = self._held.find(closing)
        opened = self._opened(len(self._held) if cut < 0 else cut)
        if opened is not None:
            yield from self._open(*opened)
        elif cut >= 0:
            body, self._held = self._held[:cut], self._held[cut + len(closing) :]
            self._at = _At.TEXT
            yield from self._judge(body, closing)

    def _in_another(self) -> Iterator[Piece]:
        """An object behind a call: told while it comes, or when it is whole. It is never text."""
        end, tag = self._next_tag()
        opened = self._opened(end)
        if opened is not None:
            yield from self._open(*opened)
            return
        self._scanned += self._object.feed(self._held[self._scanned : end])
        if not (self._object.done or self._object.broken or tag):
            return
        body, self._held = self._held[: self._scanned], self._held[self._scanned :]
        self._at, self._around = _At.BEHIND, self._object
        call = _whole_call(body, self._form.no_arguments) if self._object.done else None
        if call is not None:
            yield from _pieces_of(call)

    def _behind_in_tag(self) -> None:
        """Skip to the next object or tag."""
        end, tag = self._next_tag()
        begun = self._next_object(self._held[:end])
        if begun is not None:
            self._expect(self._held[begun:])
            return
        self._held = self._held[end + len(tag) :]
        if tag:
            self._told, self._trim = False, True
            if tag == self._form.opening:
                self._expect(self._held, tag)
            else:
                self._at = _At.TEXT

    def _next_tag(self) -> tuple[int, str]:
        """The first tag in what is held, and where; without one, where one may yet begin."""
        tags = (self._form.closing, self._form.opening)
        found = [(at, tag) for tag in tags if (at := self._held.find(tag)) >= 0]
        return min(found) if found else (len(_without_begun(self._held, *tags)), "")

    def _next_object(self, inside: str) -> int | None:
        """Where another object begins in ``inside``, which stands behind a call and before a tag."""
        if self._lost or self._object.broken:
            return None
        read = self._around.feed(inside)
        bare = inside[read:].lstrip(SPACE + ",") if self._around.done else ""
        self._lost = bool(bare) and bare[0] != "{"
        return len(inside) - len(bare) if bare and not self._lost else None

    def _judge(self, body: str, closing: str) -> Iterator[Piece]:
        """All that stands between two tags: calls, or else text."""
        calls = _whole_calls(body, self._form.no_arguments)
        if not calls:
            yield from self._text(self._before + body + closing)
            return
        self._trim = True
        for call in calls:
            yield from _pieces_of(call)


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"")
    parameters: msgspec.Raw = msgspec.Raw(b"")


def _without_begun(text: str, *tags: str) -> str:
    """The text without its longest end that begins one of the tags."""
    longest = max(map(len, tags), default=0)
    for length in range(min(len(text), longest - 1), 0, -1):
        if any(tag.startswith(text[-length:]) for tag in tags):
            return text[:-length]
    return text


def _pieces_of(call: tuple[str, str]) -> Iterator[Piece]:
    yield CallOpened(call[0])
    yield CallArguments(call[1])
    yield CallClosed(complete=True)


def _whole_calls(body: str, no_arguments: bytes) -> list[tuple[str, str]]:
    """The calls of a body that is nothing else: objects one after another, or a list; else none."""
    calls, left = [], body.strip(SPACE)
    if left.startswith("[") and left.endswith("]"):
        left = left[1:-1]
    while left := left.strip(SPACE + ","):
        scanner = ObjectScanner()
        read = scanner.feed(left)
        call = _whole_call(left[:read], no_arguments) if scanner.done else None
        if call is None:
            return []
        calls.append(call)
        left = left[read:]
    return calls


def _name_in(literal: str) -> str | None:
    """The name that a JSON string says; None where it is not allowed as a tool's name."""
    try:
        name = msgspec.json.decode(literal, type=str)
    except ValueError:
        return None
    return name if 1 <= len(name) <= MAX_NAME else None


def _whole_call(body: str, no_arguments: bytes) -> tuple[str, str] | None:
    """Name and arguments of a call that is one whole object; None where it is no call.

    Arguments may be an object or, as some models write them, a string that holds one.
    """
    try:
        call = msgspec.json.decode(body, type=_Call)
        arguments = bytes(call.arguments or call.parameters or no_arguments).decode()
        if arguments.startswith('"'):
            arguments = msgspec.json.decode(arguments, type=str)
    except (ValueError, RecursionError):
        return None
    named = 1 <= len(call.name) <= MAX_NAME
    return (call.name, arguments) if named and is_object(arguments) else None


# --- JSON objects -----------------------------------------------------------------------------------------


class _Expect(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()


class ObjectScanner:
    """Reads one JSON object from its ``{`` on. ``done``: it is whole; ``broken``: it never will be."""

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self._open: list[str] = []
        self._expect = _Expect.VALUE
        self._string: str | None = None  # None outside, "" inside, "\\" or "u…" within an escape
        self._literal = ""

    def feed(self, text: str) -> int:
        """Reads until the object is done or broken, or the text ends; how many characters belong to it."""
        at = 0
        while at < len(text):
            if self.done or self.broken:
                return at
            if self._string == "" and (plain := _PLAIN.match(text, at)):
                at = plain.end()
            elif self._accepts(text[at]):
                at += 1
            else:
                return at
        return at

    def _accepts(self, character: str) -> bool:
        if self._string is not None:
            self._in_string(character)
        elif self._literal and character not in ",]}" + SPACE:
            self._literal += character
        else:
            if self._literal:
                self._end_literal()
            if not self.broken and character not in SPACE:
                self._token(character)
        return not self.broken

    def _in_string(self, character: str) -> None:
        escape = self._string
        if escape == "":
            if character == '"':
                self._string = None
                self._end_string()
            elif character == "\\":
                self._string = "\\"
            else:
                self.broken = character < " "
        elif escape == "\\":
            self.broken = character not in '"\\/bfnrtu'
            self._string = "u" if character == "u" else ""
        else:
            self.broken = character not in _HEX
            self._string = "" if len(escape or "") == 4 else f"{escape}{character}"

    def _token(self, character: str) -> None:
        expect = self._expect
        if not self._open and character != "{":
            self.broken = True
        elif character == '"' and expect is not _Expect.COLON and expect is not _Expect.COMMA_OR_END:
            self._string = ""
        elif expect is _Expect.COLON and character == ":":
            self._expect = _Expect.VALUE
        elif expect is _Expect.COMMA_OR_END and character == ",":
            self._expect = _Expect.KEY if self._open[-1] == "{" else _Expect.VALUE
        elif character in "]}":
            self._close(character)
        elif expect in (_Expect.VALUE, _Expect.VALUE_OR_END):
            self._value(character)
        else:
            self.broken = True

    def _value(self, character: str) -> None:
        if character in "{[":
            self._open.append(character)
            self._expect = _Expect.KEY_OR_END if character == "{" else _Expect.VALUE_OR_END
        else:
            self._literal = character

    def _close(self, character: str) -> None:
        may_end = self._expect in (_Expect.COMMA_OR_END, _Expect.KEY_OR_END, _Expect.VALUE_OR_END)
        if not may_end or self._open.pop() + character not in ("{}", "[]"):
            self.broken = True
            return
        self._expect = _Expect.COMMA_OR_END
        self.done = not self._open

    def _end_string(self) -> None:
        is_key = self._expect in (_Expect.KEY, _Expect.KEY_OR_END)
        self._expect = _Expect.COLON if is_key else _Expect.COMMA_OR_END

    def _end_literal(self) -> None:
        self.broken = _LITERAL.fullmatch(self._literal) is None
        self._literal = ""
        self._expect = _Expect.COMMA_OR_END


def is_object(text: str) -> bool:
    """Whether the text is one JSON object and nothing else but space around it."""
    scanner = ObjectScanner()
    stripped = text.strip(SPACE)
    return scanner.feed(stripped) == len(stripped) and scanner.done
