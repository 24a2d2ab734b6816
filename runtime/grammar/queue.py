"""The queue of turns that wait for their grammar to be compiled. They are in no step, and other turns go on.

One grammar of each tenant is compiled at a time, one tenant after another, so that a flood of grammars delays
only the tenant that it is from. A grammar that is not compiled in time ends its turn with an error. Knows
nothing of what a grammar says.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..errors import GrammarFault, GrammarInvalid, GrammarUnavailable
from ..order.queues import Queues
from ..sequence import Sequence, Status, Turn
from ..verbs import Grammar
from .llguidance import Compiler, Matcher

COMPILE_SECONDS = 0.75
"""How long a grammar may take to be compiled, its time in the queue included; then its turn ends with an
error."""

POLL_SECONDS = 0.0003
"""How long to wait between two looks at the grammars that are being compiled."""

MOST_GRAMMAR_BYTES = 256 << 10
MOST_WAITING = 64
"""How many turns of one tenant may wait for their grammars; those of more are refused."""


@dataclass(slots=True)
class _Awaited:
    sequence: Sequence
    turn: Turn
    grammar: Grammar
    said: NDArray[np.int32]
    since: float
    job: Future[Matcher] | None = None


@dataclass(eq=False)
class GrammarQueue:
    """Turns that wait for their grammars: has these compiled, and gives out matchers. Without a ``compiler``
    a grammar is refused."""

    _compiler: Compiler | None
    _queues: Queues
    _awaited: list[_Awaited] = field(default_factory=list)
    _running: dict[int, Future[Matcher]] = field(default_factory=dict)  # by tenant; the longest ago first

    def check(self) -> None:
        """Raises ``GrammarUnavailable`` if grammars cannot be compiled, because llguidance is not installed."""
        if self._compiler is None:
            raise GrammarUnavailable(
                "grammars need llguidance: in Holdfast's checkout, pip install '.[engine]'"
            )

    def begin(self, sequence: Sequence, grammar: Grammar, now: float) -> None:
        """Let the sequence wait until ``grammar``, which its turn follows, is compiled. A later `tick`
        returns it with its matcher, or with a fault. Call `check` before."""
        turn = sequence.turn
        assert turn is not None
        self._queues.move(sequence, Status.COMPILING)
        said = sequence.tokens.view(turn.prompt)[turn.output_from :].copy()
        awaited = _Awaited(sequence, turn, grammar, said, now)
        size = len(grammar.text.encode())
        if size > MOST_GRAMMAR_BYTES:
            awaited.job = _refused(f"it has {size} bytes; at most {MOST_GRAMMAR_BYTES}")
        elif sum(one.sequence.tenant == sequence.tenant for one in self._awaited) >= MOST_WAITING:
            awaited.job = _refused(f"{MOST_WAITING} others are being compiled; try again")
        self._awaited.append(awaited)

    def tick(self, now: float) -> list[tuple[Sequence, Matcher | GrammarFault]]:
        """Start what may be compiled now; returns the sequences that need not wait any longer.

        Each comes with its matcher, or with the reason why it has none.
        """
        if not self._awaited:
            return []
        assert self._compiler is not None, "`check` let them wait"
        self._awaited = [awaited for awaited in self._awaited if self._wanted(awaited)]
        self._start(self._compiler)
        warm = self._compiler.warm
        ready, waiting = [], []
        for awaited in self._awaited:
            awaited.since = awaited.since if warm else now
            matcher = self._matcher(awaited, now)
            if matcher is None:
                waiting.append(awaited)
            else:
                ready.append((awaited.sequence, matcher))
        self._awaited = waiting
        return ready

    def _start(self, compiler: Compiler) -> None:
        """Start compiling: all grammars that the compiler has cached, and the next one of each tenant without
        a running job.

        A job that was given up runs to its end, and counts as its tenant's running job until then.
        """
        queues: dict[int, _Awaited] = {}
        for awaited in self._awaited:
            if awaited.job is None and compiler.knows(awaited.grammar):
                self._begin(awaited, compiler)
            elif awaited.job is None:
                queues.setdefault(awaited.sequence.tenant, awaited)
        running = sum(not job.done() for job in self._running.values())
        order = list(self._running)  # the tenant that had no job for longest goes first
        for tenant in sorted(queues, key=lambda tenant: order.index(tenant) if tenant in order else -1):
            job = self._running.get(tenant)
            if running < compiler.threads and (job is None or job.done()):
                self._running.pop(tenant, None)
                self._running[tenant] = self._begin(queues[tenant], compiler)
                running += 1
        for tenant in [one for one, job in self._running.items() if job.done() and one not in queues]:
            del self._running[tenant]

    def _begin(self, awaited: _Awaited, compiler: Compiler) -> Future[Matcher]:
        job = compiler.compile(awaited.grammar, awaited.turn.limits.stop_ids, awaited.said)
        awaited.job = job
        return job

    def _wanted(self, awaited: _Awaited) -> bool:
        """Whether the turn of ``awaited`` is still open and waits for its grammar. If not, the compilation is
        cancelled."""
        sequence = awaited.sequence
        if sequence.turn is awaited.turn and sequence.status is Status.COMPILING:
            return True
        if awaited.job is not None:
            awaited.job.cancel()
        return False

    def due(self) -> float | None:
        """Seconds until `tick` may have something to do; None: never."""
        return POLL_SECONDS if self._awaited else None

    def statistics(self) -> dict[str, float]:
        """How many turns wait for a grammar, and the compiler's counters."""
        compiler = {} if self._compiler is None else self._compiler.statistics()
        return {"compiling": len(self._awaited), **compiler}

    def _matcher(self, awaited: _Awaited, now: float) -> Matcher | GrammarFault | None:
        """What came of the grammar that ``awaited`` waits for: its matcher, or why there is none; None: it is
        not compiled yet, and there is time left."""
        job = awaited.job
        if job is None or not job.done():
            if now - awaited.since <= COMPILE_SECONDS:
                return None
            if job is not None:
                job.cancel()
            return GrammarInvalid(f"it is not compiled within {COMPILE_SECONDS} s")
        try:
            return job.result()
        except GrammarFault as fault:
            return fault
        except Exception as error:
            return GrammarInvalid(f"{type(error).__name__}: {error}")


def _refused(reason: str) -> Future[Matcher]:
    """A future that has failed already, with ``GrammarInvalid`` and this reason."""
    job: Future[Matcher] = Future()
    job.set_exception(GrammarInvalid(reason))
    return job
