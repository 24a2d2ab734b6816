"""When Python's garbage collector runs in a server.

A full collection visits every object of the process, and stops all sockets meanwhile: for two seconds beside
ten thousand open sessions. What a closed session held is freed without it, by reference counts. It finds only
what the standard library leaves behind: two kilobytes of each connection, in its event loop.
So it runs while no turn runs, and never beside one.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

YOUNG = 20_000, 4
"""The collector's thresholds for its two young generations. A collection of the second visits some 100,000 new
objects, in some 60 ms. By default the first is collected after every 700 new objects, and with few objects more
of them are found in use and are visited again: 5,000 cost a busy server 5 to 10 % of its replies."""
NEVER = 1 << 30
"""The threshold of the third: Python does not begin a full collection by itself."""
LOOK_SECONDS = 1.0
RESTING = 3
"""A full collection is worth its time after so many of the second generation, or 300,000 objects more."""


class Collector:
    """Decides when a full collection is made. ``busy``: whether a turn runs, or waits, now.

    Freezes the objects that are there, which are those of the loaded server: no collection visits them.
    """

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._busy = busy
        self._rested = False
        gc.collect()
        gc.set_threshold(*YOUNG, NEVER)
        gc.freeze()

    async def run(self) -> None:
        """Look every `LOOK_SECONDS`, for ever."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.look()

    def look(self) -> None:
        """Make a full collection if that is due and no turn has run at this look and the one before."""
        rests = not self._busy()
        since = gc.get_count()[2]  # collections of the second generation since the last full one
        if rests and self._rested and since >= RESTING:
            gc.collect()
        self._rested = rests
