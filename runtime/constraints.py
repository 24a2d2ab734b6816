"""Turns with a grammar, until it is compiled: they hold no step, and the others go on.

A grammar that is not compiled in time ends its turn with an error. Knows turns and the clock it is told;
nothing of what a grammar says.
"""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from dataclasses import dataclass

from .commit import Committer
from .errors import GrammarFault, GrammarInvalid, GrammarUnavailable
from .fetching import FETCH_POLL_SECONDS
from .grammars import Compiler, Matcher
from .link.messages import Grammar, Row
from .plan import RowFault
from .roster import Roster
from .sequence import Sequence, Turn
from .shelving import Shelving

COMPILE_SECONDS = 0.75
"""A grammar may take to be compiled, its time in the queue included."""

MOST_GRAMMAR_BYTES = 256 << 10
MOST_WAITING = 64


@dataclass(slots=True)
class _Awaited:
    sequence: Sequence
    turn: Turn
    job: Future[Matcher]
    since: float


class Constraints:
    """Gives turns their matchers. Without a ``compiler`` a grammar is refused."""

    def __init__(
        self, compiler: Compiler | None, roster: Roster, committer: Committer, shelving: Shelving
    ) -> None:
        self._compiler = compiler
        self._roster = roster
        self._committer = committer
        self._shelving = shelving
        self._awaited: list[_Awaited] = []
        self._told: list[Row] = []

    def check(self, grammar: Grammar) -> None:
        """Raises ``GrammarUnavailable``."""
        if self._compiler is None:
            raise GrammarUnavailable("grammars need llguidance: pip install 'holdfast[engine]'")

    def begin(self, sequence: Sequence, grammar: Grammar) -> None:
        """A turn began that follows ``grammar``, as `check` let it: it runs as soon as that is compiled."""
        turn, compiler = sequence.turn, self._compiler
        assert turn is not None and compiler is not None
        self._roster.taken(sequence)
        self._roster.compiling[sequence.id] = sequence
        size = len(grammar.text.encode())
        if size > MOST_GRAMMAR_BYTES:
            self._fail(sequence, GrammarInvalid(f"it has {size} bytes; at most {MOST_GRAMMAR_BYTES}"))
        elif len(self._awaited) >= MOST_WAITING:
            self._fail(sequence, GrammarInvalid(f"{MOST_WAITING} others are being compiled; try again"))
        else:
            said = sequence.tokens.view(turn.prompt)[turn.output_from :].copy()
            job = compiler.compile(grammar, turn.limits.stop_ids, said)
            self._awaited.append(_Awaited(sequence, turn, job, self._shelving.now))
            self.tick(self._shelving.now)

    def tick(self, now: float) -> None:
        """Let those run whose matchers are there; end those that waited too long."""
        if not self._awaited:
            return
        warm = self._compiler is not None and self._compiler.warm
        waiting = []
        for awaited in self._awaited:
            awaited.since = awaited.since if warm else now
            if not self._settled(awaited, now):
                waiting.append(awaited)
        self._awaited = waiting

    def rows(self) -> list[Row]:
        """Of turns that begin with what must come, or will have no grammar, since this was asked last."""
        told, self._told = self._told, []
        return told

    def due(self) -> float | None:
        """Seconds until `tick` may have something to do; None: never."""
        return FETCH_POLL_SECONDS if self._awaited or self._told else None

    def statistics(self) -> dict[str, float]:
        """Turns that wait for a grammar, and the compiler's own."""
        compiler = {} if self._compiler is None else self._compiler.statistics()
        return {"compiling": len(self._awaited), **compiler}

    def _settled(self, awaited: _Awaited, now: float) -> bool:
        sequence, job, turn = awaited.sequence, awaited.job, awaited.turn
        if sequence.turn is not turn or self._roster.compiling.get(sequence.id) is not sequence:
            job.cancel()  # it was stopped or closed, and may have begun another
            return True
        if not job.done():
            if now - awaited.since <= COMPILE_SECONDS:
                return False
            job.cancel()
            self._fail(sequence, GrammarInvalid(f"it is not compiled within {COMPILE_SECONDS} s"))
            return True
        try:
            turn.matcher = job.result()
        except GrammarFault as fault:
            self._fail(sequence, fault)
        except (Exception, CancelledError) as error:
            self._fail(sequence, GrammarInvalid(f"{type(error).__name__}: {error}"))
        else:
            self._open(sequence)
        return True

    def _open(self, sequence: Sequence) -> None:
        """Its grammar is there: what it has to begin with is said at once, the rest when its turn has come."""
        row = self._committer.open(sequence)
        if row is not None:
            self._told.append(row)
        if sequence.turn is not None:
            del self._roster.compiling[sequence.id]
            self._shelving.fetching.line_up(sequence)

    def _fail(self, sequence: Sequence, fault: GrammarFault) -> None:
        row = self._committer.fail(sequence, RowFault(f"grammar: {fault.message}", fault.code))
        if row is not None:
            self._told.append(row)
