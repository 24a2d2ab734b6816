"""How much prefill of idle sequences a step may carry, so that turns hardly feel it.

No turn waits for this prefill yet, but the next turn of the sequence waits for what is not done by then. The
budget is set by measured step times:

- Beside prompts of turns there is none: a turn waits for those.
- Beside turns that decode, as much *rides* along as makes a step at most ``stretch`` times as long. Few tokens
  can cost far more each than many do (on a CPU 8 tokens behind 2,000 others cost as much as 32), so the cost
  of riding tokens is measured by itself. Where not even ``LEAST`` tokens may ride, none do.
- Where riding with ``EVERY`` steps would not be enough, one step *catches up* once ``EVERY`` steps have
  decoded since the last one that did: it may take up to ``SHARE`` of the device's time since then. So input
  is computed as fast as it comes, in chunks that are worth it, and turns seldom wait long for their next
  token, and never longer than beside a turn's prompt. Input comes in pieces, and what a long step leaves out
  waits until the next long one. So the step that catches up is the next one for which new input has come, or
  the one after ``PATIENCE`` more steps if none comes.
- Where no turn runs a step still ends soon, because a turn may begin. It may take longer where each open
  sequence has something to compute in it: longer chunks cost less by the token, and a turn would wait for all
  of it anyway.

While tokens ride with each step, nothing tells how long a step takes without them; and while none ride, nothing
tells what they cost. So now and then a step goes without, or with `LEAST`, to measure that. This module is told
of steps and their seconds; it knows no clock and no sequence.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from ..plan import Plan

LAST = 7
"""How many steps of a kind are remembered. Their median counts: now and then one takes three times as long."""

LIGHT = 0.01
"""The least share of a step's time that is charged to prefill of idle sequences in it: less cannot be
measured."""

FEW = 32  # prompt tokens in a step: fewer than these ride
EVERY, SHARE = 13, 2 / 3
PATIENCE = 7
PROBE_EVERY = 32
LEAST = 8
"""The fewest tokens of idle sequences that are worth adding to a step of decodes; so many are added before
anything is measured."""

SOON, SOON_ENOUGH = 0.05, 0.2
"""How many seconds a step without turns may take: ``SOON``; ``SOON_ENOUGH`` if no other sequence could begin
a turn."""


class IdlePrefill:
    """Decides for each step how many tokens idle sequences may prefill in it, by the measured times of steps.
    ``stretch``: how many times as long they may make a step that decodes, but for one in some that catches
    up; 1 or less: no limit."""

    def __init__(self, stretch: float) -> None:
        self._stretch = stretch
        # Seconds of a step that decodes, of one prompt token of many, of one of a few.
        self._decoding, self._token, self._rider = (deque[float](maxlen=LAST) for _ in range(3))
        self._alike = 0  # steps since one was otherwise
        self._since = EVERY  # steps that decoded since one caught up
        self._left = 0  # tokens that waited when the last step was planned, and were not in it

    def limit(self, chunk: int, rows: int, decoding: int, waiting: int, *, others: bool = True) -> int:
        """How many tokens, at most ``chunk``, idle sequences may have in a step that has so many ``rows`` of
        turns, of which ``decoding`` decode. ``waiting``: how many tokens idle sequences have to compute.
        ``others``: whether there are open sequences that have none to compute."""
        came, self._left = waiting > self._left, waiting
        soon = SOON if others else SOON_ENOUGH
        prompts = decoding < rows and self._stretch > 1
        limit = 0 if prompts else self._limit(chunk, rows, waiting, soon, came=came)
        self._left -= min(limit, waiting)
        return limit

    def _limit(self, chunk: int, rows: int, waiting: int, soon: float, *, came: bool) -> int:
        if self._stretch <= 1:
            return chunk
        decoding, token = _usual(self._decoding), _usual(self._token)
        rider = max(_usual(self._rider), token)  # a few are never cheaper than many
        token = token or rider
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
        self._alike += 1
        if self._alike > PROBE_EVERY:  # to measure what they cost
            self._alike, riders = 0, 0 if riders else LEAST
        return min(chunk, riders)

    def took(self, plan: Plan, seconds: float) -> None:
        """Learn from a step of ``plan`` that took ``seconds`` on the device: how long decoding takes alone,
        and what prompt tokens beside it add."""
        decodes = plan.decoding
        prompts = plan.size - decodes
        self._since += bool(decodes)
        if not prompts:
            if decodes:
                self._decoding.append(seconds)
        elif not decodes or self._decoding:
            alone = _usual(self._decoding) if decodes else 0.0
            added = max(seconds - alone, LIGHT * seconds) / prompts
            if prompts >= FEW:
                self._token.append(added)
            elif decodes:  # a few tokens alone would be charged with a whole pass
                self._rider.append(added)


def _usual(seconds: deque[float]) -> float:
    """The median of the last measurements of one kind, in seconds; 0 before the first."""
    return median(seconds) if seconds else 0.0
