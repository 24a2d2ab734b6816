"""Keeps the log short, whatever clients send: the first lines of a kind, then the number of the others."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

Kind: TypeAlias = tuple[str, int, str]
MOST_KINDS = 256
"""Lines of further kinds are let through uncounted."""


def _later(seconds: float, act: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()


class RepeatFilter(logging.Filter):
    """Lets ``most`` lines of one kind through in ``seconds``, and then one line with the number of the others.

    A kind is logger, level and format string. ``later`` calls a function after some seconds.
    """

    def __init__(
        self,
        most: int = 10,
        seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], object] = _later,
    ) -> None:
        super().__init__()
        self._most = most
        self._seconds = seconds
        self._clock = clock
        self._later = later
        self._lock = threading.Lock()
        self._seen: dict[Kind, tuple[float, int]] = {}  # when the first came, and how many

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written."""
        if getattr(record, "summary", False):
            return True
        kind = (record.name, record.levelno, str(record.msg))
        with self._lock:
            now = self._clock()
            since, count = self._seen.get(kind, (now, 0))
            if now - since >= self._seconds and count <= self._most:
                since, count = now, 0
            if count == 0 and len(self._seen) >= MOST_KINDS:
                self._forget(now)
                if len(self._seen) >= MOST_KINDS:
                    return True
            self._seen[kind] = since, count + 1
            if count == self._most:
                self._later(max(0.0, since + self._seconds - now), lambda: self._summarize(kind))
        return count < self._most

    def _forget(self, now: float) -> None:
        for kind, (since, count) in list(self._seen.items()):
            if now - since >= self._seconds and count <= self._most:
                del self._seen[kind]

    def finish(self) -> None:
        """Write the numbers that are due later, because the process ends."""
        with self._lock:
            counted = [kind for kind, (_, count) in self._seen.items() if count > self._most]
        for kind in counted:
            self._summarize(kind)

    def _summarize(self, kind: Kind) -> None:
        with self._lock:
            _, count = self._seen.pop(kind, (0.0, 0))
        if count <= self._most:
            return  # `finish` has written it
        name, level, text = kind
        logging.getLogger(name).log(
            level,
            "%d more lines like this within %g s: %s",
            count - self._most,
            self._seconds,
            text,
            extra={"summary": True},
        )
