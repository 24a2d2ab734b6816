"""What turns, runs and replies have in common: how they are read, and the warning for one that never is."""

from __future__ import annotations

import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Generator
from types import FrameType
from typing import Any, Generic, Self, TypeVar

import anyio

from .connection.responses import Rounds

_Piece = TypeVar("_Piece")
_End = TypeVar("_End")


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
        self._line = (frame.f_code.co_filename, frame.f_lineno)
        self._seen: dict[Any, Any] = frame.f_globals.setdefault("__warningregistry__", {})

    def read(self) -> None:
        """Called when reading of the turn begins: no warning is given any more."""
        self._what = None

    def __del__(self) -> None:
        if getattr(self, "_what", None) is None or sys.is_finalizing():
            return
        told = f"{self._what} was never read, so nothing was sent: await it, or iterate over it"
        warnings.warn_explicit(told, UnreadTurn, *self._line, registry=self._seen)


class Reading(ABC, Generic[_Piece, _End]):
    """Iterates over the pieces of a turn, a run or a reply; `await` reads to the end and gives that. Nothing is
    sent before. ``rounds``: the responses that have ended. ``unread``: warns if it is never read."""

    def __init__(self, rounds: Rounds, unread: Unread | None) -> None:
        self.rounds = rounds
        self.given_up = False
        """Whether the task that read was cancelled, and reading was not taken up again."""
        self._unread = unread
        self._begun = self._over = False

    @property
    def running(self) -> bool:
        """Whether it has begun and is not over."""
        return self._begun and not self._over

    def stop(self) -> None:
        """Begin no further response. What comes of the running one can still be read."""

    def close(self) -> None:
        """End it here, so that reading it ends. Nothing is sent to the server."""
        self._over = True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> _Piece:
        self.given_up = self.given_up and self._over
        if self._unread is not None:
            self._unread.read()
        try:
            return await self._next()
        except anyio.get_cancelled_exc_class():
            self.given_up = True
            raise

    def __await__(self) -> Generator[Any, None, _End]:
        return self._read_out().__await__()

    async def _read_out(self) -> _End:
        async for _ in self:
            pass
        return self._end()

    @abstractmethod
    async def _next(self) -> _Piece:
        """Read the next piece. Raises `StopAsyncIteration` at the end."""

    @abstractmethod
    def _end(self) -> _End:
        """What `await` gives, after the end."""

    @property
    def _state(self) -> str:
        return "over" if self._over else "being read" if self.running else "not begun"


def _is_ours(frame: FrameType) -> bool:
    name: str = frame.f_globals.get("__name__", "")
    return name.startswith(f"{__package__}.")
