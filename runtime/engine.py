"""The engine: verbs between steps, and the step itself: plan, launch, commit.

One thread calls it. A failure of one row ends that sequence; a failure of a whole step is taken apart: its
sequences run alone, and the one that fails again ends with the error while the others go on. A runner that
has lost its device raises `EngineDied`, which ends the engine. Knows no sockets and no tensors.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..kvstore.errors import LeakFound
from .errors import EngineDied, VerbRefused
from .kv_placement.offload import POLL_SECONDS
from .link.messages import AnyVerb, Refusal, Row, Statistics, Step, VerbReply
from .plan import Handle, Outcome, Plan, RowFault, Runner
from .scheduler.scheduler import Scheduler
from .step_log import StepLog, Timing

MOST_LOST_STEPS = 16
"""Steps in a row of which no sequence could be computed, not even alone, before the device is given up."""

LEAVE_SECONDS = 1.5
"""For KV on its way to disk when the engine ends."""

PREPARE_SECONDS = 0.0001
"""Between two preparations: whoever brings a verb has the interpreter meanwhile."""

AUDIT_EVERY = 64
"""Idle moments between two audits, unless in debug."""


@dataclass(frozen=True, slots=True)
class _NeverLaunched:
    """The handle of a step whose launch raised: it fails where all steps fail."""

    error: Exception

    def tokens(self) -> list[Outcome]:
        raise self.error


class Engine:
    """Runs a scheduler's plans on a runner.

    ``debug``: audit whenever idle and raise on a leak; otherwise audit now and then and count leaks.
    ``clock``: seconds; for tiers and leases, no step depends on it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        debug: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self._clock = clock
        self._runner = runner
        self._debug = debug
        self.log = StepLog(scheduler.counters)
        self._in_flight: deque[tuple[Plan, Handle, Timing]] = deque()
        self._idle = True
        self._prepares = False
        self._lost_steps = 0
        self._audit_in = 1
        self._leaks = 0

    @property
    def idle(self) -> bool:
        """Whether the last `step` found nothing to do and no verb came since."""
        return self._idle

    def apply(self, verb: AnyVerb) -> VerbReply | Refusal | None:
        """Do what a verb says, between two steps; None: it takes a while, and is answered by `answers`."""
        if isinstance(verb, Statistics):
            return VerbReply(verb.request, statistics=self.statistics())
        self._idle = False
        try:
            return self.scheduler.apply(verb, self._clock())
        except VerbRefused as refusal:
            return Refusal(verb.request, refusal.code, refusal.message)

    def answers(self) -> list[VerbReply]:
        """Replies to verbs that took a while, ready since this was asked last."""
        return self.scheduler.answers()

    def step(self) -> Step | None:
        """Fill the device with steps, then wait for the oldest; None when there is nothing to compute.

        Raises:
            EngineDied: the device computes nothing any more.
            LeakFound: only in debug.
        """
        now = self._clock()
        self.scheduler.tick(now)
        while len(self._in_flight) < self.scheduler.settings.depth and not self._broken:
            timing = self.log.begin()
            plan = self.scheduler.plan(now)
            if plan is None:
                break
            self.log.planned(timing)
            self._in_flight.append((plan, self._launch(plan), timing))
            self.log.launched(timing)
        self._idle = not self._in_flight
        told = self.scheduler.planned(self._clock(), idle=self._idle)
        if self._idle:
            self.log.rest()
            self._prepares = self.scheduler.prepare()
            if self._debug or not self._prepares:
                self._audit()
            return Step(self.scheduler.counters.steps, told) if told else None
        plan, handle, timing = self._in_flight.popleft()
        self.log.waits(timing)
        try:
            outcomes = handle.tokens()
        except EngineDied:
            raise
        except Exception as error:  # whatever it is, one sequence may be the cause of it
            return Step(plan.step, told + self._isolate(plan, error, now))
        self._lost_steps = 0
        self.log.landed(timing)
        self.scheduler.took(plan, timing.busy)
        rows = self.scheduler.commit(plan, outcomes, now)
        self.log.committed(timing, plan.step, len(plan.rows))
        return Step(plan.step, told + rows)

    def due(self) -> float | None:
        """Seconds after which `step` has something to do though no verb came; None: never."""
        return PREPARE_SECONDS if self._prepares else self.scheduler.due(self._clock())

    def leave(self) -> None:
        """Nobody is there any more: what the host tier holds goes to disk, within ``LEAVE_SECONDS``."""
        offload = self.scheduler.offload
        offload.flush()
        end = self._clock() + LEAVE_SECONDS
        while offload.busy and self._clock() < end:
            offload.tick(self._clock())
            time.sleep(POLL_SECONDS)
        offload.close()

    def statistics(self) -> dict[str, float]:
        """The scheduler's, seconds by part of the step, steps in flight and leaks found by audits."""
        lengths = {"in_flight": len(self._in_flight), "leaks": self._leaks}
        return {**self.scheduler.statistics(), **self.log.statistics(), **lengths}

    @property
    def _broken(self) -> bool:
        """Whether the last step never reached the device: nothing can be launched that it was to feed."""
        return bool(self._in_flight) and isinstance(self._in_flight[-1][1], _NeverLaunched)

    def _launch(self, plan: Plan) -> Handle:
        try:
            return self._runner.launch(plan)
        except EngineDied:
            raise
        except Exception as error:
            return _NeverLaunched(error)

    def _isolate(self, failed: Plan, error: Exception, now: float) -> list[Row]:
        """Run the failed step's sequences, and those of steps launched behind it, one at a time."""
        self.log.rest()
        plans = [failed]
        while self._in_flight:
            plan, handle, _ = self._in_flight.popleft()
            self._settle(handle)
            plans.append(plan)
        suspects = self.scheduler.revoke(plans, now)
        rows: list[Row] = []
        survivors = 0
        for seq in suspects:
            plan_alone = self.scheduler.plan_alone(seq, now)
            if plan_alone is None:  # no blocks for it now; it comes again with the others
                survivors += 1
                continue
            outcomes, moved = self._run_alone(plan_alone)
            survivors += moved and not any(isinstance(outcome, RowFault) for outcome in outcomes)
            rows += self.scheduler.commit(plan_alone, outcomes, now, moved=moved)
        self._lost_steps = 0 if survivors else self._lost_steps + 1
        if self._lost_steps >= MOST_LOST_STEPS:
            raise EngineDied(f"{MOST_LOST_STEPS} steps in a row failed: {_text(error)}") from error
        return rows

    def _run_alone(self, plan: Plan) -> tuple[list[Outcome], bool]:
        """Outcomes of the plan's rows, and whether it ran: then its moves were made."""
        try:
            return self._runner.launch(plan).tokens(), True
        except EngineDied:
            raise
        except Exception as error:
            return [RowFault(_text(error)) for _ in plan.rows], False

    def _settle(self, handle: Handle) -> None:
        """Wait until a step that no longer counts is done with the device."""
        try:
            handle.tokens()
        except EngineDied:
            raise
        except Exception:
            return

    def _audit(self) -> None:
        """An idle engine audits itself: a leak is an error in debug, and a figure for an alarm in service."""
        if not self._debug:
            self._audit_in -= 1
            if self._audit_in > 0:
                return
            self._audit_in = AUDIT_EVERY
        try:
            self.scheduler.audit()
        except LeakFound:
            self._leaks += 1
            if self._debug:
                raise


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
