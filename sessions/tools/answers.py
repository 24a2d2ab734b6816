"""Whether what a tool answered may enter a conversation: its call is there, and has no answer yet.

Late or out of order is no fault: what is answered stands where it arrives. Knows nothing of frames.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from ..errors import CallAnswered, CallUnknown
from ..items import FunctionCall, FunctionCallOutput, Item


class Calls:
    """The calls of a conversation: which were made, and which are answered."""

    def __init__(self, items: Iterable[Item] = ()) -> None:
        self._made: set[str] = set()
        self._answered: set[str] = set()
        for item in items:
            self.add(item)

    def add(self, item: Item) -> None:
        """One more item of the conversation."""
        if isinstance(item, FunctionCall):
            self._made.add(item.call_id)
        elif isinstance(item, FunctionCallOutput):
            self._answered.add(item.call_id)

    def copy(self) -> Calls:
        """Others that go on from these."""
        other = Calls()
        other._made, other._answered = set(self._made), set(self._answered)
        return other

    def check(self, call_id: str, saying: Container[str] = (), *, param: str = "item.call_id") -> None:
        """``saying``: calls that a running reply has made. Raises ``CallUnknown`` or ``CallAnswered``."""
        if call_id in self._answered:
            raise CallAnswered(f"The call {call_id!r} has been answered", param=param)
        if call_id not in self._made and call_id not in saying:
            raise CallUnknown(f"Tool call ID {call_id!r} not found in conversation", param=param)
