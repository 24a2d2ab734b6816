"""Plays turns of a trace on an engine in this process, by applying verbs to it: tokens drawn from a seed, time
to the first token, cost."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.runtime.build import load_engine
from holdfast.runtime.engine import Engine
from holdfast.runtime.link.heartbeat import Liveness
from holdfast.runtime.settings import EngineSettings
from holdfast.runtime.verbs import (
    AnyVerb,
    Close,
    Extend,
    Finish,
    Generate,
    Lease,
    Open,
    Refusal,
    Sampling,
    TokenLimits,
    Work,
)

from .agents import Scale, TraceTurn


@dataclass(frozen=True, slots=True)
class TurnFigures:
    """The figures of one turn: ``seconds`` from its first verb to its first token, what its KV cost (``work``),
    and the generated ``tokens``."""

    seconds: float
    work: Work
    tokens: list[int]


class Talker:
    """Plays the turns of a trace on one engine. ``vocabulary``: token ids are below it. ``seed``: of the
    prompts. ``wait`` is called when the engine has nothing to compute before time passes."""

    def __init__(
        self, engine: Engine, scale: Scale, vocabulary: int, seed: int, wait: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._vocabulary = vocabulary
        self._seed = seed
        self._wait = wait
        self._shared = self._text(-1, scale.shared)

    def turn(self, turn: TraceTurn) -> TurnFigures:
        """Play one turn, from its first verb to its last token. The last turn of a session closes it."""
        seq = turn.session + 1
        fresh = self._text(hash((turn.session, turn.before)), turn.fresh)
        began = time.perf_counter()
        more = Extend(0, seq, fresh) if turn.before else Open(0, seq, b"", [*self._shared, *fresh])
        apply(self._engine, more)
        apply(self._engine, Generate(0, seq, Sampling(), TokenLimits(turn.said)))
        first, said, work = spoken(self._engine, self._wait)
        if turn.last:
            apply(self._engine, Close(0, seq))
        return TurnFigures(first - began, work, said)

    def tell(self, turn: TraceTurn, returns_in: float) -> None:
        """Give the engine a hint that the session of ``turn`` comes back in so many seconds."""
        apply(self._engine, Lease(0, turn.session + 1, ttl=0.0, returns_in=returns_in))

    def _text(self, what: int, count: int) -> list[int]:
        rng = random.Random(self._seed ^ what)
        return [rng.randrange(2, self._vocabulary) for _ in range(count)]


def loaded(settings: EngineSettings, *tiers: int) -> Engine:
    """Load an engine as its own process would. ``tiers``: descriptors of the host tier's memory and of the disk
    process's socket, for those tiers that there are."""
    engine = load_engine(settings, lambda done, what: None, Liveness(), *tiers).engine
    assert isinstance(engine, Engine)
    return engine


def apply(engine: Engine, verb: AnyVerb) -> None:
    """Apply a verb to the engine. Raises ``RuntimeError`` if it is refused."""
    answer = engine.apply(verb)
    if isinstance(answer, Refusal):
        raise RuntimeError(answer.message)


def rest(engine: Engine) -> None:
    """Run steps until there is nothing to do, so that no work of this turn falls into the time of the next."""
    while engine.step() is not None:
        continue


def spoken(engine: Engine, wait: Callable[[], None]) -> tuple[float, list[int], Work]:
    """Run steps until the one running turn ends. Returns when its first token came, by ``time.perf_counter()``;
    its tokens; what its KV cost. ``wait`` is called when a step finds nothing to compute. Raises
    ``RuntimeError`` if the turn fails."""
    first, said, work = 0.0, list[int](), None
    while work is None:
        step = engine.step()
        if step is None:
            wait()
        for row in step.rows if step else ():
            if row.finish is Finish.ERROR:
                raise RuntimeError(row.error or "the turn failed")
            first = first or time.perf_counter()
            said += row.tokens
            work = row.work
    return first, said, work
