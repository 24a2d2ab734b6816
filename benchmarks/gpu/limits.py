"""A time limit for what waits: for a server, a socket or a process. A library's call is not stopped."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class _OutOfTime(KeyboardInterrupt):
    """Not an ``Exception``: no task and no callback of an event loop keeps it to itself."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Leaves the block when it has taken so long, by way of all that it would do at its end.

    For the main thread. Raises ``TimeoutError``.
    """

    def strike(number: int, frame: object) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, strike)
    set_before = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _OutOfTime:
        raise TimeoutError(f"not done within {seconds:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *set_before)
