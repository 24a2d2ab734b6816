"""The engine: verbs between steps, and the step itself: plan, launch, commit.

One thread calls it. If one row of a step fails, that sequence ends with an error. If a whole step fails, its
sequences run again one at a time: the one that fails again ends with the error, and the others go on. A runner
that has lost its device raises `EngineDied`, which ends the engine. Knows no sockets and no tensors.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ..kvstore.errors import LeakFound
from .errors import EngineDied, RuntimeFault, VerbRefused
from .kv_placement.placement import POLL_SECONDS
from .plan import Handle, Outcomes, Plan, RowFault, Runner
from .scheduler.scheduler import Scheduler
from .stats import StepClock
from .verbs import AnyVerb, LoadAdapter, Refusal, Row, Statistics, Step, UnloadAdapter, VerbReply

if TYPE_CHECKING:
    from .execution.adapter_store import AdapterStore

MOST_LOST_STEPS = 16
"""How many steps in a row may fail, with no sequence that can be computed alone, before the device counts as
lost."""

LEAVE_SECONDS = 1.5
"""How long the engine waits for KV on its way to disk when it ends."""

PREPARE_SECONDS = 0.0001
"""Seconds that an idle engine waits between two pieces of preparation (`Scheduler.prepare`: it touches the
memory of a free host slot), two slices of an audit, or two looks at moves that are under way. The thread that
receives verbs gets the interpreter's lock meanwhile."""

READ_SECONDS = 0.005
"""Seconds between two looks at adapters that are being read."""

AUDIT_EVERY = 64
"""An idle engine begins an audit at one in this many of its idle steps, and goes on with a slice at each of
those that follow; in debug it makes a whole one at each."""


class Engine:
    """Runs a scheduler's plans on a runner.

    ``debug``: audit at each idle step and raise on a leak; otherwise audit now and then and only count leaks.
    ``clock``: gives seconds, for tiers and leases; what a step computes does not depend on it. ``adapters``:
    reads them, and holds those of the scheduler's table; None: there is no room for any. ``idle``: whether the
    last `step` found nothing to do and no verb came since.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        debug: bool = False,
        clock: Callable[[], float] = time.monotonic,
        adapters: AdapterStore | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._adapters = adapters
        self._answers: list[VerbReply | Refusal] = []  # to verbs that have waited
        self._clock = clock
        self._runner = runner
        self._debug = debug
        self._steps = StepClock()
        # With their moments; a step that could not be launched, of which nothing runs, has its error.
        self._in_flight: deque[tuple[Plan, Handle | Exception, list[float]]] = deque()
        self._moving: deque[tuple[Plan, Handle]] = deque()  # committed, but for their saves and loads
        self.idle = True
        self._prepares = False
        self._lost_steps = 0
        self._audit_in = 1
        self._audit: tuple[Iterator[None], tuple[int, ...]] | None = None  # under way; of this version
        self._leaks = 0

    def apply(self, verb: AnyVerb) -> VerbReply | Refusal | None:
        """Do what a verb says, between two steps. Returns its reply, or the refusal; None: the verb waits,
        and a later call of `answers` returns its reply."""
        if isinstance(verb, Statistics):
            return VerbReply(verb.request, statistics=self.statistics())
        self.idle = False
        self._audit = None
        try:
            if isinstance(verb, LoadAdapter):
                self.scheduler.adapters.check_new(verb.name)
                assert self._adapters is not None, "the table has room"
                self._adapters.begin(verb)
                return None
            if isinstance(verb, UnloadAdapter):
                self.scheduler.adapters.remove(verb.name)
                return VerbReply(verb.request)
            return self.scheduler.apply(verb, self._clock())
        except VerbRefused as refusal:
            return Refusal(verb.request, refusal.code, refusal.message)

    def answers(self) -> list[VerbReply | Refusal]:
        """The replies to verbs that `apply` left waiting, as far as they became ready since the last call."""
        ready, self._answers = self._answers, []
        return ready

    def _take_adapters(self) -> None:
        """Take over adapters that have been read, and drop those that were unloaded once no turn uses them."""
        if self._adapters is None:
            return
        for verb, read in self._adapters.done() if self._adapters.busy else ():
            try:
                if isinstance(read, RuntimeFault):
                    raise read
                loaded = self._adapters.add(self.scheduler.adapters, verb.name, verb.path, read)
                self._answers.append(VerbReply(verb.request, adapter=loaded))
            except RuntimeFault as fault:
                self._answers.append(Refusal(verb.request, fault.code, fault.message))
        for number in self.scheduler.unloaded():
            self._adapters.drop(number)

    def step(self) -> Step | None:
        """Launch steps until the scheduler's ``depth`` of them are in flight, then wait for the oldest and
        commit it. Returns its number, with the rows to send to the gateway. None if there is nothing to
        compute and nothing to send; saves and loads may still be under way, see `due`.

        Raises `EngineDied`: the device is lost; `LeakFound`: only in debug.
        """
        now = self._clock()
        self._take_moves(now)
        self._take_adapters()
        self.scheduler.tick(now)
        while len(self._in_flight) < self.scheduler.settings.depth and not self._broken:
            moments = self._steps.begin()
            plan = self.scheduler.plan(now)
            if plan is None:
                break
            self._steps.note(moments)
            self._in_flight.append((plan, self._launch(plan), moments))
            self._steps.note(moments)
        self.idle = not self._in_flight
        told, replies = self.scheduler.planned(self._clock(), idle=self.idle and not self._moving)
        self._answers += replies
        if self.idle:
            self._steps.rest()
            self._prepares = self.scheduler.prepare()
            if self._debug or not self._prepares:
                self._go_on_auditing()
            return Step(self.scheduler.counters.steps, told) if told else None
        plan, handle, moments = self._in_flight.popleft()
        self._steps.note(moments)
        outcomes = self._wait(handle)
        if isinstance(outcomes, Exception):  # it may be caused by one sequence
            return Step(plan.step, told + self._isolate(plan, outcomes, now))
        self._lost_steps = 0
        self.scheduler.took(plan, self._steps.landed(moments))
        if plan.saves or plan.loads:
            assert not isinstance(handle, Exception), "it has outcomes"
            self._moving.append((plan, handle))
            self._take_moves(now)
        rows, decoded = self.scheduler.commit(plan, outcomes, now)
        if self._in_flight and not isinstance(following := self._in_flight[0][1], Exception):
            following.draw()
        self._steps.committed(moments)
        return Step(plan.step, told + rows, decoded)

    def due(self) -> float | None:
        """Seconds after which `step` has something to do without a new verb; None: never."""
        if self._prepares or self._audit is not None or self._moving:
            return PREPARE_SECONDS
        reading = READ_SECONDS if self._adapters is not None and self._adapters.busy else None
        dues = (self.scheduler.due(self._clock()), reading)
        return min((due for due in dues if due is not None), default=None)

    def leave(self) -> None:
        """Called when the link has ended: sends what the host tier holds to the tiers below, for
        ``LEAVE_SECONDS`` at most, and closes them."""
        self._take_moves(self._clock(), wait=True)
        placement, tiers = self.scheduler.placement, self.scheduler.tiers
        placement.flush()
        end = self._clock() + LEAVE_SECONDS
        while tiers.busy and (now := self._clock()) < end:
            placement.tick(now)
            time.sleep(POLL_SECONDS)
        placement.close()

    def statistics(self) -> dict[str, float]:
        """The scheduler's counters, seconds by part of the step, steps in flight, steps with
        moves under way, and leaks found by audits."""
        lengths = {"in_flight": len(self._in_flight), "moving": len(self._moving), "leaks": self._leaks}
        return {**self.scheduler.statistics(), **self._steps.statistics(), **lengths}

    @property
    def _broken(self) -> bool:
        """Whether the step launched last could not be launched: no other step may be launched, as it would be
        fed by that one."""
        return bool(self._in_flight) and isinstance(self._in_flight[-1][1], Exception)

    def _launch(self, plan: Plan) -> Handle | Exception:
        try:
            return self._runner.launch(plan)
        except EngineDied:
            raise
        except Exception as error:
            return error

    def _isolate(self, failed: Plan, error: Exception, now: float) -> list[Row]:
        """Recover from a step that failed as a whole: run its sequences, and those of steps launched behind
        it, one at a time. ``error``: what it failed with. Returns the rows to send to the gateway. Raises
        `EngineDied` if too many steps in a row failed."""
        self._steps.rest()
        plans = [failed]
        while self._in_flight:
            plan, handle, _ = self._in_flight.popleft()
            self._wait(handle, moves=True)  # until it is done with the device
            plans.append(plan)
        self._take_moves(now, wait=True)
        suspects = self.scheduler.revoke(plans, now)
        rows: list[Row] = []
        survivors = 0
        for seq in suspects:
            plan_alone = self.scheduler.plan_alone(seq, now)
            if plan_alone is None:  # it finds no blocks now, and is planned again with the others
                survivors += 1
                continue
            outcomes = self._wait(self._launch(plan_alone), moves=True)
            moved = not isinstance(outcomes, Exception)
            if isinstance(outcomes, Exception):
                outcomes = Outcomes.of([RowFault(_text(outcomes))] * len(plan_alone))
            else:
                self.scheduler.moved(plan_alone, now)
            survivors += moved and not any(isinstance(other, RowFault) for other in outcomes.others.values())
            others, decoded = self.scheduler.commit(plan_alone, outcomes, now, moved=moved)
            rows += Step(plan_alone.step, others, decoded).rows
        self._lost_steps = 0 if survivors else self._lost_steps + 1
        if self._lost_steps >= MOST_LOST_STEPS:
            raise EngineDied(f"{MOST_LOST_STEPS} steps in a row failed: {_text(error)}") from error
        return rows

    def _wait(self, handle: Handle | Exception, *, moves: bool = False) -> Outcomes | Exception:
        """Wait for a step, if it could be launched, and with ``moves`` for its saves and loads. Returns its
        outcomes, or the exception with which it failed as a whole; raises only `EngineDied`."""
        if isinstance(handle, Exception):
            return handle
        try:
            outcomes = handle.tokens()
            if moves:
                handle.moved(wait=True)
        except EngineDied:
            raise
        except Exception as error:
            return error
        return outcomes

    def _take_moves(self, now: float, *, wait: bool = False) -> None:
        """Take over the saves and loads of committed steps, as far as they are done; with ``wait``, all."""
        while self._moving:
            plan, handle = self._moving[0]
            try:
                if not handle.moved(wait=wait):
                    return
                made = True
            except EngineDied:
                raise
            except Exception:
                made = False
            self._moving.popleft()
            self.scheduler.moved(plan, now, made=made)

    def _go_on_auditing(self) -> None:
        """Audit: in debug the whole state, which raises `LeakFound`; otherwise a slice of it, of an audit that
        is begun now and then and is given up once anything has changed. A leak is counted, for an alarm."""
        version = self.scheduler.pool.version
        if self._audit is None or self._audit[1] != version:
            self._audit = None
            self._audit_in -= 1
            if self._audit_in > 0 and not self._debug:
                return
            self._audit_in = AUDIT_EVERY
            self._audit = self.scheduler.audit_in_slices(), version
        slices, _ = self._audit
        try:
            for _ in slices:
                if not self._debug:
                    return
        except LeakFound:
            self._leaks += 1
            if self._debug:
                raise
        self._audit = None


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
