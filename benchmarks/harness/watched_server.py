"""``holdfast``, with its event loop watched; run it with ``python -m``: FILE, then what follows ``holdfast``.

FILE gets a line for each stop of the loop of at least `LEAST` seconds: when it ended (``time.monotonic``), how
long it was, and for how much of it the loop's thread computed, and waited for a core, in seconds; in the rest
it waited for another thread or for the disk. A stop is the time between two looks at the sockets: all that is
run in between keeps every client waiting. So it is measured from inside, and exact.
"""

from __future__ import annotations

import asyncio
import os
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
        self._schedule = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._since, self._before = 0.0, (0, 0)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        now = time.monotonic()
        if self._since and now - self._since >= LEAST:
            parts = (
                1e-9 * (after - before) for after, before in zip(self._times(), self._before, strict=True)
            )
            self._stops.write(" ".join(f"{part:.6f}" for part in (now, now - self._since, *parts)) + "\n")
            self._stops.flush()
        found = super().select(timeout)
        self._since, self._before = time.monotonic(), self._times()
        return found

    def _times(self) -> tuple[int, int]:
        """How long this thread has computed, and waited for a core, in nanoseconds."""
        computed, waited, _ = os.pread(self._schedule, 99, 0).split()
        return int(computed), int(waited)


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
