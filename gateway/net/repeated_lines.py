"""Keeps the log short, whatever clients send: of many lines of one kind the first are written, the others only
counted. Each tenant has lines of its own, so that none takes those of the others."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from ...kvstore.log_lines import about, facts_of

MOST_KINDS = 256
"""The most kinds of lines that are counted at a time. Lines of other kinds are written uncounted."""
MOST_OF_TENANTS = 192
"""While so many are counted, further tenants have their lines counted together."""


class LineKind(NamedTuple):
    """What lines of one kind have in common. ``tenant``: None for lines about none, and for those of tenants
    that are counted together."""

    logger: str
    level: int
    text: str
    tenant: object = None


def _later(seconds: float, act: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()


class RepeatFilter(logging.Filter):
    """A log filter. Of the lines of one kind it lets the first ``most`` through within ``seconds``, drops the
    others, and then logs one line with their number. For lines below the level of a warning, ``usual`` counts
    instead of ``most``.

    Two lines are of one kind if they have the same logger, level, format string and tenant. ``clock`` returns
    seconds. ``later(seconds, act)`` calls ``act`` after so many seconds; by default in a thread.
    """

    def __init__(
        self,
        most: int = 10,
        seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], object] = _later,
        usual: int = 1000,
    ) -> None:
        super().__init__()
        self._most = most
        self._usual = usual
        self._seconds = seconds
        self._clock = clock
        self._later = later
        self._lock = threading.Lock()
        self._seen: dict[LineKind, tuple[float, int]] = {}  # when the first came, and how many

    def filter(self, record: logging.LogRecord) -> bool:
        """Count the line. Returns whether it is written."""
        if getattr(record, "summary", False):
            return True
        kind = LineKind(record.name, record.levelno, str(record.msg), facts_of(record).get("tenant"))
        most = self._most_of(kind)
        with self._lock:
            now = self._clock()
            if kind not in self._seen and len(self._seen) >= MOST_OF_TENANTS:
                self._forget(now)
                if len(self._seen) >= MOST_OF_TENANTS:
                    kind = kind._replace(tenant=None)
            since, count = self._seen.get(kind, (now, 0))
            if now - since >= self._seconds and count <= most:
                since, count = now, 0
            if count == 0 and len(self._seen) >= MOST_KINDS:
                return True
            self._seen[kind] = since, count + 1
            if count == most:
                self._later(max(0.0, since + self._seconds - now), lambda: self._summarize(kind))
        return count < most

    def _most_of(self, kind: LineKind) -> int:
        return self._most if kind.level >= logging.WARNING else self._usual

    def _forget(self, now: float) -> None:
        for kind, (since, count) in list(self._seen.items()):
            if now - since >= self._seconds and count <= self._most_of(kind):
                del self._seen[kind]

    def finish(self) -> None:
        """Log now, for each kind, how many lines were dropped since its last summary. Call it when the process
        ends."""
        with self._lock:
            counted = [kind for kind, (_, count) in self._seen.items() if count > self._most_of(kind)]
        for kind in counted:
            self._summarize(kind)

    def _summarize(self, kind: LineKind) -> None:
        with self._lock:
            _, count = self._seen.pop(kind, (0.0, 0))
        if count <= (most := self._most_of(kind)):
            return  # `finish` has written it
        logging.getLogger(kind.logger).log(
            kind.level,
            "%d more lines like this within %g s: %s",
            count - most,
            self._seconds,
            kind.text,
            extra={"summary": True, **about("", tenant=kind.tenant)},
        )
