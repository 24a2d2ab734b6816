"""One mutation of a value or of its JSON text, drawn by a seeded generator."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

GIANT = ("x" * 100_000, 10**400, [0] * 5_000, {str(number): None for number in range(2_000)}, "🦊" * 20_000)
OTHERS: tuple[Any, ...] = (None, True, 0, -1, 1.5, 2**63, 2**70, 1e308, "", "x", [], {}, [[]], {"type": "x"})
"""Values of each type, to stand for another."""
NAMES = ("surprise", "type", "id", "role", "content", "model", "", "a" * 300, "é")
RAW = (
    b"",
    b"{",
    b"[]",
    b"null",
    b'"x"',
    b"NaN",
    b"\xff",
    b"\x00",
    b'{"type":',
    b"[" * 3_000,
    b'{"a":' * 3_000,
    b"\xef\xbb\xbf{}",
    b"1e999",
    b"-",
    b"{}{}",
    b" " * 1_000,
)


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values inside."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, one in inner for found in ((*path, key), *paths(one, (*path, key)))]


def deep(dice: random.Random) -> Any:
    """Lists or objects in each other."""
    value: Any = dice.choice([0, "x", {}])
    listed = dice.random() < 0.5
    for _ in range(dice.choice([20, 70, 600, 900])):
        value = [value] if listed else {"a": value}
    return value


def nudged(dice: random.Random, value: Any) -> Any:
    """A value beside this one: a number one step away, a text or a list with one part more or less."""
    match value:
        case bool():
            return not value
        case int():
            return value + dice.choice([-1, 1])
        case float():
            return value + dice.choice([-0.01, 0.01, -1, 1])
        case str():
            return value[1:] if dice.random() < 0.3 else value + dice.choice(["a", "\0", "\U0010ffff"])
        case list() if value:
            return value[1:] if dice.random() < 0.5 else [*value, copy.deepcopy(value[-1])]
        case dict() if value:
            return {**value, dice.choice(NAMES): next(iter(value.values()))}
    return dice.choice(OTHERS)


def damaged(dice: random.Random, whole: Any) -> bytes:
    """The JSON text of ``whole`` with one mutation somewhere."""
    way = dice.random()
    if way < 0.06:
        return rubbish(dice)
    if way < 0.18:
        return bent_text(dice, encoded(whole))
    found = paths(whole)
    if not found:
        return encoded(dice.choice(OTHERS))
    *path, last = dice.choice(found)
    body = copy.deepcopy(whole)
    holder: Any = body
    for key in path:
        holder = holder[key]
    if way < 0.42:
        holder[last] = nudged(dice, holder[last])
    elif way < 0.62:
        holder[last] = copy.deepcopy(dice.choice(OTHERS))
    elif way < 0.75:
        del holder[last]
    elif way < 0.9 and isinstance(holder, dict):
        holder[dice.choice(NAMES)] = copy.deepcopy(dice.choice(OTHERS))
    elif way < 0.94:
        holder[last] = deep(dice)
    elif way < 0.95:
        holder[last] = dice.choice(GIANT)
    elif isinstance(holder, dict):
        holder[last + dice.choice(["s", " ", "\0"])] = holder.pop(last)
    else:
        holder.append(copy.deepcopy(holder[last]))
    return encoded(body)


def encoded(value: Any) -> bytes:
    """JSON text; lone surrogates stay escapes."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass")


def rubbish(dice: random.Random) -> bytes:
    """Bytes that are no body."""
    return dice.choice(RAW) if dice.random() < 0.7 else dice.randbytes(dice.randrange(40))


def bent_text(dice: random.Random, text: bytes) -> bytes:
    """JSON text with a few bytes that do not belong there."""
    at = dice.randrange(len(text) + 1)
    match dice.randrange(7):
        case 0:
            return text[:at]
        case 1:
            return text[:at] + dice.choice([b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x00"]) + text[at:]
        case 2:
            quote = text.find(b'"', at)
            half = dice.choice([b"\\ud800", b"\\udfff", b"\\u0000", b"\\ud83d\\ud83d", b"\\x"])
            return text[: quote + 1] + half + text[quote + 1 :]
        case 3:
            colon = text.find(b":", at)
            value = dice.choice([b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-0", b"1E400", b"01", b".5"])
            return text[: colon + 1] + value + b"," + text[colon + 1 :] if dice.random() < 0.3 else value
        case 4:
            return text + dice.choice([b"{}", b",", b"\n\n", b"\x00", b"]"])
        case 5 if text[:1] == b"{" and len(text) > 2:
            return b"{" + text[1:-1] + b"," + text[1:]  # each field twice
    return text.replace(b",", dice.choice([b";", b",,", b"\x0b,"]), 1)
