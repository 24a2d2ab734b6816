"""``holdfast``, with its event loop watched; run it with ``python -m``: FILE, then what follows ``holdfast``.

FILE gets a line for each stop of the loop of at least `LEAST` seconds: when it ended (``time.monotonic``), how
long it was, and how long the loop's thread computed meanwhile, in seconds. A stop is the time between two looks
at the sockets: all that the loop runs in between keeps every client waiting. So it is measured from inside, and
exact; on cores that others use, too, a stop is longer than what was computed in it.
"""

from __future__ import annotations

import asyncio
import selectors
import sys
import time
from typing import IO

from holdfast.gateway.cli.main import main

MODULE = "holdfast.benchmarks.harness.watched_server"
LEAST = 0.01


class WatchedSelector(selectors.DefaultSelector):
    """A selector that writes down how long the loop was away between two of its calls."""

    def __init__(self, stops: IO[str]) -> None:
        super().__init__()
        self._stops = stops
        self._since = self._computed = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        now = time.monotonic()
        if self._since and now - self._since >= LEAST:
            computed = time.thread_time() - self._computed
            self._stops.write(f"{now:.6f} {now - self._since:.6f} {computed:.6f}\n")
            self._stops.flush()
        found = super().select(timeout)
        self._since, self._computed = time.monotonic(), time.thread_time()
        return found


class WatchedPolicy(asyncio.DefaultEventLoopPolicy):
    """Makes loops that are watched."""

    def __init__(self, stops: IO[str]) -> None:
        super().__init__()
        self._stops = stops

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.SelectorEventLoop(WatchedSelector(self._stops))


if __name__ == "__main__":
    asyncio.set_event_loop_policy(WatchedPolicy(open(sys.argv.pop(1), "a", encoding="ascii")))  # noqa: SIM115
    main()
