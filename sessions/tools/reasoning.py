"""Splits reasoning from a reply: what stands between ``<think>`` and ``</think>`` at its beginning.

How the text was cut into pieces changes no result.
"""

from __future__ import annotations

from enum import Enum, auto

BEGIN, END = "<think>", "</think>"


class _At(Enum):
    """Where in a reply the next text is."""

    BEGINNING = auto()
    REASONING = auto()
    ANSWER = auto()


class ReasoningSplitter:
    """Reads one reply. ``opened``: the template wrote the opening tag, so the reply begins inside."""

    def __init__(self, *, opened: bool = False) -> None:
        self._at = _At.REASONING if opened else _At.BEGINNING
        self._held = ""
        self._lead = True  # white space at the beginning of either part is the template's

    def feed(self, text: str) -> tuple[str, str]:
        """The reasoning and the answer that are certain now."""
        self._held += text
        if self._at is _At.BEGINNING:
            self._begin()
        reasoning = self._reason() if self._at is _At.REASONING else ""
        answer = ""
        if self._at is _At.ANSWER:
            answer, self._held = self._trimmed(self._held), ""
        return reasoning, answer

    def finish(self) -> tuple[str, str]:
        """The rest of both."""
        held, self._held = self._held, ""
        if self._at is _At.REASONING:
            return self._trimmed(held.rstrip()), ""
        return "", held if self._at is _At.BEGINNING else self._trimmed(held)

    def _begin(self) -> None:
        bare = self._held.lstrip()
        if bare.startswith(BEGIN):
            self._at, self._held = _At.REASONING, bare[len(BEGIN) :]
        elif not BEGIN.startswith(bare):
            self._at, self._lead = _At.ANSWER, False

    def _reason(self) -> str:
        reasoning, tag, after = self._held.partition(END)
        if tag:
            self._at, self._held = _At.ANSWER, after
            trimmed = self._trimmed(reasoning.rstrip())
            self._lead = True
            return trimmed
        begun = next((n for n in range(len(END) - 1, 0, -1) if reasoning.endswith(END[:n])), 0)
        free = len(reasoning[: len(reasoning) - begun].rstrip())
        self._held = reasoning[free:]
        return self._trimmed(reasoning[:free])

    def _trimmed(self, text: str) -> str:
        if self._lead:
            text = text.lstrip()
            self._lead = not text
        return text
