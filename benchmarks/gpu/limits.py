"""A time limit for waits on a server, a socket or a process. It does not stop a library call."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class _OutOfTime(KeyboardInterrupt):
    """Not an ``Exception``: no task or callback of an event loop swallows it."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Leave the block after so many seconds; its clean-up runs.

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
