"""A warning for a turn that was made and never read. Nothing is sent for such a turn."""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any


class UnreadTurn(RuntimeWarning):
    """The warning for a turn, reply or run that was made and never read, as Python warns of a coroutine that
    was never awaited."""


class Unread:
    """Warns with `UnreadTurn` when it is freed before `read` was called; once for each line of code.

    ``what``: the call that made the turn, as the warning shows it. The line is the nearest one outside the SDK.
    """

    def __init__(self, what: str) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and _is_ours(frame):
            frame = frame.f_back
        self._what: str | None = what
        self._place = (frame.f_code.co_filename, frame.f_lineno)
        self._seen: dict[Any, Any] = frame.f_globals.setdefault("__warningregistry__", {})

    def read(self) -> None:
        """Called when reading of the turn begins: no warning is given any more."""
        self._what = None

    def __del__(self) -> None:
        if getattr(self, "_what", None) is None or sys.is_finalizing():
            return
        told = f"{self._what} was never read, so nothing was sent: await it, or iterate over it"
        warnings.warn_explicit(told, UnreadTurn, *self._place, registry=self._seen)


def _is_ours(frame: FrameType) -> bool:
    name: str = frame.f_globals.get("__name__", "")
    return name.startswith(f"{__package__}.")
