"""Splits reasoning from a reply: the text between two tags, such as ``<think>`` and ``</think>``, at its
beginning.

The result does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from ..text.stop_strings import first_tag
from .scanner import CallParser, Piece, ReasoningText


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


class ReasoningSplitter(CallParser):
    """Splits one reply into reasoning and answer. ``answer``: splits the answer further. ``opened``: the
    template wrote the opening tag, so the reply begins inside the reasoning. ``calls``: an opening of calls
    that ends the reasoning, too; empty if there is none."""

    def __init__(
        self, tags: ReasoningTags, answer: CallParser, *, opened: bool = False, calls: str = ""
    ) -> None:
        super().__init__(_SplitState.REASONING if opened else _SplitState.BEGINNING)
        self._tags, self._answer = tags, answer
        self._ends = (tags.end, calls) if calls else (tags.end,)
        self._trim = True  # reasoning and answer begin without white space

    def passes(self, text: str) -> bool:
        """Whether ``text`` is in the answer, holds no beginning of a tag, and passes there, too."""
        if self._state is not _SplitState.ANSWER or self._held or self._trim:
            return False
        return not any(tag[0] in text for tag in self._tags.around) and self._answer.passes(text)

    def finish(self, *, cut: bool) -> Iterator[Piece]:
        """The rest; see `CallParser.finish`."""
        held, self._held = self._held, ""
        if self._state is _SplitState.REASONING:
            yield from self._thought(held.rstrip())
        else:
            self._trim &= self._state is _SplitState.ANSWER
            yield from self._answer.feed(self._trimmed(held))
        yield from self._answer.finish(cut=cut)

    def _read_on(self) -> Iterator[Piece]:
        match self._state:
            case _SplitState.BEGINNING:
                self._begin()
            case _SplitState.REASONING:
                yield from self._reason()
            case _SplitState.ANSWER:
                at, tag = first_tag(self._held, self._tags.around)
                words, self._held = self._held[:at], self._held[at + len(tag) :]
                yield from self._answer.feed(self._trimmed(words))

    def _begin(self) -> None:
        bare, begin = self._held.lstrip(), self._tags.begin + self._tags.label
        if bare.startswith(begin):
            self._state, self._held = _SplitState.REASONING, bare[len(begin) :]
        elif not begin.startswith(bare):
            self._state, self._trim = _SplitState.ANSWER, False

    def _reason(self) -> Iterator[Piece]:
        at, tag = first_tag(self._held, self._ends)
        reasoning = self._held[:at].rstrip()
        self._held = self._held[at + len(tag) if tag == self._tags.end else at if tag else len(reasoning) :]
        yield from self._thought(reasoning)
        if tag:
            self._state, self._trim = _SplitState.ANSWER, True

    def _thought(self, reasoning: str) -> Iterator[Piece]:
        if reasoning := self._trimmed(reasoning):
            yield ReasoningText(reasoning)
