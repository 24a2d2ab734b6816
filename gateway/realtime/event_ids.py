"""What a client event makes is named after it; text on its way is kept as what changed of it. Pure."""

from __future__ import annotations

from ...sessions.items import derived_id, new_id
from ...sessions.journal.records import Typed
from ...sessions.text.text_buffer import TextBuffer


def typed_since(before: TextBuffer, after: TextBuffer) -> Typed:
    """What has to be written down for the text that is on its way now."""
    appended = after.text.startswith(before.text)
    start = len(before.text) if appended else _shared(before.text, after.text)
    return Typed(start=start, text=after.text[start:], role=after.role, item=after.id, call=after.call_id)


def _shared(one: str, other: str) -> int:
    """How many characters both begin with, by halving: no loop over characters."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


class EventNames:
    """Names what client events make. An event sent again makes the same again, ids and all."""

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self._event_id: str | None = None
        self._made = 0

    def of(self, event_id: str | None) -> None:
        """What is named from now on comes from this event; None: its id is not to be relied on."""
        self._event_id, self._made = event_id, 0

    def __call__(self, prefix: str) -> str:
        if self._event_id is None:
            return new_id(prefix)
        self._made += 1
        return derived_id(prefix, self._session_id, self._event_id, str(self._made))
