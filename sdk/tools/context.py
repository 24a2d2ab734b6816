"""A call's output as the text that a model reads, and `ToolContext`, by which a tool writes and reports.

@tool
async def search(query: str, context: ToolContext) -> str:
    context.progress("half of it", 0.5)
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from ..errors import ToolFailed

MAX_OUTPUT_BYTES = 512 << 10
"""An output has at most so many bytes as JSON: half of what a frame may have."""

Report = Callable[[str, float | None], None]
"""A function that is called when a tool reports progress: with a text for people, and how much is done, 0 to 1
(None: not known)."""
Wrote = Callable[[str], None]
"""A function that is called with each piece of output that a tool has just written."""


class ToolContext:
    """What a tool can use of its own call. A parameter of the tool that is annotated `ToolContext` gets it; the
    model does not see that parameter.

    ``call_id``: the call's id. ``cancelled``: nothing waits for the call any more; a callable in a thread can
    check it and return. `report` and `wrote` get what the tool reports and writes, on the event loop.
    """

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
        """Report progress to the reader of the run, as a `CallProgress`. `note`: a text for people. `fraction`:
        how much is done, 0 to 1 (None: not known). Call it from the event loop or from any thread. Does nothing
        once the call is cancelled."""
        if not self.cancelled:
            self._on_loop(lambda: self._report(note, fraction))

    def write(self, text: str) -> None:
        """Add a piece of text to the output; `Chat.run` sends it while the tool runs. What the tool returns, if
        not None, comes behind all pieces. Call it from the event loop or from any thread. Does nothing once the
        call is cancelled.

        Raises `ToolFailed` for a piece that is no str, and when the output gets too long: then all pieces are
        dropped.
        """
        if not isinstance(text, str):
            raise ToolFailed("A piece of the output is not text")
        text = characters(text)
        if not text or self.cancelled:
            return
        with self._writing:
            self._bytes += size_of(text) - 2  # its quotes
            if self._too_long or self._bytes > MAX_OUTPUT_BYTES:
                self._too_long = True
                self._pieces.clear()
                raise ToolFailed(f"The output has more than {MAX_OUTPUT_BYTES} bytes")
            self._pieces.append(text)
        self._on_loop(lambda: self._wrote(text))

    @property
    def written(self) -> str:
        """The output that the tool has written so far: all pieces, joined."""
        return self.written_since(0)[0]

    def written_since(self, piece: int) -> tuple[str, int]:
        """The text of the pieces from number `piece` (from 0) on, joined, and how many pieces there are now:
        the number to ask with next."""
        with self._writing:
            return "".join(self._pieces[piece:]), len(self._pieces)

    def _on_loop(self, report: Callable[[], None]) -> None:
        if self._loop is None or self._loop is _running_loop():
            report()
            return

        def later() -> None:
            if not self.cancelled:
                report()

        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(later)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def failure(message: str) -> str:
    """The output of a call that failed, for the model to read: JSON with the field `error`."""
    return output_text({"error": message})


def broken_off(written: str, error: str) -> str:
    """The output of a call that failed: what was written before, then the output `error` on a line of its
    own."""
    return f"{written}{'' if written.endswith(chr(10)) else chr(10)}{error}" if written else error


def joined(written: str, rest: str) -> str:
    """The whole output of a call: the pieces that were written, then its result `rest`. Raises `ToolFailed` if
    it is too long."""
    return checked(written + rest) if written and rest else written or rest


def output_text(result: Any) -> str:
    """A tool's result as the text that the model reads: str as it is, UTF-8 bytes decoded, anything else as
    JSON. Lone surrogates become U+FFFD. Raises `ToolFailed` if it is too long."""
    if isinstance(result, bytes | bytearray):
        with suppress(UnicodeDecodeError):
            result = bytes(result).decode()
    if not isinstance(result, str):
        result = json.dumps(msgspec.to_builtins(result, enc_hook=_builtin), ensure_ascii=False)
    return checked(characters(str(result)))


def checked(text: str) -> str:
    """The same text. Raises `ToolFailed` if it has more than `MAX_OUTPUT_BYTES` bytes as JSON."""
    if (size := size_of(text)) > MAX_OUTPUT_BYTES:
        raise ToolFailed(f"The output has {size} bytes; at most {MAX_OUTPUT_BYTES} are allowed")
    return text


def size_of(text: str) -> int:
    """The bytes of the text as JSON, with its quotes."""
    return len(msgspec.json.encode(text))


def characters(text: str) -> str:
    """The text with U+FFFD instead of each lone surrogate: file names may hold them, frames may not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _builtin(value: Any) -> Any:
    """A value that is no JSON type, as one that is: pydantic models and arrays convert themselves, the rest
    becomes text."""
    for dumps in ("model_dump", "tolist"):
        if callable(dump := getattr(value, dumps, None)) and not isinstance(value, type):
            return dump()
    return str(value)
