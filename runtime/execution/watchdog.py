"""A runner that says how long its steps may take and which sequences they compute.

So a heartbeat can tell a slow step from a hung one, and when the engine dies its parent knows which sequences
to suspect. Wraps any runner and learns from the steps it sees. Knows token counts and the clock, not what is
computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..link.heartbeat import FIRST_STEP, Liveness, StepTimes
from ..link.messages import COMPILING, Phase
from ..plan import NO_SEQUENCE, Handle, Outcomes, Plan, Runner


@dataclass(frozen=True, slots=True)
class _WatchedHandle:
    """``wait_watched``: waits for the tokens of ``handle``."""

    handle: Handle
    wait_watched: Callable[[], Outcomes]

    def draw(self) -> None:
        self.handle.draw()

    def tokens(self) -> Outcomes:
        return self.wait_watched()

    def moved(self, *, wait: bool = False) -> bool:
        return self.handle.moved(wait=wait)


class WatchedRunner:
    """A runner around ``runner``: before each launch and each wait it tells ``liveness`` how long that may
    take, and which sequences are on the device. While a kernel is compiled it allows for more time."""

    def __init__(
        self, runner: Runner, liveness: Liveness, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._runner = runner
        self._liveness = liveness
        self._clock = clock
        self._step_times = StepTimes()
        self._expected = self._step_times.expect(0)
        self._compiling = 0.0  # since when
        self._compiled = 0.0  # seconds in all
        self._flying: list[frozenset[int]] = []  # of each step in flight, its sequences

    def launch(self, plan: Plan) -> Handle:
        """Launch on the wrapped runner, after saying how long the step may take."""
        began = self._worked()
        self.expect(plan.size)
        sequences = frozenset(seq for seq in plan.seqs.tolist() if seq != NO_SEQUENCE)
        self._flying.append(sequences)
        try:
            self._liveness.engage(sequences if len(self._flying) == 1 else frozenset().union(*self._flying))
            handle = self._runner.launch(plan)
        except BaseException:
            self._flying.remove(sequences)
            raise
        return _WatchedHandle(handle, partial(self._wait, handle, plan.size, sequences, began))

    def _wait(self, handle: Handle, tokens: int, sequences: frozenset[int], began: float) -> Outcomes:
        """Wait for a step of ``tokens`` tokens, launched at ``began``, and learn from it what steps take."""
        self.expect(tokens)
        try:
            outcomes = handle.tokens()
        finally:
            self._flying.remove(sequences)
        self._step_times.observe(tokens, self._worked() - began)
        return outcomes

    def expect(self, tokens: int) -> None:
        """Tell the liveness that the device thread is about to wait for a step of ``tokens`` tokens, and how
        long that may take."""
        self._expected = self._step_times.expect(tokens)
        self._liveness.enter(*self._expected)

    def compiling(self, kernel: str) -> None:
        """Called with a kernel's name before the kernel is compiled, in the middle of a step: tells the
        liveness that the step waits for that, and how long it may take."""
        self._compiling = self._clock()
        self._liveness.enter(Phase.COMPILING, FIRST_STEP, f"{COMPILING}{kernel}")

    def compiled(self) -> None:
        """Called when the kernel named to `compiling` is compiled: tells the liveness that the step goes on,
        with the time that it had. The time spent compiling does not count as the step's."""
        self._compiled += self._clock() - self._compiling
        self._liveness.enter(*self._expected)

    def _worked(self) -> float:
        """The clock in seconds, less all the time that was spent compiling kernels: differences of it are
        time spent computing."""
        return self._clock() - self._compiled
