"""Follows one JSON object character by character: where it ends, and where it stops being JSON (RFC 8259).

Builds no values and keeps only the nesting. Knows nothing of tool calls.
"""

from __future__ import annotations

import re
from enum import Enum, auto

_LITERAL = re.compile(r"true|false|null|-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')  # in a string: neither its end nor an escape, and allowed there
SPACE = " \t\n\r"
"""All that JSON has."""
_HEX = frozenset("0123456789abcdefABCDEF")


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
