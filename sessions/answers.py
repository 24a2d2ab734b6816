"""Whether what a tool answered may enter a conversation: its call is there, and has no answer yet.

Late or out of order is no fault: what is answered stands where it arrives. Knows nothing of frames.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from .errors import CallAnswered, CallUnknown
from .items import FunctionCall, FunctionCallOutput, Item


def check_answer(
    call_id: str, items: Iterable[Item], saying: Container[str] = (), *, param: str = "item.call_id"
) -> None:
    """``saying``: calls that a running reply has made. Raises ``CallUnknown`` or ``CallAnswered``."""
    called = call_id in saying
    for item in items:
        if isinstance(item, FunctionCallOutput) and item.call_id == call_id:
            raise CallAnswered(f"The call {call_id!r} has been answered", param=param)
        called |= isinstance(item, FunctionCall) and item.call_id == call_id
    if not called:
        raise CallUnknown(f"Tool call ID {call_id!r} not found in conversation", param=param)
