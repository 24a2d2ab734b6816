"""Tool calls in the hermes form, ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, from streamed
text.

Used by Qwen2.5, Qwen3, Hermes and the pocket model. The name is told as soon as it is known and the
arguments while they come. What is no call is delivered as the text it is; a call that breaks after its
name was told ends not complete. The result does not depend on how the text was cut into pieces. Knows
nothing of items or ids.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol, TypeAlias

import msgspec

from .items import MAX_NAME
from .jsonscan import ObjectScanner, is_object

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')


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
    """Splits one reply's text into words and calls, whatever form they are written in (`forms`)."""

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
        self._space = ""  # before the tag: dropped with a call, delivered with what is none
        self._trim = False  # directly after a call, space is the template's, not the model's words

    def finish(self, *, cut: bool) -> Iterator[Piece]:
        """The rest. ``cut``: the reply did not end by itself, so a call that has only begun is left out."""
        held, self._held = self._held, ""
        if self._state is State.TEXT:
            yield from self._words(held)
        elif self._state is State.ARGUMENTS:
            yield CallClosed(complete=False)
        elif self._state is State.HEAD and not cut:
            yield from self._whole(held, closed="")
        self._state = State.TAIL

    def _in_text(self) -> Iterator[Piece]:
        before, tag, after = self._held.partition(OPEN)
        if tag:
            words = before.rstrip()
            self._state, self._held, self._space = State.HEAD, after, before[len(words) :]
            yield from self._words(words)
        else:
            free = len(_without_begun_tag(self._held).rstrip())
            words, self._held = self._held[:free], self._held[free:]
            yield from self._words(words)

    def _in_head(self) -> Iterator[Piece]:
        cut = self._held.find(CLOSE)
        head = _HEAD.match(self._held, 0, len(self._held) if cut < 0 else cut)
        name = None if head is None else name_in(head[1])
        if head is not None and name is not None:
            self._state, self._held = State.ARGUMENTS, self._held[head.end() :]
            self._scanner = ObjectScanner()
            yield CallOpened(name)
        elif cut >= 0:
            body, self._held = self._held[:cut], self._held[cut + len(CLOSE) :]
            self._state = State.TEXT
            yield from self._whole(body, closed=CLOSE)

    def _in_tail(self) -> None:
        found = [(at, tag) for tag in (CLOSE, OPEN) if (at := self._held.find(tag)) >= 0]
        if not found:
            self._held = self._held[-(len(CLOSE) - 1) :]
            return
        at, tag = min(found)
        self._held = self._held[at + len(tag) :]
        self._state = State.TEXT if tag == CLOSE else State.HEAD
        self._space, self._trim = "", True

    def _whole(self, body: str, closed: str) -> Iterator[Piece]:
        """A call that could not be told while it came, or text that only looked like one."""
        space, self._space = self._space, ""
        call = whole_call(body)
        if call is None:
            yield from self._words(f"{space}{OPEN}{body}{closed}")
            return
        self._trim = True
        yield CallOpened(call[0])
        yield CallArguments(call[1])
        yield CallClosed(complete=True)

    def _words(self, words: str) -> Iterator[Piece]:
        if self._trim:
            words = words.lstrip()
        if words:
            self._trim = False
            yield Text(words)


def _without_begun_tag(text: str) -> str:
    """The text up to an end that could begin a tag."""
    begun = text.rfind("<")  # a tag has no other
    return text[:begun] if begun >= 0 and OPEN.startswith(text[begun:]) else text


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
