"""Stop strings in streamed text: what may begin one is held back.

The match that ends first counts; of those that end together, the one that begins first. So the result does not
depend on how the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


class StopMatcher:
    """Finds the first stop string in text that comes in pieces. ``found``: that string; None before a match."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    @property
    def matched(self) -> bool:
        """Whether a stop string was found."""
        return self.found is not None

    def feed(self, text: str) -> str:
        """Take more text. Returns what may be delivered now. If a stop string is complete, that is the text
        before it, ``matched`` becomes true, and later calls return ""."""
        if self.matched:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.found = min(found)
            self._held = ""
            return text[:at]
        free = len(text) - overlap(text, self._stops)
        self._held = text[free:]
        return text[:free]

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, tags: Collection[str]) -> int:
    """The length of the longest end of ``text`` that is a beginning of one of ``tags``, and not all of it.
    Callers hold that end back, because later text may complete a stop string, a tag or a control token."""
    firsts = {tag[:1] for tag in tags}
    for length in range(min(len(text), max(map(len, tags), default=1) - 1), 0, -1):
        end = text[-length:]
        if end[0] in firsts and any(len(tag) > length and tag.startswith(end) for tag in tags):
            return length
    return 0


def first_tag(text: str, tags: Sequence[str]) -> tuple[int, str]:
    """The index of the first of the tags in the text, and that tag. If there is none, the index at which one
    may begin at the text's end, and an empty tag."""
    found = [(at, tag) for tag in tags if (at := text.find(tag)) >= 0]
    return min(found) if found else (len(text) - overlap(text, tags), "")
