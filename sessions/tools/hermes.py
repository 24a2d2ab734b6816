"""Tool calls in the hermes form, ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, from streamed
text.

Used by Qwen2.5, Qwen3, Hermes and the pocket model. One tag may hold several, as objects one after another or
as a list. The name is told as soon as it is known and the arguments while they come. What is no call is
delivered as the text it is; a call that breaks after its name was told ends not complete. The result does not
depend on how the text was cut into pieces. Knows nothing of items or ids.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol, TypeAlias

import msgspec

from ..items import MAX_NAME
from .json_scanner import SPACE, ObjectScanner, is_object

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_HEAD = re.compile(
    r'\s*(?:\[\s*)?\{S"name"S:S("(?:[^"\\]|\\.)*")S,S"arguments"S:S(?=\{)'.replace("S", f"[{SPACE}]*")
)
_BEFORE = '{"arguments": {}'


@dataclass(frozen=True, slots=True)
class Text:
    """Words."""

    text: str


@dataclass(frozen=True, slots=True)
class CallOpened:
    """A call of ``name`` begins."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of its arguments."""

    delta: str


@dataclass(frozen=True, slots=True)
class CallClosed:
    """It ended; ``complete``: its arguments are a JSON object."""

    complete: bool


Piece: TypeAlias = Text | CallOpened | CallArguments | CallClosed


class Parser(Protocol):
    """Splits one reply's text into words and calls, whatever form they are written in (`formats`)."""

    def feed(self, text: str) -> Iterator[Piece]:
        """What is certain now."""

    def finish(self, *, cut: bool) -> Iterator[Piece]:
        """The rest. ``cut``: the reply did not end by itself, so a call that has only begun is left out."""


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"")
    parameters: msgspec.Raw = msgspec.Raw(b"")


class State(Enum):
    """Where in a reply the text is that comes next."""

    TEXT = auto()
    HEAD = auto()  # a call is due, its name not known yet
    ARGUMENTS = auto()
    TAIL = auto()  # after a call's arguments, until its form lets words or another call follow


class Splitter(ABC):
    """Text with calls whose arguments are JSON objects, told as they are written; forms differ in the rest."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._held = ""
        self._scanner = ObjectScanner()

    def feed(self, text: str) -> Iterator[Piece]:
        """What is certain now."""
        self._held += text
        before: tuple[State, int] | None = None
        while self._held and before != (self._state, len(self._held)):
            before = (self._state, len(self._held))
            yield from self._advance()

    def _advance(self) -> Iterator[Piece]:
        match self._state:
            case State.TEXT:
                yield from self._in_text()
            case State.HEAD:
                yield from self._in_head()
            case State.ARGUMENTS:
                yield from self._in_arguments()
            case State.TAIL:
                self._in_tail()

    def _in_arguments(self) -> Iterator[Piece]:
        read = self._scanner.feed(self._held)
        delta, self._held = self._held[:read], self._held[read:]
        if delta:
            yield CallArguments(delta)
        if self._scanner.done or self._scanner.broken:
            self._state = State.TAIL
            yield CallClosed(self._scanner.done)

    @abstractmethod
    def _in_text(self) -> Iterator[Piece]: ...

    @abstractmethod
    def _in_head(self) -> Iterator[Piece]: ...

    @abstractmethod
    def _in_tail(self) -> None: ...


class CallParser(Splitter):
    """Splits one reply's text into words and calls."""

    def __init__(self) -> None:
        super().__init__(State.TEXT)
        self._told = False  # whether a call of this tag was
        self._around = ObjectScanner()  # of the object that holds the arguments, from their end on
        self._lost = False  # what stands there is no list of calls: nothing more is read before a tag
        self._scanned = 0  # of what is held of another object
        self._space = ""  # before the tag: dropped with a call, delivered with what is none
        self._trim = False  # directly after a call, space is the template's, not the model's words

    def finish(self, *, cut: bool) -> Iterator[Piece]:
        """The rest. ``cut``: the reply did not end by itself, so a call that has only begun is left out."""
        held, self._held = self._held, ""
        if self._state is State.TEXT:
            yield from self._words(held)
        elif self._state is State.ARGUMENTS:
            yield CallClosed(complete=False)
        elif self._state is State.HEAD and not self._told and not cut:
            yield from self._whole(held, closed="")
        self._state = State.TAIL

    def _in_text(self) -> Iterator[Piece]:
        before, tag, after = self._held.partition(OPEN)
        if tag:
            words = before.rstrip()
            self._state, self._held, self._space = State.HEAD, after, before[len(words) :]
            self._told = False
            yield from self._words(words)
        else:
            free = len(_without_begun(self._held, OPEN).rstrip())
            words, self._held = self._held[:free], self._held[free:]
            yield from self._words(words)

    def _in_head(self) -> Iterator[Piece]:
        if self._told:
            yield from self._in_another()
            return
        cut = self._held.find(CLOSE)
        opened = self._opened(len(self._held) if cut < 0 else cut)
        if opened is not None:
            yield opened
        elif cut >= 0:
            body, self._held = self._held[:cut], self._held[cut + len(CLOSE) :]
            self._state = State.TEXT
            yield from self._whole(body, closed=CLOSE)

    def _in_another(self) -> Iterator[Piece]:
        """An object behind a call: told while it comes, or when it is whole; one that is no call, never."""
        end, tag = self._next_tag()
        opened = self._opened(end)
        if opened is not None:
            yield opened
            return
        self._scanned += self._scanner.feed(self._held[self._scanned : end])
        if not (self._scanner.done or self._scanner.broken or tag):
            return
        body, self._held = self._held[: self._scanned], self._held[self._scanned :]
        self._state, self._around = State.TAIL, self._scanner
        call = whole_call(body) if self._scanner.done else None
        if call is not None:
            yield from _told(call)

    def _opened(self, end: int) -> CallOpened | None:
        """The call whose arguments begin before ``end`` in what is held, if its head is written as most are."""
        head = _HEAD.match(self._held, 0, end)
        name = None if head is None else name_in(head[1])
        if head is None or name is None:
            return None
        self._state, self._held, self._told = State.ARGUMENTS, self._held[head.end() :], True
        self._scanner, self._around, self._lost = ObjectScanner(), ObjectScanner(), False
        self._around.feed(_BEFORE)
        return CallOpened(name)

    def _in_tail(self) -> None:
        end, tag = self._next_tag()
        begun = self._next_object(self._held[:end])
        if begun is not None:
            self._state, self._held = State.HEAD, self._held[begun:]
            self._scanner, self._scanned = ObjectScanner(), 0
            return
        self._held = self._held[end + len(tag) :]
        if tag:
            self._state = State.TEXT if tag == CLOSE else State.HEAD
            self._told, self._space, self._trim = False, "", True

    def _next_tag(self) -> tuple[int, str]:
        """The tag that comes first in what is held, and where; without one, where one may yet begin."""
        found = [(at, tag) for tag in (CLOSE, OPEN) if (at := self._held.find(tag)) >= 0]
        return min(found) if found else (len(_without_begun(self._held, OPEN, CLOSE)), "")

    def _next_object(self, inside: str) -> int | None:
        """Where another object begins, in what stands behind a call and before a tag."""
        if self._lost or self._scanner.broken:
            return None
        read = self._around.feed(inside)
        bare = inside[read:].lstrip(SPACE + ",") if self._around.done else ""
        self._lost = bool(bare) and bare[0] != "{"
        return len(inside) - len(bare) if bare and not self._lost else None

    def _whole(self, body: str, closed: str) -> Iterator[Piece]:
        """Calls that could not be told while they came, or text that only looked like one."""
        space, self._space = self._space, ""
        calls = _whole_calls(body)
        if not calls:
            yield from self._words(f"{space}{OPEN}{body}{closed}")
            return
        self._trim = True
        for call in calls:
            yield from _told(call)

    def _words(self, words: str) -> Iterator[Piece]:
        if self._trim:
            words = words.lstrip()
        if words:
            self._trim = False
            yield Text(words)


def _without_begun(text: str, *tags: str) -> str:
    """The text up to an end that could begin one of the tags."""
    begun = text.rfind("<")  # a tag has no other
    return text[:begun] if begun >= 0 and any(tag.startswith(text[begun:]) for tag in tags) else text


def _told(call: tuple[str, str]) -> Iterator[Piece]:
    yield CallOpened(call[0])
    yield CallArguments(call[1])
    yield CallClosed(complete=True)


def _whole_calls(body: str) -> list[tuple[str, str]]:
    """The calls of a body that is nothing else: objects one after another, or a list; else none."""
    calls, left = [], body.strip(SPACE)
    if left.startswith("[") and left.endswith("]"):
        left = left[1:-1]
    while left := left.strip(SPACE + ","):
        scanner = ObjectScanner()
        read = scanner.feed(left)
        call = whole_call(left[:read]) if scanner.done else None
        if call is None:
            return []
        calls.append(call)
        left = left[read:]
    return calls


def name_in(literal: str) -> str | None:
    """The name that a JSON string says; None where it can be none."""
    try:
        name = msgspec.json.decode(literal, type=str)
    except ValueError:
        return None
    return name if 1 <= len(name) <= MAX_NAME else None


def whole_call(body: str, none: bytes = b"{}") -> tuple[str, str] | None:
    """Name and arguments of a whole call; these may be an object or, as some models write, text of one.

    ``none`` stands for arguments that are not there.
    """
    try:
        call = msgspec.json.decode(body, type=_Call)
        arguments = bytes(call.arguments or call.parameters or none).decode()
        if arguments.startswith('"'):
            arguments = msgspec.json.decode(arguments, type=str)
    except (ValueError, RecursionError):
        return None
    named = 1 <= len(call.name) <= MAX_NAME
    return (call.name, arguments) if named and is_object(arguments) else None
