"""Agent-like traffic as data (a trace): when each turn comes, its new tokens, its generated tokens.

The `coding` workload: sessions begin with a shared prompt and an input of their own. Each step appends a tool's
output; most pauses are those of tools, some of people. Lengths are log-normal with a Pareto tail, scaled down.
The seed decides everything. Pure arithmetic, without any policy of caching (see `optimum`).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, log

from holdfast.sdk.agent.run import HINT_SECONDS
from holdfast.sessions.placement import PATIENCE

SHARED = 15_000
LONGEST_PAUSE = 3600.0


@dataclass(frozen=True, slots=True)
class Pause:
    """The distribution of a pause between two turns: log-normal. ``median``: in seconds. ``sigma``: the
    standard deviation of the logarithm."""

    median: float
    sigma: float


TOOL, HUMAN = Pause(0.285, 3.0), Pause(85.0, 2.1)


@dataclass(frozen=True, slots=True)
class Scale:
    """How the workload is scaled down: token counts are divided by ``tokens``, seconds by ``times``.
    ``context``: the most tokens of a session."""

    tokens: int = 32
    times: float = 1.0
    context: int = 4096

    @property
    def shared(self) -> int:
        return SHARED // self.tokens


@dataclass(frozen=True, slots=True)
class TraceTurn:
    """One turn of a trace. ``at``: when it begins, in seconds. ``session``: the session's number. ``before``:
    tokens of the session so far, with the shared prompt; 0 in a first turn. ``fresh``: tokens that are
    appended, in a first turn behind the shared prompt. ``said``: tokens that are generated. ``last``: it is the
    session's last turn. ``human``: the next input is a person's, not a tool output."""

    at: float
    session: int
    before: int
    fresh: int
    said: int
    last: bool
    human: bool = False

    def after(self, scale: Scale) -> int:
        return (self.before or scale.shared) + self.fresh + self.said

    @property
    def new(self) -> int:
        """The turn's truly new tokens: the input, and, after the first turn, the last token that the turn
        before sampled."""
        return self.fresh + bool(self.before)


def coding(sessions: int, turns: int, seed: int, scale: Scale) -> list[TraceTurn]:
    """A trace of ``turns`` turns in order of time, with ``sessions`` sessions at a time; when one ends, another
    begins."""
    rng = random.Random(seed)
    names = iter(range(1 << 30))
    coming: list[tuple[float, int, Iterator[tuple[TraceTurn, float]]]] = []
    for _ in range(sessions):
        name = next(names)
        heapq.heappush(coming, (rng.uniform(0, 60) / scale.times, name, _session(name, rng, scale)))
    trace: list[TraceTurn] = []
    while len(trace) < turns:
        at, name, rest = heapq.heappop(coming)
        turn, pause = next(rest)
        trace.append(replace(turn, at=at))
        if turn.last:
            name = next(names)
            rest = _session(name, rng, scale)
        heapq.heappush(coming, (at + pause, name, rest))
    return trace


def _session(name: int, rng: random.Random, scale: Scale) -> Iterator[tuple[TraceTurn, float]]:
    steps = min(400, max(1, round(rng.lognormvariate(log(45), 1.0))))
    before, fresh = 0, _tokens(rng.lognormvariate(log(9000), 1.1), scale, scale.context - scale.shared - 64)
    for step in range(steps):
        said = _tokens(rng.lognormvariate(log(215), 1.05), scale, 8000 // scale.tokens)
        turn = TraceTurn(0.0, name, before, fresh, said, step == steps - 1)
        before, fresh = turn.after(scale), _appended(rng, scale)
        full = before + fresh + 8000 // scale.tokens > scale.context
        human = rng.random() < 1 / 8.8
        pause = _pause(HUMAN if human else TOOL, rng)
        yield replace(turn, last=turn.last or full, human=human), pause / scale.times
        if full:
            return


def _tokens(count: float, scale: Scale, most: int) -> int:
    return max(1, min(most, round(count / scale.tokens)))


def _appended(rng: random.Random, scale: Scale) -> int:
    tail = rng.random() < 0.03
    count = min(150_000, 8000 * rng.paretovariate(1)) if tail else rng.lognormvariate(log(700), 1.15)
    return _tokens(count, scale, scale.context // 4)


def _pause(pause: Pause, rng: random.Random) -> float:
    return min(LONGEST_PAUSE, rng.lognormvariate(log(pause.median), pause.sigma))


def told(trace: Sequence[TraceTurn], spread: float, seed: int, scale: Scale) -> list[float | None]:
    """For each turn of the trace, the hint that the engine gets after it: the seconds until its session comes
    back; None: no hint.

    Hints are given as the gateway and the SDK give them: for tools, never for people. A tool that answers at
    once gets no hint; for one that takes less than `HINT_SECONDS` the hint is 0, any moment; for a longer one
    it is its duration, off by a factor with a log-normal distribution of standard deviation ``spread``.
    """
    rng = random.Random(seed)
    said: list[float | None] = [None] * len(trace)
    following: dict[int, float] = {}
    for at in reversed(range(len(trace))):
        turn = trace[at]
        pause = (following.get(turn.session, inf) - turn.at) * scale.times
        following[turn.session] = turn.at
        if not turn.human and not turn.last and PATIENCE <= pause < inf:
            said[at] = 0.0 if pause < HINT_SECONDS else pause * exp(rng.gauss(0, spread)) / scale.times
    return said


def working_set(trace: Sequence[TraceTurn], scale: Scale, block: int) -> int:
    """The blocks of all live sessions, the shared prompt counted once: the mean over the trace's turns.
    ``block``: tokens of a block."""
    held: dict[int, int] = {}
    total = 0
    for turn in trace:
        held[turn.session] = -(-(turn.after(scale) - scale.shared) // block)
        total += sum(held.values()) + -(-scale.shared // block)
        if turn.last:
            del held[turn.session]
    return total // len(trace)


def truly_new(trace: Sequence[TraceTurn], scale: Scale) -> int:
    """The tokens that any policy must prefill: the shared prompt once, and the new tokens of each turn."""
    return scale.shared + sum(turn.new for turn in trace)
