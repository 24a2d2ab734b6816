"""Scanners that find the end of an object in streamed text, and write it as JSON: for JSON itself, and for the
notation of Gemma.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

from ..text.stop_strings import first_tag

SPACE = " \t\n\r"
"""The white space of JSON."""

_LITERAL = re.compile(r"true|false|null|-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')  # characters of a string that neither end it nor begin an escape
_HEX = frozenset("0123456789abcdefABCDEF")
_BARE_KEY, _BARE_VALUE = re.compile(r"[^:{}\[\],]+(?=[:{}\[\],])"), re.compile(r"[^{}\[\],]+(?=[{}\[\],])")
_WORDS = {"None": "null", "True": "true", "False": "false"}
MAX_WORD = 65_536
"""The most characters of a key or value without quotes in the notation of Gemma."""


class _Expect(Enum):
    """What may come next in an object, outside of strings and literals."""

    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()


_KEYS = (_Expect.KEY, _Expect.KEY_OR_END)
_VALUES = (_Expect.VALUE, _Expect.VALUE_OR_END)
_ENDS = (_Expect.COMMA_OR_END, _Expect.KEY_OR_END, _Expect.VALUE_OR_END)


class ObjectScanner:
    """Finds the end of one JSON object (RFC 8259). It remembers only the nesting, not the text.

    Two mistakes that models make are mended: control characters in a string, such as a line break, are written
    as escapes, and a comma before a closing bracket is left out.

    ``done``: the object is whole. ``broken``: the text is not a valid object. ``written``: what the last `feed`
    makes of its text; together, a valid object.
    """

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self.written = ""
        self._comma = ""  # a comma and the white space behind it, which wait for what follows
        self._open: list[str] = []
        self._expect = _Expect.VALUE
        self._string: str | None = None  # None outside, "" inside, "\\" or "u…" within an escape
        self._literal = ""

    def feed(self, text: str) -> int:
        """Read until the object is done or broken, or the text ends. Returns how many characters of ``text``
        belong to it."""
        at, written = 0, list[str]()
        while at < len(text) and not (self.done or self.broken):
            if self._string == "" and (plain := _PLAIN.match(text, at)):
                written.append(plain[0])
                at = plain.end()
            else:
                made = self._read(text[at])
                if not self.broken:
                    written.append(made)
                    at += 1
        self.written = "".join(written)
        return at

    def _read(self, character: str) -> str:
        """Read one character. Returns what is written for it, and for a comma before it."""
        if self._string is not None:
            control = self._string == "" and character < " "
            self._in_string(character, self._string)
            return json.dumps(character)[1:-1] if control else character
        if self._literal and character not in ",]}" + SPACE:
            self._literal += character
            return character
        self.broken = bool(self._literal) and _LITERAL.fullmatch(self._literal) is None
        self._literal = ""
        if self.broken:
            return ""
        if character in SPACE:
            if self._comma:
                self._comma += character
                return ""
            return character
        comma = self._comma[1:] if character in "]}" else self._comma
        self._token(character)
        self._comma = character if character == "," else ""
        return comma + ("" if character == "," else character)

    def _in_string(self, character: str, escape: str) -> None:
        if escape == "":
            self._string = {'"': None, "\\": "\\"}.get(character, "")
        elif escape == "\\":
            self.broken = character not in '"\\/bfnrtu'
            self._string = "u" if character == "u" else ""
        else:
            self.broken = character not in _HEX
            self._string = "" if len(escape) == 4 else escape + character

    def _token(self, character: str) -> None:
        """Read the first character of a string or literal, or one of ``{}[]:,``."""
        expect = self._expect
        if not self._open and character != "{":
            self.broken = True
        elif character == '"' and expect in _KEYS + _VALUES:
            self._string = ""
            self._expect = _Expect.COLON if expect in _KEYS else _Expect.COMMA_OR_END
        elif character == ":" and expect is _Expect.COLON:
            self._expect = _Expect.VALUE
        elif character == "," and expect is _Expect.COMMA_OR_END:
            self._expect = _Expect.KEY if self._open[-1] == "{" else _Expect.VALUE
        elif character in "]}":
            ends = expect in _ENDS or bool(self._comma)
            self.broken = not ends or self._open.pop() + character not in ("{}", "[]")
            self._expect = _Expect.COMMA_OR_END
            self.done = not self.broken and not self._open
        elif character in "{[" and expect in _VALUES:
            self._open.append(character)
            self._expect = _Expect.KEY_OR_END if character == "{" else _Expect.VALUE_OR_END
        elif expect in _VALUES:
            self._literal, self._expect = character, _Expect.COMMA_OR_END
        else:
            self.broken = True


def object_in(text: str) -> str | None:
    """The JSON object that the text is, apart from white space around it, mended as `ObjectScanner` does; None
    if it is none."""
    scanner = ObjectScanner()
    stripped = text.strip(SPACE)
    return scanner.written if scanner.feed(stripped) == len(stripped) and scanner.done else None


# --- Gemma's notation -------------------------------------------------------------------------------------


class GemmaScanner:
    """Reads one object in the notation of Gemma, ``{city:<|"|>Oslo<|"|>,at:[1,2]}``, and writes it as JSON. Its
    strings stand as they are between two ``quote``s, its keys may stand without them. Other text without them,
    which is no literal of JSON or Python, becomes a string.

    ``done``, ``broken`` and ``written`` are as `ObjectScanner` has them.
    """

    def __init__(self, quote: str) -> None:
        self.done = False
        self.broken = False
        self.written = ""
        self._quote = quote
        self._json = ObjectScanner()
        self._nested: list[str] = []
        self._key = False  # a key may come
        self._string = False  # inside of quotes

    def feed(self, text: str) -> int:
        """Read until the object is done or broken, or the text ends in the middle of a quote or word, which is
        not read yet. Returns how many characters of ``text`` were read."""
        at, written = 0, list[str]()
        while at < len(text) and not (self.done or self.broken):
            length, made = self._string_part(text, at) if self._string else self._token(text, at)
            if not length:
                self.broken = len(text) - at > MAX_WORD and not self._string
                break
            self._json.feed(made)
            self.done, self.broken = self._json.done, self._json.broken
            written.append(self._json.written)
            at += length
        self.written = "".join(written)
        return at

    def _string_part(self, text: str, at: int) -> tuple[int, str]:
        """The length of the next part of a string, and its JSON: text up to a quote, or the quote behind it."""
        if text.startswith(self._quote, at):
            self._string = False
            return len(self._quote), '"'
        end, _ = first_tag(text[at:], (self._quote,))
        return end, json.dumps(text[at : at + end], ensure_ascii=False)[1:-1]

    def _token(self, text: str, at: int) -> tuple[int, str]:
        """The length of the next token outside of strings, and its JSON. The length is 0 if more text is needed
        to tell."""
        character = text[at]
        if character in SPACE:
            return 1, ""
        if character in "{[,:]}":
            self._move(character)
            return 1, {",": ", ", ":": ": "}.get(character, character)
        if text.startswith(self._quote, at):
            self._string = True
            return len(self._quote), '"'
        if self._quote.startswith(text[at:]):
            return 0, ""
        word = (_BARE_KEY if self._key else _BARE_VALUE).match(text, at)
        if word is None or word.end() - at > MAX_WORD:
            return 0, ""
        return word.end() - at, self._word(word[0].strip())

    def _move(self, character: str) -> None:
        """Note the nesting, and whether a key may come behind ``character``."""
        if character in "{[":
            self._nested.append(character)
        elif character in "]}" and self._nested:
            self._nested.pop()
        self._key = character in "{," and self._nested[-1:] == ["{"]

    def _word(self, word: str) -> str:
        literal = _WORDS.get(word, f"{word}0" if word.endswith(".") else word)
        if not self._key and _LITERAL.fullmatch(literal):
            return literal
        return json.dumps(word, ensure_ascii=False)
