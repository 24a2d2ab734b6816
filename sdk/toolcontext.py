"""What a tool may know of its own call: a parameter annotated `ToolContext` gets it, untold to the model.

    @tool
    async def search(query: str, context: ToolContext) -> str:
        context.progress("half of it", 0.5)

Knows nothing of tools.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

Report = Callable[[str, float | None], None]
"""Takes a note of how far a call is, and a share in 0 to 1."""


class ToolContext:
    """One call's. ``cancelled``: nobody waits for it any more, which a callable in a thread may ask."""

    def __init__(self, call_id: str = "", report: Report = lambda note, fraction: None) -> None:
        self.call_id = call_id
        self.cancelled = False
        self._report = report
        self._loop = _running_loop()

    def progress(self, note: str, fraction: float | None = None) -> None:
        """Tell how far it is; from the event loop, or from any thread."""
        if self.cancelled:
            return
        if self._loop is None or self._loop is _running_loop():
            self._report(note, fraction)
        else:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._tell, note, fraction)

    def _tell(self, note: str, fraction: float | None) -> None:
        if not self.cancelled:
            self._report(note, fraction)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
