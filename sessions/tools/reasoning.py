"""Splits reasoning from a reply: what stands between ``<think>`` and ``</think>`` at its beginning.

How the text was cut into pieces does not change the result.
"""

from __future__ import annotations

from enum import Enum, auto

from ..text.stop_strings import overlap

BEGIN, END = "<think>", "</think>"


class _SplitState(Enum):
    """Where in a reply the next text is."""

    BEGINNING = auto()
    REASONING = auto()
    ANSWER = auto()


class ReasoningSplitter:
    """Splits one reply into reasoning and answer. ``opened``: the template wrote ``<think>``, so the reply
    begins with reasoning."""

    def __init__(self, *, opened: bool = False) -> None:
        self._state = _SplitState.REASONING if opened else _SplitState.BEGINNING
        self._held = ""
        self._lead = True  # drop white space: it is at the beginning of a part

    def feed(self, text: str) -> tuple[str, str]:
        """More of the reasoning and of the answer: the text that is certain now."""
        self._held += text
        if self._state is _SplitState.BEGINNING:
            self._begin()
        reasoning = self._reason() if self._state is _SplitState.REASONING else ""
        answer = ""
        if self._state is _SplitState.ANSWER:
            answer, self._held = self._trimmed(self._held), ""
        return reasoning, answer

    def finish(self) -> tuple[str, str]:
        """The rest of the reasoning and of the answer."""
        held, self._held = self._held, ""
        if self._state is _SplitState.REASONING:
            return self._trimmed(held.rstrip()), ""
        return "", held if self._state is _SplitState.BEGINNING else self._trimmed(held)

    def _begin(self) -> None:
        bare = self._held.lstrip()
        if bare.startswith(BEGIN):
            self._state, self._held = _SplitState.REASONING, bare[len(BEGIN) :]
        elif not BEGIN.startswith(bare):
            self._state, self._lead = _SplitState.ANSWER, False

    def _reason(self) -> str:
        reasoning, tag, after = self._held.partition(END)
        if tag:
            self._state, self._held = _SplitState.ANSWER, after
            trimmed = self._trimmed(reasoning.rstrip())
            self._lead = True
            return trimmed
        free = len(reasoning[: len(reasoning) - overlap(reasoning, [END])].rstrip())
        self._held = reasoning[free:]
        return self._trimmed(reasoning[:free])

    def _trimmed(self, text: str) -> str:
        if self._lead:
            text = text.lstrip()
            self._lead = not text
        return text
