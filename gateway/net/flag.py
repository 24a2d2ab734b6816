"""A flag that coroutines wait for, like `asyncio.Event`, in a tenth of its memory.

A connection has several, and most of the time nothing waits for them. `asyncio.Event` holds a deque of 760
bytes from the start; this one makes its list of waiting futures at the first wait.
"""

from __future__ import annotations

import asyncio


class Flag:
    """Set or not; at first it is not, unless ``on``. Use it from one event loop."""

    __slots__ = ("_on", "_waiting")

    def __init__(self, *, on: bool = False) -> None:
        self._on = on
        self._waiting: list[asyncio.Future[bool]] | None = None

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._on

    def set(self) -> None:
        """Set it, and let everything that waits for it go on."""
        self._on = True
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            for future in waiting:
                if not future.done():
                    future.set_result(True)

    def clear(self) -> None:
        """Clear it: later calls of `wait` wait."""
        self._on = False

    async def wait(self) -> bool:
        """Wait until it is set; what waits goes on even if it is cleared again right after. Always true."""
        if self._on:
            return True
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting = [*(self._waiting or ()), future]
        try:
            return await future
        finally:
            if self._waiting is not None and future in self._waiting:  # it was cancelled
                self._waiting.remove(future)
