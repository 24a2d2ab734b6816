"""The cost of a trace under the best policies: one that knows the future, one that knows the odds of each
pause.

Both keep prefixes of sessions in one store of a number of blocks. If turns run in that store (it is the
device), the session of the running turn is there whole; the rest may stay or go, in any store. Counts tokens of
the trace; runs no engine.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache
from math import exp, inf, log
from statistics import NormalDist

from .agents import HUMAN, LONGEST_PAUSE, TOOL, Pause, Scale, TraceTurn

Absence = Callable[[int, int], float]
"""How long a session will stay away, in a unit of its own: a function of the position in the trace of the
session's last turn, and of the present position."""


def optimum(
    trace: Sequence[TraceTurn], scale: Scale, block: int, capacity: int, *, runs: bool = False
) -> int:
    """The least number of tokens that any policy must prefill again if it keeps ``capacity`` blocks in all.
    ``block``: tokens of a block.

    Belady's MIN on this trace, with all tiers as one store without duplicates: it evicts what is used again
    latest, or never. A session's blocks are used together, so it evicts the end of the session that returns
    last, and keeps prefixes. A lower bound. ``runs``: turns run in this store, one at a time; their blocks
    evict others, and the bound is reached except for partial blocks.
    """
    uses: dict[int, list[int]] = {}
    for at, turn in enumerate(trace):
        uses.setdefault(turn.session, []).append(at)

    def until_next(last: int, _now: int) -> float:
        mine = uses[trace[last].session]
        following = bisect_right(mine, last)
        return mine[following] if following < len(mine) else inf

    return _again(trace, scale, block, capacity, until_next, runs=runs)


def knowing_odds(
    trace: Sequence[TraceTurn], scale: Scale, block: int, capacity: int, *, runs: bool = False
) -> int:
    """The number of tokens that are prefilled again by a policy that knows the distribution of each pause, but
    not its length. The arguments are those of `optimum`.

    It knows whether a tool or a person comes next, the median and spread of each, how long the session has been
    away, and which turn is a session's last. It evicts the session with the longest median remaining wait:
    about the best policy without the future. Orders by hazard, by the chance of a return within 10 to 300
    seconds, or by last use with some seconds' grace for tools differ by less than one percent.
    """

    def rest(last: int, now: int) -> float:
        turn = trace[last]
        waited = (trace[now].at - turn.at) * scale.times
        return inf if turn.last else _median_rest(HUMAN if turn.human else TOOL, round(waited, 3))

    return _again(trace, scale, block, capacity, rest, runs=runs)


@cache
def _median_rest(pause: Pause, waited: float) -> float:
    """The median remaining seconds of a pause that has lasted ``waited`` seconds."""
    normal = NormalDist(log(pause.median), pause.sigma)
    gone = normal.cdf(log(waited)) if waited > 0 else 0.0
    half = 1 - (1 - gone) / 2
    whole = normal.inv_cdf(half) if half < 1 else inf
    return LONGEST_PAUSE if whole > log(LONGEST_PAUSE) else exp(whole) - waited


def _again(
    trace: Sequence[TraceTurn], scale: Scale, block: int, capacity: int, absence: Absence, *, runs: bool
) -> int:
    """The number of tokens prefilled again if the session with the longest ``absence`` is evicted first, from
    its end."""
    room = capacity - -(-scale.shared // block)  # every session's next use is the shared prompt's
    kept: dict[int, int] = {}
    last: dict[int, int] = {}
    again = held = 0
    for at, turn in enumerate(trace):
        whole = max(0, (turn.before - scale.shared - 1) // block)  # without the tail and the pending token
        again += block * max(0, whole - kept.get(turn.session, 0)) if turn.before else 0
        wanted = -(-(turn.after(scale) - scale.shared - 1) // block)  # the last generated token has no KV
        held += wanted - kept.get(turn.session, 0)
        kept[turn.session], last[turn.session] = wanted, at
        while held > room:
            free = [one for one in kept if not (runs and one == turn.session)] or [turn.session]
            longest = max(free, key=lambda one: absence(last[one], at))
            gone = min(kept[longest], held - room)
            held -= gone
            kept[longest] -= gone
            if not kept[longest]:
                del kept[longest]
    return again
