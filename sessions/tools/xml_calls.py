"""Reads tool calls with a tag for each parameter, ``<function=f><parameter=city>Oslo</parameter></function>``,
from streamed text. The arguments are delivered as JSON.

The text of a value does not show its type: the tool's schema says whether ``7`` is a number or a text. A name
is delivered as soon as it is known, a text value as it arrives, any other value when its tag closes. The result
does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import regex

from ..conversation.items import MAX_NAME, Tool
from ..text.stop_strings import first_tag
from .parameter_types import NULL, converted, only_text, types_of
from .scanner import CallArguments, CallClosed, CallOpened, CallParser, Piece

MAX_HEAD = 1024
"""The most characters from an opening to the end of the call's head."""


@dataclass(frozen=True, slots=True)
class XmlFormat:
    """How one form writes calls with a tag for each parameter. The head of a call is its text before the first
    parameter.

    ``openings``: texts with which a call may begin. ``head``: matches the head from there on. ``end``: the tag
    behind the last parameter. ``closings``: tags that may follow that.

    ``parameter``: matches the tag before a value; it begins with the text ``begin``. ``parameter_end``: the tag
    behind the value.

    ``exact``: a text is its value as it stands, also if it is ``null``. Else one line break at each of its ends
    belongs to the tags.

    ``marks``: the form's special tokens. Decoding drops these, so the reader puts their texts back.
    """

    openings: tuple[str, ...]
    closings: tuple[str, ...]
    head: regex.Pattern[str]
    end: str
    begin: str
    parameter: regex.Pattern[str]
    parameter_end: str
    exact: bool = False
    marks: tuple[str, ...] = ()


class _Part(Enum):
    """Where in a reply the next text is: in plain text, where a call may begin, between a call's parameters, in
    a parameter's value, or behind a call."""

    TEXT = auto()
    HEAD = auto()  # a call may begin; its name is not known yet
    BETWEEN = auto()  # in a call, before a parameter or its end
    VALUE = auto()
    BEHIND = auto()  # behind a call, where a closing tag may stand


class XmlCallParser(CallParser):
    """Splits one reply into text and calls by the table of its form. ``tools``: the tools of the turn; their
    schemas say the types of arguments."""

    def __init__(self, form: XmlFormat, tools: Sequence[Tool] = ()) -> None:
        super().__init__(_Part.TEXT)
        self._form = form
        self._schemas = {tool.name: tool.parameters for tool in tools}
        self._schema: dict[str, Any] = {}  # the schema of the open call's arguments
        self._names: set[str] = set()  # names of the open call's parameters so far
        self._value = _Value([])

    def _read_on(self) -> Iterator[Piece]:
        match self._state:
            case _Part.TEXT:
                if (yield from self._text_before(self._form.openings)):
                    self._state = _Part.HEAD
            case _Part.HEAD:
                yield from self._in_head()
            case _Part.BETWEEN:
                yield from self._in_call()
            case _Part.VALUE:
                yield from self._in_value()
            case _Part.BEHIND:
                self._behind()

    def finish(self, *, cut: bool) -> Iterator[Piece]:
        """The rest; see `CallParser.finish`."""
        held, self._held = self._held, ""
        if self._state is _Part.VALUE and held.startswith(self._form.end):
            yield CallArguments(self._value.finish() + "}")
            yield CallClosed(complete=True)
            self._trim = True
            yield from self._text(held.removeprefix(self._form.end))
        elif self._state in (_Part.BETWEEN, _Part.VALUE):
            yield CallClosed(complete=False)
        elif self._state is _Part.TEXT or (self._state is _Part.HEAD and not cut):
            yield from self._text(self._before + held)
        self._state, self._before = _Part.BEHIND, ""

    def _in_head(self) -> Iterator[Piece]:
        head = self._form.head.match(self._held, partial=True)
        if head is not None and head.partial and len(self._held) <= MAX_HEAD:
            return
        before, self._before = self._before, ""
        if head is None or head.partial or head.end() > MAX_HEAD or len(head["name"]) > MAX_NAME:
            _, tag = first_tag(self._held, self._form.openings)
            self._state, self._held = _Part.TEXT, self._held[len(tag) :]
            yield from self._text(before + tag)
            return
        self._state, self._held = _Part.BETWEEN, self._held[head.end() :]
        self._schema, self._names = self._schemas.get(head["name"], {}), set()
        yield CallOpened(head["name"])

    def _in_call(self) -> Iterator[Piece]:
        """Find the next parameter, or the end of the call. Other text is skipped."""
        form = self._form
        at, tag = first_tag(self._held, (form.end, form.begin, *form.closings))
        self._held = self._held[at:]
        if tag == form.begin:
            parameter = form.parameter.match(self._held, partial=True)
            if parameter is None:
                self._held = self._held[len(tag) :]
            elif not parameter.partial:
                self._state, self._held = _Part.VALUE, self._held[parameter.end() :]
                yield from self._begin(parameter["name"])
        elif tag:
            self._state = _Part.BEHIND
            self._held = self._held[len(tag) :] if tag == form.end else self._held
            yield CallArguments("}" if self._names else "{}")
            yield CallClosed(complete=True)

    def _begin(self, name: str) -> Iterator[Piece]:
        """Begin the value of the parameter ``name``. If a name comes again, its later values are dropped."""
        properties = self._schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        name = name if name in properties else name.strip()
        found = properties.get(name)
        types = types_of(found, self._schema)
        self._value = _Value(types, repeated=name in self._names, exact=self._form.exact)
        if name not in self._names:
            yield CallArguments(f"{', ' if self._names else '{'}{json.dumps(name, ensure_ascii=False)}: ")
        self._names.add(name)

    def _in_value(self) -> Iterator[Piece]:
        """Read a value. It ends at its closing tag, or where the next parameter begins or the call ends."""
        form = self._form
        at, tag = first_tag(self._held, (form.parameter_end, form.begin, form.end))
        text, self._held = self._held[:at], self._held[at:]
        delta = self._value.feed(text)
        if tag == form.end and not (ends := self._ends_call(self._held[len(tag) :])):
            if ends is False:
                delta += self._value.feed(tag)
                self._held = self._held[len(tag) :]
        elif tag:
            self._state = _Part.BETWEEN
            self._held = self._held[len(tag) :] if tag == form.parameter_end else self._held
            delta += self._value.finish()
        if delta:
            yield CallArguments(delta)

    def _ends_call(self, behind: str) -> bool | None:
        """Whether the tag behind the last parameter, which stands in a value without an end, ends the call:
        not if the value's own end comes before any other tag, as in code. ``behind``: what follows. None: it
        may be either."""
        form = self._form
        _, tag = first_tag(behind, (form.parameter_end, form.begin, *form.closings, *form.openings))
        return tag != form.parameter_end if tag else None

    def _behind(self) -> None:
        """Skip a closing tag behind a call, and white space before it."""
        bare = self._held.lstrip()
        closing = next((tag for tag in self._form.closings if bare.startswith(tag)), "")
        if closing or not any(tag.startswith(bare) for tag in self._form.closings):
            self._state, self._trim, self._held = _Part.TEXT, True, bare[len(closing) :]


class _Value:
    """Turns the text of one argument's value into JSON while it comes. ``types``: the types that the schema
    allows. ``repeated``: the value is dropped, because the call has had an argument of this name. ``exact``: as
    `XmlFormat` has it."""

    def __init__(self, types: list[str], *, repeated: bool = False, exact: bool = False) -> None:
        self._types = types
        self._repeated = repeated
        self._streams = only_text(types)
        self._break = "" if exact else "\n"  # what is dropped at both ends
        self._null = "" if exact and NULL not in types else NULL  # the text that is null; empty: none is
        self._held = ""
        self._begun = False  # a part of the value was delivered
        self._lead = True  # the next text is directly behind the opening tag

    def feed(self, text: str) -> str:
        """Take more text of the value. Returns what is certain now of its JSON; "" for a value that is not
        text."""
        self._held += text
        if self._lead and self._held:
            self._held, self._lead = self._held.removeprefix(self._break), False
        if not self._streams or (not self._begun and self._may_be_null(self._held)):
            return ""
        free = len(self._held) - (bool(self._break) and self._held.endswith("\n"))
        text, self._held = self._held[:free], self._held[free:]
        return self._quoted(text) if text else ""

    def finish(self) -> str:
        """Called once, when the value is over: returns the rest of its JSON; "" if it is dropped."""
        text = self._held.removesuffix(self._break)
        if self._repeated:
            return ""
        if not self._begun and not self._streams:
            return converted(text, self._types)
        null = not self._begun and text.lower() == self._null
        return NULL if null and text else self._quoted(text) + '"'

    def _may_be_null(self, text: str) -> bool:
        """Whether the value, which begins with ``text``, may be null."""
        return self._null.startswith(text.removesuffix(self._break).lower())

    def _quoted(self, text: str) -> str:
        """``text`` as the inside of a JSON string. The opening quotation mark comes first if nothing was
        delivered yet."""
        if self._repeated:
            return ""
        begin, self._begun = ("" if self._begun else '"'), True
        return begin + json.dumps(text, ensure_ascii=False)[1:-1]
