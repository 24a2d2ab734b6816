"""What a tool may know of its own call: a parameter annotated `ToolContext` gets it, untold to the model.

    @tool
    async def search(query: str, context: ToolContext) -> str:
        context.progress("half of it", 0.5)

Knows nothing of tools.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

from ..errors import ToolFailed
from .outputs import MAX_OUTPUT_BYTES, characters, size_of

Report = Callable[[str, float | None], None]
"""Takes a note of how far a call is, and a share in 0 to 1."""
Wrote = Callable[[str], None]
"""Takes a piece of the output."""


class ToolContext:
    """One call's. ``cancelled``: nobody waits for it any more, which a callable in a thread may ask."""

    def __init__(
        self,
        call_id: str = "",
        report: Report = lambda note, fraction: None,
        wrote: Wrote = lambda text: None,
    ) -> None:
        self.call_id = call_id
        self.cancelled = False
        self._report = report
        self._wrote = wrote
        self._pieces: list[str] = []
        self._bytes = 0
        self._too_long = False
        self._writing = threading.Lock()
        self._loop = _running_loop()

    def progress(self, note: str, fraction: float | None = None) -> None:
        """Tell how far it is; from the event loop, or from any thread."""
        if not self.cancelled:
            self._on_loop(lambda: self._report(note, fraction))

    def write(self, text: str) -> None:
        """Give a piece of the output, which the model is given while the tool still runs; from the event loop,
        or from any thread. What the tool returns, if not None, stands behind all pieces.

        Raises `ToolFailed` for what is no str, and for more than an output may have: then none of it counts.
        """
        if not isinstance(text, str):
            raise ToolFailed(f"A piece of an output is a str, not {type(text).__name__}")
        text = characters(text)
        if not text or self.cancelled:
            return
        with self._writing:
            self._bytes += size_of(text) - 2  # its quotes
            if self._too_long or self._bytes > MAX_OUTPUT_BYTES:
                self._too_long = True
                self._pieces.clear()
                raise ToolFailed(f"The output has more than {MAX_OUTPUT_BYTES} bytes, which cannot be read")
            self._pieces.append(text)
        self._on_loop(lambda: self._wrote(text))

    @property
    def written(self) -> str:
        """All pieces so far."""
        return self.written_since(0)[0]

    def written_since(self, piece: int) -> tuple[str, int]:
        """The text of the pieces from this number on, and how many there are by now."""
        with self._writing:
            return "".join(self._pieces[piece:]), len(self._pieces)

    def _on_loop(self, tell: Callable[[], None]) -> None:
        if self._loop is None or self._loop is _running_loop():
            tell()
            return

        def later() -> None:
            if not self.cancelled:
                tell()

        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(later)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
