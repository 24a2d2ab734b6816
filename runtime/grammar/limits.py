"""Limits of what a grammar may ask for, checked in its text before anything compiles it.

A short text may stand for an automaton of millions of states, and a compiler that works on it cannot be
stopped. So what makes an automaton large is counted here: depth, properties, values and multiples of a schema,
and positions of a regular expression with its counted repeats written out. Knows no library.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from ..errors import GrammarInvalid
from ..verbs import Grammar, GrammarKind

MAX_DEPTH = 64
MAX_PROPERTIES = 1000
MAX_VALUES = 5000
MAX_MULTIPLE = 5000
MAX_POSITIONS = 5000
"""The most characters and character classes that a regular expression may have, repeats written out."""

_PIECE = re.compile(r"\\.|\[(?:\\.|[^\]\\])(?:\\.|[^\]\\])*\]|\{(\d+)(?:,(\d*))?\}|.", re.DOTALL)


def check(grammar: Grammar) -> None:
    """Raises ``GrammarInvalid`` for a grammar that would take long to compile, as far as its text shows."""
    passed = list[str]()
    if grammar.kind is GrammarKind.JSON:
        passed += excess(_parsed(grammar.text)).values()
    elif grammar.kind is GrammarKind.REGEX and positions(grammar.text) > MAX_POSITIONS:
        passed.append(f"at most {MAX_POSITIONS} positions, its repeats written out")
    if passed:
        raise GrammarInvalid(f"it is to have {passed[0]}")


def excess(schema: Any) -> dict[str, str]:
    """The limits that a parsed JSON schema exceeds, as text, by the keywords that exceed them. No keyword
    does for the depth: it is at ``""``."""
    level, depth, properties, values, multiple = [schema], 0, 0, 0, 1
    while level and depth <= MAX_DEPTH:
        depth += 1
        for node in level:
            if isinstance(node, dict):
                properties += _size(node.get("properties"))
                values += _size(node.get("enum"))
                if multiple <= MAX_MULTIPLE:
                    multiple = math.lcm(multiple, _digits(node.get("multipleOf")))
        level = [child for node in level for child in _children(node)]
    bounds = {
        "": (depth > MAX_DEPTH, f"at most {MAX_DEPTH} levels"),
        "properties": (properties > MAX_PROPERTIES, f"at most {MAX_PROPERTIES} properties"),
        "enum": (values > MAX_VALUES, f"at most {MAX_VALUES} values in its enums"),
        "multipleOf": (multiple > MAX_MULTIPLE, f"multipleOf up to {MAX_MULTIPLE}, together"),
    }
    return {keyword: bound for keyword, (passed, bound) in bounds.items() if passed}


def positions(regex: str) -> int:
    """How many characters and character classes a regular expression has, with counted repeats written out."""
    sizes, last = [0], 0  # of the open groups, and of what a repeat would repeat
    for piece in _PIECE.finditer(regex):
        text, least, most = piece[0], piece[1], piece[2]
        if text == "(":
            sizes.append(0)
            last = 0
        elif text == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        elif least is not None:
            repeated = last * max(1, int((most or least)[:9]))
            sizes[-1] += repeated - last
            last = repeated
        elif text not in "?*+|":
            last = 1
            sizes[-1] += 1
    return sum(sizes)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarInvalid(f"its schema is no JSON that can be read: {error}") from None


def _children(node: Any) -> Iterator[Any]:
    if isinstance(node, dict):
        yield from node.values()
    elif isinstance(node, list):
        yield from node


def _size(value: Any) -> int:
    return len(value) if isinstance(value, dict | list) else 0


def _digits(value: Any) -> int:
    """The digits of a schema's ``multipleOf`` as a whole number, without the decimal point (0.25: 25): about
    how many states it takes. 1 for any other value."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or not value:
        return 1
    digits = Decimal(str(value)).normalize().as_tuple().digits
    return int("".join(map(str, digits[:12])))
