"""Where a reader sees one character end and the next begin, so that none is cut in two. Pure.

Offsets are in Unicode code points. The rules are those of UAX #29's extended grapheme clusters that text in use
needs: marks and joiners stay with what they follow, flags are pairs, a line break is one; conjoining jamo that
are not composed are not looked at.
"""

from __future__ import annotations

import unicodedata

_JOINER = "\u200d"
_EXTENDING = frozenset(
    {"\u200c", _JOINER, *map(chr, range(0x1F3FB, 0x1F400)), *map(chr, range(0xE0020, 0xE0080))}
)


def inside_character(text: str, at: int) -> bool:
    """Whether a cut before code point ``at`` would take a character apart."""
    if not 0 < at < len(text):
        return False
    before, after = text[at - 1], text[at]
    if _extends(after) or before == _JOINER:
        return True
    if before == "\r" and after == "\n":
        return True
    return _is_flag(after) and _flags_before(text, at) % 2 == 1


def _extends(character: str) -> bool:
    return character in _EXTENDING or unicodedata.category(character).startswith("M")


def _is_flag(character: str) -> bool:
    return "\U0001f1e6" <= character <= "\U0001f1ff"


def _flags_before(text: str, at: int) -> int:
    count = 0
    while count < at and _is_flag(text[at - 1 - count]):
        count += 1
    return count
