"""When a shelf that says nothing counts as lost, by the caller's clock.

An answer has a deadline, and a new shelf has one for its first word. Both count what the engine has waited, not
what it has slept: one that was stopped, or computed for seconds, finds answers that came long ago, or a shelf
that was stopped with it; so it looks once more. Knows no sockets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

OPENING = 60.0  # seconds in which a new shelf says something, until it has said what it holds
AWAY = 1.0  # after so many seconds without a look as many are given before the next


class Patience:
    """With one shelf after another."""

    def __init__(self) -> None:
        self._looked = -math.inf
        self._again: float | None = None  # when to look once more
        self._heard = -math.inf

    def heard(self, now: float) -> None:
        """It was started, or said something."""
        self._heard, self._again = now, None

    def over(self, now: float, deadlines: Iterable[float], *, opening: bool) -> bool:
        """Whether it is lost, all it has said being read. ``deadlines``: of what it was asked.

        ``opening``: it has not said yet what it holds.
        """
        away, self._looked = now > self._looked + AWAY, now
        late = now > self._heard + OPENING if opening else any(now > deadline for deadline in deadlines)
        if late and away and self._again is None:
            self._again = now + AWAY
        return late and (self._again is None or now > self._again)
