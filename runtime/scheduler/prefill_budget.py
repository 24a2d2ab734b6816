"""How much prefill of idle sequences a step may carry, so that turns hardly feel it.

Nobody waits for it yet; but whoever will waits for all that is not done by then. So, by measured step time:

- Beside prompts of turns none goes: for those somebody waits.
- Beside turns that decode as much rides along as makes a step at most ``stretch`` times as long. Few tokens can
  cost far more each than many do (on a CPU 8 behind 2,000 others as much as 32), so what rides is measured by
  itself; where not even ``LEAST`` may ride, none do.
- Where riding with ``EVERY`` steps would not be enough, one in so many or a few more catches up, for up to
  ``SHARE`` of the device's time since the last that did. So input that comes is computed at the pace at which
  it comes, in chunks that are worth it, and only one of so many token gaps is a long one, no longer than beside
  a turn's prompt. It is the first step for which something has just come, for ``PATIENCE`` steps: input comes
  in pieces, and what a long step leaves to the next one waits for that whole time.
- Where no turn runs a step still ends soon, for one may begin; not as soon where all who could begin one have
  something to be computed in it: longer chunks are cheaper by the token, and these wait for all of it anyway.

While tokens ride with every step nothing tells what a step takes without, and while none do what they cost; so
now and then one goes without, or `LEAST` do.
Is told of steps and their seconds; knows no clock, no sequence.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from ..plan import Plan, PlanRow

LAST = 7
"""Steps of a kind, whose median is believed: now and then one takes thrice as long."""

LIGHT = 0.01
"""Of a step, which what rides in it takes at least: less could not be told from nothing."""

FEW = 32  # prompt tokens in a step: fewer than these ride
EVERY, SHARE = 13, 2 / 3
PATIENCE = 7
PROBE_EVERY = 32
LEAST = 8
"""Tokens that are worth riding; as many do before anything is measured."""

SOON, SOON_ENOUGH = 0.05, 0.2
"""Seconds of a step in which no turn has a row; where nobody else is there, either."""


class PrefillBudget:
    """``stretch``: see above; 1 or less: no limit."""

    def __init__(self, stretch: float) -> None:
        self._stretch = stretch
        # Seconds of a step that decodes, of one prompt token of many, of one of a few.
        self._decoding, self._token, self._rider = _Recent(), _Recent(), _Recent()
        self._alike = 0  # steps since one was otherwise
        self._since = EVERY  # steps that decoded since one caught up
        self._left = 0  # tokens that waited when the last step was planned, and were not in it

    def limit(self, chunk: int, rows: list[PlanRow], waiting: int, *, others: bool = True) -> int:
        """Of ``chunk`` tokens those that idle sequences may have beside ``rows``, which are of turns.

        ``waiting``: tokens that they have to compute. ``others``: some sequences have none.
        """
        came, self._left = waiting > self._left, waiting
        limit = self._limit(chunk, rows, waiting, SOON if others else SOON_ENOUGH, came=came)
        self._left -= min(limit, waiting)
        return limit

    def _limit(self, chunk: int, rows: list[PlanRow], waiting: int, soon: float, *, came: bool) -> int:
        if self._stretch <= 1:
            return chunk
        if not all(map(_decodes, rows)):
            return 0
        decoding = self._decoding.usual
        rider = max(self._rider.usual, self._token.usual)  # a few are never cheaper than many
        token = self._token.usual or rider
        if not token or (rows and not decoding):
            return min(chunk, LEAST) if rows else chunk
        if not rows:
            return min(chunk, max(LEAST, int(soon / token)))
        riders = int((self._stretch - 1) * decoding / rider)
        riders = riders if riders >= LEAST else 0
        if self._since >= (EVERY if came else EVERY + PATIENCE) and waiting > EVERY * riders:
            self._since = 0
            seconds = SHARE / (1 - SHARE) * EVERY * decoding
            return min(chunk, max(LEAST, int(seconds / token)))
        return min(chunk, self._riding(riders))

    def took(self, plan: Plan, seconds: float) -> None:
        """The step took so long on the device."""
        decodes = sum(map(_decodes, plan.rows))
        prompts = plan.tokens - decodes
        self._since += bool(decodes)
        if not prompts:
            if decodes:
                self._decoding.took(seconds)
        elif not decodes or self._decoding.usual:
            alone = self._decoding.usual if decodes else 0.0
            added = max(seconds - alone, LIGHT * seconds) / prompts
            if prompts >= FEW:
                self._token.took(added)
            elif decodes:  # a few by themselves have a whole pass on their account
                self._rider.took(added)

    def _riding(self, riders: int) -> int:
        """So many but in a step that measures."""
        self._alike += 1
        if self._alike <= PROBE_EVERY:
            return riders
        self._alike = 0
        return 0 if riders else LEAST


class _Recent:
    """What steps of one kind took lately."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=LAST)
        self.usual = 0.0
        """Their median; 0 before the first."""

    def took(self, seconds: float) -> None:
        """One more."""
        self._last.append(seconds)
        self.usual = median(self._last)


def _decodes(row: PlanRow) -> bool:
    return row.count == 1 and row.sampling is not None
