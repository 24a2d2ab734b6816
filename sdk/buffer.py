"""Who fills the session's one text buffer: a message that is typed, or a tool's output, which gives way to it.

Knows nothing of frames.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable


class Buffer:
    """One session's, as its client uses it. ``stale``: it may hold what an earlier client left half said."""

    def __init__(self) -> None:
        self.stale = False
        self._owner: object | None = None
        self._give_way: Callable[[], Awaitable[None]] | None = None

    def lend(self, owner: object, give_way: Callable[[], Awaitable[None]]) -> bool:
        """Give it to `owner` if nobody fills it; who comes with more right awaits `give_way` first."""
        if self._owner not in (None, owner):
            return False
        self._owner, self._give_way = owner, give_way
        return True

    async def claim(self, owner: object) -> None:
        """Give it to `owner`, once it was given up by who had it lent."""
        if self._owner is not owner:
            give_way, self._give_way = self._give_way, None
            self._owner = owner
            if give_way is not None:
                await give_way()

    def release(self, owner: object) -> None:
        """It is empty again, if it was `owner` who filled it."""
        if self._owner is owner:
            self._owner = self._give_way = None
