"""Splits reasoning from a reply: the text between two tags, such as ``<think>`` and ``</think>``, at its
beginning.

The result does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from ..text.stop_strings import first_tag


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """How one form writes reasoning: between the tags ``begin`` and ``end``.

    ``around``: tags that the model writes around its answer. The answer is delivered without them. ``label``:
    text at the beginning of the reasoning that is no part of it.
    """

    begin: str
    end: str
    around: tuple[str, ...] = ()
    label: str = ""


THINK = ReasoningTags("<think>", "</think>")


class _SplitState(Enum):
    """Where in a reply the next text is: at its beginning, in the reasoning, or in the answer."""

    BEGINNING = auto()
    REASONING = auto()
    ANSWER = auto()


class ReasoningSplitter:
    """Splits one reply into reasoning and answer. ``opened``: the template wrote the opening tag, so the reply
    begins inside the reasoning. ``calls``: an opening of calls that ends the reasoning, too; empty if there is
    none."""

    def __init__(self, tags: ReasoningTags = THINK, *, opened: bool = False, calls: str = "") -> None:
        self._tags = tags
        self._ends = (tags.end, calls) if calls else (tags.end,)
        self._state = _SplitState.REASONING if opened else _SplitState.BEGINNING
        self._held = ""
        self._lead = True  # drop white space: the next text begins the reasoning or the answer

    def feed(self, text: str) -> tuple[str, str]:
        """Take more text of the reply. Returns what is certain now: the next part of the reasoning, and the
        next part of the answer; either may be empty."""
        self._held += text
        if self._state is _SplitState.BEGINNING:
            self._begin()
        reasoning = self._reason() if self._state is _SplitState.REASONING else ""
        answer = self._answer() if self._state is _SplitState.ANSWER else ""
        return reasoning, answer

    def passes(self, text: str) -> bool:
        """Whether `feed` would return exactly ``text`` as answer now, and change nothing."""
        if self._state is not _SplitState.ANSWER or self._held or self._lead:
            return False
        return not any(tag[0] in text for tag in self._tags.around)

    def finish(self) -> tuple[str, str]:
        """Called once, when the reply is over: returns the rest of the reasoning, and the rest of the
        answer."""
        held, self._held = self._held, ""
        if self._state is _SplitState.REASONING:
            return self._trimmed(held.rstrip()), ""
        return "", held if self._state is _SplitState.BEGINNING else self._trimmed(held)

    def _begin(self) -> None:
        bare, begin = self._held.lstrip(), self._tags.begin + self._tags.label
        if bare.startswith(begin):
            self._state, self._held = _SplitState.REASONING, bare[len(begin) :]
        elif not begin.startswith(bare):
            self._state, self._lead = _SplitState.ANSWER, False

    def _reason(self) -> str:
        at, tag = first_tag(self._held, self._ends)
        reasoning = self._held[:at].rstrip()
        self._held = self._held[at + len(tag) if tag == self._tags.end else at if tag else len(reasoning) :]
        trimmed = self._trimmed(reasoning)
        if tag:
            self._state, self._lead = _SplitState.ANSWER, True
        return trimmed

    def _answer(self) -> str:
        answer = ""
        while True:
            at, tag = first_tag(self._held, self._tags.around)
            answer += self._trimmed(self._held[:at])
            self._held = self._held[at + len(tag) :]
            if not tag:
                return answer

    def _trimmed(self, text: str) -> str:
        if self._lead:
            text = text.lstrip()
            self._lead = not text
        return text
