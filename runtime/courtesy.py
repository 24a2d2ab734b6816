"""How much prefill of idle sequences a step may carry beside turns, so that these hardly feel it.

By measured step time: a step with such prefill may take ``stretch`` times as long as it would without. Two
running estimates make that a number of tokens: seconds of a step that only decodes, and seconds that a prompt
token adds. While idle prefill goes with every step nothing tells the first; so now and then one goes without.
Is told of steps and their seconds; knows no clock, no sequence.
"""

from __future__ import annotations

from .plan import Plan, PlanRow

WEIGHT = 0.1  # of the newest step in the running estimates
MOST = 2.0  # times the estimate: as much of a slower step is believed
USUAL = 64  # prompt tokens in a step that tells their cost well
PROBE_EVERY = 32
LEAST = 8
"""Tokens that are always allowed."""


class Courtesy:
    """``stretch``: see above; 1 or less: no limit."""

    def __init__(self, stretch: float) -> None:
        self._stretch = stretch
        self._decoding = self._token = 0.0
        self._in_a_row = 0

    def limit(self, chunk: int, rows: list[PlanRow]) -> int:
        """Of ``chunk`` tokens those that idle sequences may have beside ``rows``, which are of turns."""
        if self._stretch <= 1 or not rows:
            return chunk
        decodes = sum(map(_decodes, rows))
        prompts = sum(row.count for row in rows) - decodes
        if decodes and not prompts:
            self._in_a_row += 1
            if self._in_a_row > PROBE_EVERY:
                self._in_a_row = 0
                return 0
        if not self._token:
            return min(chunk, LEAST)
        without = (self._decoding if decodes else 0.0) + self._token * prompts
        return min(chunk, max(LEAST, int((self._stretch - 1) * without / self._token)))

    def took(self, plan: Plan, seconds: float) -> None:
        """The step took so long on the device."""
        decodes = sum(map(_decodes, plan.rows))
        prompts = plan.tokens - decodes
        if not prompts:
            if decodes:
                self._decoding = _mixed(self._decoding, seconds, WEIGHT)
        elif not decodes or self._decoding:
            added = max(0.0, seconds - (self._decoding if decodes else 0.0))
            self._token = _mixed(self._token, added / prompts, WEIGHT * min(1.0, prompts / USUAL))


def _decodes(row: PlanRow) -> bool:
    return row.count == 1 and row.sampling is not None


def _mixed(old: float, new: float, weight: float) -> float:
    return old + weight * (min(new, MOST * old) - old) if old else new
