"""Stop strings in streamed text: what may begin one is held back.

The match that ends first counts; of those that end together, the one that begins first. So the result does not
depend on how the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


class StopMatcher:
    """Finds the first stop string in text that comes in pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched = False

    def feed(self, text: str) -> str:
        """The text that may be delivered now; nothing after a match."""
        if self.matched:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.matched = True
            self._held = ""
            return text[: min(found)[1]]
        free = len(text) - overlap(text, self._stops)
        self._held = text[free:]
        return text[:free]

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, tags: Collection[str]) -> int:
    """Length of the longest end of ``text`` that is a beginning of one of ``tags``, and not all of it."""
    firsts = {tag[:1] for tag in tags}
    for length in range(min(len(text), max(map(len, tags), default=1) - 1), 0, -1):
        end = text[-length:]
        if end[0] in firsts and any(len(tag) > length and tag.startswith(end) for tag in tags):
            return length
    return 0
