"""Finds replies that repeat themselves: the model writes the same tokens again and again.

The rule: a reply ends at the first token after which each of the last ``most`` tokens equals the token
``period`` positions before it, for one period from 1 to `LONGEST`. Only the reply's ids decide. So a reply ends
at the same token if it goes on after an interruption, or if its tokens arrive several at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 128
"""The longest period that is found, in tokens. It is shorter if ``most`` is less than four times as many."""


class CycleFinder:
    """Watches one reply. ``most``: the number of repeated tokens that ends it; 0: it never ends for this
    reason.

    Cost: a new period is looked for only at every multiple of ``most // 2`` tokens. That is often enough,
    because a run of ``most`` repeated tokens covers half of its length at one of these points. Between them,
    one comparison for each token checks the period that was found. It is the smallest one, and every other
    period of the window is a multiple of it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._window = max(1, most // 2)
        self._longest = min(LONGEST, max(1, self._window // 2))
        self._period = 0  # the period that is checked now; 0: none
        self._repeated = 0

    def ends(self, ids: Sequence[int]) -> bool:
        """Whether the reply is to end at the last of its ``ids``, all ids so far, because it repeats itself.
        Call it once after each id."""
        if not self._most:
            return False
        if self._period:
            if ids[-1] == ids[-1 - self._period]:
                self._repeated += 1
            else:
                self._period = 0
        if not self._period and len(ids) % self._window == 0:
            self._look(ids)
        return self._period > 0 and self._repeated >= self._most

    def _look(self, ids: Sequence[int]) -> None:
        """Find the smallest period of the last window of ``ids``, all tokens so far, and count how many tokens
        at their end repeat with it, also before the window. Does nothing if there is no period."""
        count, window = len(ids), self._window
        last = ids[-window:]
        for period in range(1, min(self._longest, count - window) + 1):
            if last[-1] == ids[-1 - period] and last == ids[count - window - period : count - period]:
                self._period, self._repeated = period, window
                while self._repeated < min(self._most, count - period) and self._repeats(ids):
                    self._repeated += 1
                return

    def _repeats(self, ids: Sequence[int]) -> bool:
        """Whether one more token repeats: the one just before the run that was counted so far."""
        at = len(ids) - 1 - self._repeated
        return ids[at] == ids[at - self._period]
