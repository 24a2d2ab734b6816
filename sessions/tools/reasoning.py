"""Reasoning split off a reply's words: what stands between ``<think>`` and ``</think>`` at its beginning.

The result does not depend on how the text was cut into pieces. Knows nothing of calls, items or ids.
"""

from __future__ import annotations

from enum import Enum, auto

BEGIN, END = "<think>", "</think>"


class _State(Enum):
    BEGINNING = auto()
    THINKING = auto()
    SAYING = auto()


class ReasoningSplitter:
    """``opened``: the template has opened the reasoning already, so that the reply begins within."""

    def __init__(self, *, opened: bool = False) -> None:
        self._state = _State.THINKING if opened else _State.BEGINNING
        self._held = ""
        self._lead = True  # at the beginning of what is said or thought, space is the template's

    def feed(self, text: str) -> tuple[str, str]:
        """What is certain now of the reasoning, and of what is said."""
        self._held += text
        if self._state is _State.BEGINNING:
            self._begin()
        thought = self._think() if self._state is _State.THINKING else ""
        said = ""
        if self._state is _State.SAYING:
            said, self._held = self._trimmed(self._held), ""
        return thought, said

    def finish(self) -> tuple[str, str]:
        """The rest of both."""
        held, self._held = self._held, ""
        if self._state is _State.THINKING:
            return self._trimmed(held.rstrip()), ""
        return "", held if self._state is _State.BEGINNING else self._trimmed(held)

    def _begin(self) -> None:
        bare = self._held.lstrip()
        if bare.startswith(BEGIN):
            self._state, self._held = _State.THINKING, bare[len(BEGIN) :]
        elif not BEGIN.startswith(bare):
            self._state, self._lead = _State.SAYING, False

    def _think(self) -> str:
        thought, tag, after = self._held.partition(END)
        if tag:
            self._state, self._held = _State.SAYING, after
            told = self._trimmed(thought.rstrip())
            self._lead = True
            return told
        begun = next((n for n in range(len(END) - 1, 0, -1) if thought.endswith(END[:n])), 0)
        free = len(thought[: len(thought) - begun].rstrip())
        self._held = thought[free:]
        return self._trimmed(thought[:free])

    def _trimmed(self, text: str) -> str:
        if self._lead:
            text = text.lstrip()
            self._lead = not text
        return text
