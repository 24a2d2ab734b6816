"""Finds replies with tool calls in the text of a chat template.

Some templates refuse a tool's output behind a reply without ``tool_calls`` (Mistral, gpt-oss), or write other
text for it. Such a template gets the calls, but with two marks instead of their arguments. The marks show
where the reply begins and ends in the rendered text. There the ids that the model sampled replace it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from markupsafe import escape

REACH = 2048
"""A rendered reply begins at most this many characters before the first mark that stands for a call's
arguments."""


@dataclass(frozen=True, slots=True)
class CallName:
    """What a template writes of a call besides its arguments: the call's id and the tool's name."""

    id: str
    tool: str


@dataclass(frozen=True, slots=True)
class CallFrame:
    """What a template writes around the arguments of a reply's calls, learned from the call ``sample``.

    ``head``: the text before the first call's arguments. ``tail``: the text behind the last call's arguments.
    ``between``: the text between an argument's name and its value, for which two marks stand.
    """

    head: str
    between: str
    tail: str
    sample: CallName

    @classmethod
    def found(
        cls, sample: CallName, text: str, start: int, marks: tuple[str, str], closing: str
    ) -> CallFrame | None:
        """Learn the frame from ``text``, a rendered conversation that ends with a reply with one call,
        ``sample``. None if the marks are not in the reply.

        ``start``: where the reply begins in ``text``. ``marks``: the two marks instead of the arguments.
        ``closing``: the control token that ends the reply; empty if there is none.
        """
        begin, end = text.find(marks[0]), text.rfind(marks[1])
        if begin < start or end < begin:
            return None
        tail = text[end + len(marks[1]) :]
        stop = tail.find(closing) if closing else -1
        between = text[begin + len(marks[0]) : end]
        return cls(text[start:begin], between, tail[:stop] if stop >= 0 else tail.rstrip(), sample)

    def written(self, argument: str, value: str) -> str:
        """The text of a reply with the sample call and one argument: its name ``argument`` and its
        ``value``."""
        return f"{self.head}{argument}{self.between}{value}{self.tail}"

    def span(
        self, text: str, begin: int, end: int, first: CallName, last: CallName
    ) -> tuple[int, int] | None:
        """Where a reply with calls begins and ends in ``text``. Its marks reach from ``begin`` to
        ``end``. ``first``, ``last``: its first and last call. None if the text around the marks does not
        fit the frame."""
        head = re.compile(f"{self._pattern(self.head, first)}\\Z").search(text, max(0, begin - REACH), begin)
        tail = re.compile(self._pattern(self.tail, last)).match(text, end)
        return None if head is None or tail is None else (head.start(), tail.end())

    def _pattern(self, part: str, call: CallName) -> str:
        """A regular expression for ``part`` of the frame with the id and tool of ``call``. A number in it
        matches any number, because templates count calls. An id with the tool's name is found by that."""
        own = self.sample
        part = part if own.tool in own.id else part.replace(own.id, "\0")
        names = (call.tool, json.dumps(call.tool, ensure_ascii=False)[1:-1], str(escape(call.tool)))
        pattern = re.sub("[0-9]+", "[0-9]+", part.replace(own.tool, "\1"))
        return (
            re.escape(pattern)
            .replace(re.escape("[0-9]+"), "[0-9]+")
            .replace(re.escape("\0"), re.escape(call.id))
            .replace(re.escape("\1"), f"(?:{'|'.join(map(re.escape, names))})")
        )
