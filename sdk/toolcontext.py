"""What a tool may know of its own call: a parameter annotated `ToolContext` gets it, untold to the model.

    @tool
    async def search(query: str, context: ToolContext) -> str:
        context.progress("half of it", 0.5)

Knows nothing of tools.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import anyio.from_thread

Report = Callable[[str, float | None], None]
"""Takes a note of how far a call is, and a share in 0 to 1."""


class ToolContext:
    """One call's. ``cancelled``: nobody waits for it any more, which a callable in a thread may ask."""

    def __init__(self, call_id: str = "", report: Report = lambda note, fraction: None) -> None:
        self.call_id = call_id
        self.cancelled = False
        self._report = report
        self._loop_thread = threading.get_ident()

    def progress(self, note: str, fraction: float | None = None) -> None:
        """Tell how far it is; from the event loop, or from the thread a sync tool runs in."""
        if self.cancelled:
            return
        if threading.get_ident() == self._loop_thread:
            self._report(note, fraction)
        else:
            anyio.from_thread.run_sync(self._report, note, fraction)
