"""Reads tool calls with JSON arguments from streamed text: one incremental scanner, and a table for each form.

`CallFormat` says how a form writes calls; `formats` holds the tables. `CallScanner` splits a reply into text
and calls by such a table. A call's name is delivered as soon as it is known, its arguments as they arrive. Text
that only looks like a call is delivered as text. If the arguments of a call prove to be broken, it is closed
as not complete. The result does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

import msgspec
import regex

from ..conversation.items import MAX_NAME
from ..text.stop_strings import first_tag
from .objects import SPACE, GemmaScanner, ObjectScanner, object_in

_FIRST_KEY = re.compile(r'\{\s*"([^"\\]*)"')
_BARE = regex.compile(r'\s*(?:```[a-z]*\s*)?(?P<call>\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)")')
_BLOCK = re.compile(r"```[a-z]*\s*(.*?)\s*```", re.DOTALL)
_CALL_KEYS = frozenset({"type", "id", "tool_call_id", "arguments", "parameters", "function"})
_ARGUMENTS_READ = '{"arguments": {}'


# --- what a reply is split into ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlainText:
    """Text outside calls."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """A part of the model's reasoning, in the form of calls that writes it between texts and calls
    (harmony)."""

    text: str


@dataclass(frozen=True, slots=True)
class CallOpened:
    """A call of the tool ``name`` begins."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the call's arguments: JSON text."""

    delta: str


@dataclass(frozen=True, slots=True)
class CallClosed:
    """The call ended. ``complete``: its arguments are a whole JSON object."""

    complete: bool


Piece: TypeAlias = PlainText | ReasoningText | CallOpened | CallArguments | CallClosed


class CallParser(ABC):
    """Splits the text of one reply into plain text, reasoning and calls. ``state``: where in the reply the next
    text is; each form has its own states."""

    def __init__(self, state: Enum) -> None:
        self._state = state
        self._held = ""  # text that is not decided yet
        self._before = ""  # text before `_held` that is delivered if no call follows
        self._trim = False  # drop white space, because the text is directly behind a call or its closing tag

    def feed(self, text: str) -> Iterator[Piece]:
        """Take more text of the reply. Yields what is certain now, in order: text, reasoning, parts of
        calls."""
        self._held += text
        before: tuple[Enum, int] | None = None
        while self._held and before != (self._state, len(self._held)):
            before = (self._state, len(self._held))
            yield from self._read_on()

    def passes(self, text: str) -> bool:
        """Whether `feed` would yield all of ``text`` as plain text now, and change nothing. False if that is
        not known."""
        return False

    @abstractmethod
    def finish(self, *, cut: bool) -> Iterator[Piece]:
        """Called once, when the reply is over: yields the rest of its text, reasoning and calls. ``cut``: it
        was ended from outside; then a call without a complete name is dropped."""

    @abstractmethod
    def _read_on(self) -> Iterator[Piece]:
        """Read on in the held text, as the state says. Called again as long as state or text change."""

    def _trimmed(self, text: str) -> str:
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return text

    def _text_before(self, openings: Sequence[str]) -> Generator[Piece, None, str]:
        """Deliver the held text up to the first of these tags, but hold white space before it back. Returns the
        tag, with which the held text begins then; "" if there is none."""
        at, tag = first_tag(self._held, openings)
        words = self._held[:at].rstrip() if openings else self._held
        if tag:
            self._before = self._held[len(words) : at]
        self._held = self._held[at if tag else len(words) :]
        yield from self._text(words)
        return tag

    def _text(self, words: str) -> Iterator[Piece]:
        if words := self._trimmed(words):
            yield PlainText(words)


class TextParser(CallParser):
    """Delivers all of a reply as plain text."""

    def __init__(self) -> None:
        super().__init__(_ScanState.TEXT)

    def passes(self, text: str) -> bool:
        """Always."""
        return True

    def finish(self, *, cut: bool) -> Iterator[Piece]:
        """Nothing is left; see `CallParser.finish`."""
        return iter(())

    def _read_on(self) -> Iterator[Piece]:
        words, self._held = self._held, ""
        yield from self._text(words)


# --- calls ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How one form writes calls with JSON arguments. The head of a call is its text before the ``{`` of its
    arguments.

    ``head``: matches the head of a call that is an object; its group ``name`` is a JSON string. None if the
    form has no such calls.

    ``openings``: tags before calls. If there are none, a reply is either only calls or only text.

    ``closing``: the tag behind calls. If it is empty, a call ends with its arguments.

    ``over``: of a form without a closing tag: the tag behind the last call, where text may follow. If it is
    empty, text behind a call is dropped.

    ``optional``: text that may come between an opening, or the beginning of the reply, and the calls.

    ``listed``: a JSON list of calls may follow an opening.

    ``key``: the key of the tool's name in a call's object.

    ``named``: matches the head of a call that is not an object but begins with a bare ``name``; None if the
    form has no such calls.

    ``no_arguments``: the arguments of a call's object that has only a name. If empty, such an object is not a
    call.

    ``bare``: a whole reply that is nothing but one call of an offered tool, alone or as a block of code, is a
    call without its tags.

    ``quote``: the arguments are in the notation of Gemma, with this text around strings. If it is empty, they
    are JSON.

    ``marks``: the form's special tokens. Decoding drops these, so the reader puts their texts back.
    """

    head: re.Pattern[str] | None = None
    openings: tuple[str, ...] = ()
    closing: str = ""
    over: str = ""
    optional: str = ""
    listed: bool = False
    key: str = "name"
    named: regex.Pattern[str] | None = None
    no_arguments: bytes = b""
    bare: bool = False
    quote: str = ""
    marks: tuple[str, ...] = ()


class _ScanState(Enum):
    """Where in a reply the next text is: in plain text, where a call may begin, in a call's arguments, or
    behind them."""

    BARE = auto()  # at the beginning of a reply that may be nothing but a call
    TEXT = auto()
    HEAD = auto()  # a call may begin; its name is not known yet
    ARGUMENTS = auto()
    BEHIND = auto()  # after a call's arguments, until text or another call may follow


class CallScanner(CallParser):
    """Splits one reply into text and calls by the table of its form.

    In a form with a closing tag, everything between an opening and the closing tag is either only calls or
    text. In other forms, text that begins like a call is a call until it breaks. Text behind a call is dropped
    there, up to the tag ``over``; only further calls are delivered. ``names``: those of the tools that are
    offered.
    """

    def __init__(self, form: CallFormat, names: Collection[str] = ()) -> None:
        bare = _ScanState.BARE if form.bare and names else None
        super().__init__(bare or (_ScanState.TEXT if form.openings else _ScanState.HEAD))
        self._form = form
        self._names = names
        self._keys = _CALL_KEYS | {form.key}
        self._listed = False  # the call that may begin is an element of a list
        self._called = False  # a call was delivered; in forms with a closing tag: since the last tag
        self._object: ObjectScanner | GemmaScanner = ObjectScanner()  # what is read: a call or its arguments
        self._scanned = 0  # how many characters of `_held` `_object` has read in the state HEAD
        self._body = ""  # what it has made of them
        self._around: ObjectScanner | GemmaScanner = ObjectScanner()
        """The object around the arguments: finds where the call ends."""
        self._lost = False  # no list of calls follows: skip everything up to a tag
        self._firsts = frozenset(opening[0] for opening in form.openings)

    def passes(self, text: str) -> bool:
        """Whether ``text`` is outside calls, holds no beginning of one, and does not end with white space,
        which a call behind it would drop."""
        if self._state is not _ScanState.TEXT or self._held or self._trim or not self._firsts:
            return False
        return not text[-1].isspace() and self._firsts.isdisjoint(text)

    def _read_on(self) -> Iterator[Piece]:
        match self._state:
            case _ScanState.BARE:
                self._in_bare()
            case _ScanState.TEXT:
                yield from self._in_text()
            case _ScanState.HEAD if self._form.closing:
                yield from self._in_another() if self._called else self._in_first()
            case _ScanState.HEAD:
                yield from self._in_head()
            case _ScanState.ARGUMENTS:
                yield from self._in_arguments()
            case _ScanState.BEHIND if self._form.closing:
                self._behind_in_tag()
            case _ScanState.BEHIND:
                self._behind()

    def finish(self, *, cut: bool) -> Iterator[Piece]:
        """The rest; see `CallParser.finish`."""
        held, self._held = self._held, ""
        if self._state is _ScanState.ARGUMENTS:
            yield CallClosed(complete=False)
        elif self._state is _ScanState.BARE:
            calls = () if cut else _whole_calls(held, self._form)
            yield from _pieces_of(calls[0]) if len(calls) == 1 else self._text(held)
        elif self._state is _ScanState.TEXT:
            yield from self._text(held)
        elif self._state is _ScanState.HEAD and not self._called and not cut:
            yield from self._judge(held, "") if self._form.closing else self._text(self._before + held)
        self._state = _ScanState.BEHIND

    def _in_bare(self) -> None:
        """Hold the reply as long as it can be nothing but a call; then go on to the state TEXT."""
        if not self._scanned:
            head = _BARE.match(self._held, partial=True)
            if head is not None and head.partial:
                return
            if head is None or head["name"] not in self._names:
                self._state = _ScanState.TEXT
                return
            self._scanned = head.start("call")
        self._scan(len(self._held))
        if self._object.broken or self._held[self._scanned :].strip(SPACE + "`"):
            self._state = _ScanState.TEXT

    def _in_text(self) -> Iterator[Piece]:
        if tag := (yield from self._text_before(self._form.openings)):
            self._called = False
            self._expect(self._held[len(tag) :], self._before + tag)

    def _in_arguments(self) -> Iterator[Piece]:
        self._held = self._held[self._object.feed(self._held) :]
        if self._object.written:
            yield CallArguments(self._object.written)
        if self._object.done or self._object.broken:
            self._state = _ScanState.BEHIND
            yield CallClosed(self._object.done)

    def _expect(self, held: str, before: str = "", *, listed: bool = False) -> None:
        """Go to the state HEAD: ``held`` may begin with a call. ``before``: text that is delivered first if it
        does not. ``listed``: it is an element of a list."""
        self._state, self._held, self._before, self._listed = _ScanState.HEAD, held, before, listed
        self._object, self._scanned, self._body = ObjectScanner(), 0, ""

    def _scan(self, end: int) -> None:
        """In the states BARE and HEAD: read on in the object, up to the index ``end``."""
        self._scanned += self._object.feed(self._held[self._scanned : end])
        self._body += self._object.written

    def _open(self, name: str, held: str) -> Iterator[Piece]:
        """Go to the state ARGUMENTS: the call of the tool ``name`` begins, and ``held`` begins with its
        arguments."""
        self._state, self._held, self._called = _ScanState.ARGUMENTS, held, True
        quote = self._form.quote
        self._object = GemmaScanner(quote) if quote else ObjectScanner()
        self._around, self._lost = ObjectScanner(), False
        self._around.feed(_ARGUMENTS_READ)
        yield CallOpened(name)

    def _opened(self, end: int) -> tuple[str, str] | None:
        """If the held text begins with the head of a call (its text before the arguments) that ends before the
        index ``end``: the tool's name, and the held text from the arguments on. Else None."""
        form = self._form.head
        head = None if form is None else form.match(self._held, 0, end)
        name = None if head is None else _name_in(head["name"])
        return None if head is None or name is None else (name, self._held[head.end() - 1 :])

    # --- forms without a closing tag ---

    def _in_head(self) -> Iterator[Piece]:
        form, bare = self._form, self._held.lstrip()
        self._before += self._held[: len(self._held) - len(bare)]
        self._held = bare
        if not bare:
            return
        if form.optional and not self._called and form.optional.startswith(bare[: len(form.optional)]):
            if len(bare) >= len(form.optional):
                before = self._before + form.optional if form.openings else ""
                self._expect(bare[len(form.optional) :], before)
        elif form.listed and not self._listed and bare[0] == "[":
            self._expect(bare[1:], self._before + "[", listed=True)
        elif bare[0] == "{" and form.head is not None:
            yield from self._in_object(form.head)
        elif form.named is not None and not self._listed:
            yield from self._in_named(form.named)
        else:
            yield from self._no_call()

    def _in_object(self, form: re.Pattern[str]) -> Iterator[Piece]:
        """Read an object. If its head does not match, it can still be a call: its first key must be one that
        calls have."""
        opened = self._opened(len(self._held))
        if opened is not None:
            yield from self._open(*opened)
            return
        head, key = form.match(self._held), _FIRST_KEY.match(self._held)
        if head is None and (key is None or key[1] in self._keys):
            self._scan(len(self._held))
            if not self._object.broken and not self._object.done:
                return
            call = _whole_call(self._body, self._form) if self._object.done else None
            if call is not None:
                self._state, self._held, self._called = _ScanState.BEHIND, self._held[self._scanned :], True
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
        """The held text is not a call. Before the first call: deliver it as text. Behind a call: drop its
        first character, and look for the next call."""
        if self._called:
            self._state, self._held = _ScanState.BEHIND, self._held[1:]
        else:
            self._state = _ScanState.TEXT
            yield from self._text(self._before)

    def _behind(self) -> None:
        """After a call, in a form without a closing tag: drop text up to the next opening tag or, in forms
        without these and inside a list, the next ``{``. There a call may begin: go to the state HEAD. Behind
        the tag ``over``, go to the state TEXT."""
        form = self._form
        end, tag = first_tag(self._held, (*form.openings, form.over) if form.over else form.openings)
        begun = self._held.find("{", 0, end) if not form.openings or self._listed else -1
        if begun >= 0:
            self._expect(self._held[begun:], listed=self._listed)
        elif tag and tag == form.over:
            self._state, self._held, self._trim = _ScanState.TEXT, self._held[end + len(tag) :], True
        elif tag:
            self._expect(self._held[end + len(tag) :])
        else:
            self._held = self._held[end:]

    # --- forms with a closing tag ---

    def _in_first(self) -> Iterator[Piece]:
        """Read what follows an opening tag. The call opens as soon as its head (its text up to the arguments,
        with the tool's name) is there. Otherwise wait for the closing tag: then all the text between the tags
        is calls, if it is nothing else, or plain text."""
        closing = self._form.closing
        cut = self._held.find(closing)
        opened = self._opened(len(self._held) if cut < 0 else cut)
        if opened is not None:
            yield from self._open(*opened)
        elif cut >= 0:
            body, self._held = self._held[:cut], self._held[cut + len(closing) :]
            self._state = _ScanState.TEXT
            yield from self._judge(body, closing)

    def _in_another(self) -> Iterator[Piece]:
        """Read an object behind a call. If its head does not match, wait until the object is whole. It is never
        delivered as text."""
        end, tag = first_tag(self._held, (self._form.closing, *self._form.openings))
        opened = self._opened(end)
        if opened is not None:
            yield from self._open(*opened)
            return
        self._scan(end)
        if not (self._object.done or self._object.broken or tag):
            return
        self._held = self._held[self._scanned :]
        self._state, self._around = _ScanState.BEHIND, self._object
        call = _whole_call(self._body, self._form) if self._object.done else None
        if call is not None:
            yield from _pieces_of(call)

    def _behind_in_tag(self) -> None:
        """After a call, in a form with a closing tag: drop text up to the next object, which may be another
        call, or up to the closing tag or another opening, and go to the state that fits."""
        end, tag = first_tag(self._held, (self._form.closing, *self._form.openings))
        begun = self._next_object(self._held[:end])
        if begun is not None:
            self._expect(self._held[begun:])
            return
        self._held = self._held[end + len(tag) :]
        if tag:
            self._called, self._trim = False, True
            if tag != self._form.closing:
                self._expect(self._held, tag)
            else:
                self._state = _ScanState.TEXT

    def _next_object(self, inside: str) -> int | None:
        """The index in ``inside`` at which another object begins; None if there is none. ``inside``: the text
        behind a call and before the tag."""
        if self._lost or self._object.broken:
            return None
        read = self._around.feed(inside)
        bare = inside[read:].lstrip(SPACE + ",") if self._around.done else ""
        self._lost = bool(bare) and bare[0] != "{"
        return len(inside) - len(bare) if bare and not self._lost else None

    def _judge(self, body: str, closing: str) -> Iterator[Piece]:
        """Deliver ``body``, all text between two tags: as calls if it is nothing but calls, otherwise as text.
        ``closing``: the tag behind it."""
        calls = _whole_calls(body, self._form)
        if not calls:
            yield from self._text(self._before + body + closing)
            return
        self._trim = True
        for call in calls:
            yield from _pieces_of(call)


def _pieces_of(call: tuple[str, str]) -> Iterator[Piece]:
    yield CallOpened(call[0])
    yield CallArguments(call[1])
    yield CallClosed(complete=True)


def _whole_calls(body: str, form: CallFormat) -> list[tuple[str, str]]:
    """The names and arguments of the calls in ``body``, which must be objects one after another, or a list, or
    these as a block of code. Empty if it has anything else."""
    calls, left = [], body.strip(SPACE)
    if (block := _BLOCK.fullmatch(left)) is not None:
        left = block[1].strip(SPACE)
    if left.startswith("[") and left.endswith("]"):
        left = left[1:-1]
    while left := left.strip(SPACE + ","):
        scanner = ObjectScanner()
        read = scanner.feed(left)
        call = _whole_call(scanner.written, form) if scanner.done else None
        if call is None:
            return []
        calls.append(call)
        left = left[read:]
    return calls


def _name_in(literal: str | bytes) -> str | None:
    """The tool's name in a JSON string; None if it is not a valid name."""
    try:
        name = msgspec.json.decode(literal, type=str)
    except ValueError:
        return None
    return name if 1 <= len(name) <= MAX_NAME else None


def _whole_call(body: str, form: CallFormat) -> tuple[str, str] | None:
    """The name and the arguments of one whole object; None if it is not a call.

    Some models write the arguments as a string that holds an object, or as null if there are none, or put the
    call into an object as its ``function``.
    """
    try:
        call = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        if form.key not in call and bytes(call.get("function", b""))[:1] == b"{":
            call = msgspec.json.decode(call["function"], type=dict[str, msgspec.Raw])
        arguments = bytes(call.get("arguments") or call.get("parameters") or form.no_arguments).decode()
        if arguments.startswith('"'):
            arguments = msgspec.json.decode(arguments, type=str)
        if arguments.strip(SPACE) == "null":
            arguments = "{}"
    except (ValueError, RecursionError):
        return None
    name, whole = _name_in(bytes(call.get(form.key, b""))), object_in(arguments)
    return None if name is None or whole is None else (name, whole)
