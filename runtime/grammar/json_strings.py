"""Bounds the length of strings in the JSON that a model writes, by reading the text so far.

A grammar could count characters instead, but it would need a state for each one, and be large and slow for a
generous bound. This module knows no grammar. https://www.rfc-editor.org/rfc/rfc8259#section-7
"""

from __future__ import annotations

import re

_STOP = re.compile(rb'["\\]')
_QUOTE = 0x22


class JsonString:
    """Reads a JSON text as it is written, and tracks the string that is open at its end. ``most``: how many
    bytes a string may have."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open = self._escaped = False
        self._bytes = 0

    @property
    def full(self) -> bool:
        """Whether a string is open now and has ``most`` bytes or more, so that it should end."""
        return self._open and self._bytes >= self._most

    def take(self, text: bytes) -> None:
        """Read the next bytes of the text, which may end inside a string or a character."""
        at = 0
        while at < len(text):
            if not self._open:
                at = text.find(b'"', at) + 1
                if not at:
                    return
                self._open, self._escaped, self._bytes = True, False, 0
            elif self._escaped:
                self._escaped = False
                self._bytes += 1
                at += 1
            else:
                stop = _STOP.search(text, at)
                end = len(text) if stop is None else stop.end()
                self._bytes += end - at
                at = end
                if stop is not None:
                    self._escaped = text[stop.start()] != _QUOTE
                    self._open = self._escaped
