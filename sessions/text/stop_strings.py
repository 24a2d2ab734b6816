"""Stop strings in streamed text: what could still begin one is held back.

The match that ends first counts; of those that end together, the one that begins first. So the result
does not depend on how the text was cut into pieces. Knows nothing of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string in text that comes in pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._firsts = frozenset(stop[0] for stop in stops)
        self._held = ""
        self.matched = False

    def feed(self, text: str) -> str:
        """The text that may be delivered now; after a match nothing more ever is."""
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
        free = len(text) - self._overlap(text)
        self._held = text[free:]
        return text[:free]

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if text[-length] in self._firsts and any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
