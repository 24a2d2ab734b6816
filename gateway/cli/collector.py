"""When Python's garbage collector runs in a server.

A full collection visits every object of the process, and stops all sockets meanwhile: for two seconds beside
ten thousand open sessions. What a closed session held is freed without it, by reference counts. So it is made
only while no turn runs, and only if it is short. It finds what libraries leave behind, such as a kilobyte of a
connection with TLS.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

YOUNG = 15_000, 1
"""The collector's thresholds for its two young generations. A collection of the second visits some 45,000 new
objects, in some 20 ms. By default the first is collected after every 700 new objects, and with few objects more
of them are found in use and are visited again: 5,000 cost a busy server 5 to 10 % of its replies.

Python counts new objects less those that are freed, old ones too. In a server in which sessions come as fast as
others go, that number hardly grows, and a collection would visit the objects of minutes at once, for 0.2 s. So
each look that finds a turn collects the young ones."""
NEVER = 1 << 30
"""The threshold of the third: Python does not begin a full collection by itself."""
LOOK_SECONDS = 1.0
SHORT = 30_000
"""The most objects, beside the young ones, that a full collection may visit: all take some 40 ms."""


class Collector:
    """Decides when a full collection is made. ``busy``: whether a turn runs, or waits, now.

    Freezes the objects that are there, which are those of the loaded server: no collection visits them.
    """

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._busy = busy
        self._rest = 0  # how many looks in a row found no turn
        gc.collect()
        gc.set_threshold(*YOUNG, NEVER)
        gc.freeze()

    async def run(self) -> None:
        """Look every `LOOK_SECONDS`, for ever."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.look()

    def look(self) -> None:
        """While turns run, collect the young objects. Make a full collection if there may be something to
        collect, if it is short, and if the server has rested for 2, 4, 8 … looks: to count the objects takes
        time, too."""
        if self._busy():
            self._rest = 0
            gc.collect(1)
            return
        self._rest += 1
        doubled = self._rest > 1 and not self._rest & (self._rest - 1)
        if doubled and gc.get_count()[2] and len(gc.get_objects(2)) <= SHORT:
            gc.collect()
