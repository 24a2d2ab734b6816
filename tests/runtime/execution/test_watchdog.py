"""The paced runner: a limit that fits the step before each launch and wait, learnt from both."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.runtime.execution.watchdog import WatchedRunner
from holdfast.runtime.link.heartbeat import FIRST_STEP, STEP_FLOOR, Liveness
from holdfast.runtime.link.messages import Phase
from holdfast.runtime.plan import Outcomes, Plan, PlanRow, plan_of


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Recorder(Liveness):
    """Remembers what was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[tuple[Phase, float]] = []
        self.details: list[str] = []

    def enter(self, phase: Phase, limit: float = 0.0, detail: str = "", fraction: float = 0.0) -> None:
        self.entered.append((phase, limit))
        self.details += [detail] if detail else []


class Slow:
    """A runner and its handle: launching takes a second, waiting takes two."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.launched: list[Plan] = []

    def launch(self, plan: Plan) -> Slow:
        self.clock.now += 1
        self.launched.append(plan)
        return self

    def draw(self) -> None:
        """Does nothing."""

    def tokens(self) -> Outcomes:
        self.clock.now += 2
        return Outcomes.of([[7]])

    def moved(self, *, wait: bool = False) -> bool:
        return True


def prompt_of(count: int, step: int = 1) -> Plan:
    none = np.zeros(0, dtype=np.int64)
    return plan_of(step, [PlanRow(1, 1, 0, count, none, none.astype(np.int32))])


def test_limits_are_set_before_each_wait_and_learnt() -> None:
    clock, liveness = Clock(), Recorder()
    slow = Slow(clock)
    runner = WatchedRunner(slow, liveness, clock)
    plan = prompt_of(1)
    assert list(runner.launch(plan).tokens()) == [[7]]
    assert slow.launched == [plan]
    assert liveness.entered == [(Phase.COMPILING, FIRST_STEP)] * 2
    runner.launch(prompt_of(1, 2)).tokens()
    assert liveness.entered[2:] == [(Phase.STEPPING, 30.0)] * 2  # ten times launch and wait together
    runner.launch(prompt_of(64, 3))
    assert liveness.entered[4] == (Phase.STEPPING, pytest.approx(30.0 * 64))


def test_quick_steps_have_the_floor() -> None:
    clock, liveness = Clock(), Recorder()
    runner = WatchedRunner(Slow(clock), liveness, lambda: 0.0)
    runner.launch(prompt_of(1)).tokens()
    runner.launch(prompt_of(1, 2))
    assert liveness.entered[-1] == (Phase.STEPPING, STEP_FLOOR)


def test_a_step_that_fails_is_not_learnt_from() -> None:
    class Fails(Slow):
        def tokens(self) -> Outcomes:
            raise RuntimeError("late")

    clock, liveness = Clock(), Recorder()
    runner = WatchedRunner(Fails(clock), liveness, clock)
    with pytest.raises(RuntimeError, match="late"):
        runner.launch(prompt_of(1)).tokens()
    runner.launch(prompt_of(1, 2))
    assert liveness.entered[-1] == (Phase.COMPILING, FIRST_STEP)


def test_a_kernel_that_is_compiled_has_the_time_for_it_and_counts_for_no_step() -> None:
    class Compiles(Slow):
        def launch(self, plan: Plan) -> Slow:
            if plan.step == 2:
                runner.compiling("send_up")
                self.clock.now += 50
                runner.compiled()
            return super().launch(plan)

    clock, liveness = Clock(), Recorder()
    runner = WatchedRunner(Compiles(clock), liveness, clock)
    runner.launch(prompt_of(1)).tokens()
    liveness.entered.clear()
    runner.launch(prompt_of(1, 2)).tokens()
    runner.launch(prompt_of(1, 3)).tokens()
    step = (Phase.STEPPING, 30.0)  # ten times what the first took
    assert liveness.entered == [step, (Phase.COMPILING, FIRST_STEP), step, step, step, step]
    assert liveness.details == ["compiling send_up"], "as the CPU's kernels are told"


def plan_for(step: int, *sequences: int) -> Plan:
    none = np.zeros(0, dtype=np.int64)
    return plan_of(step, [PlanRow(seq, 1, 0, 1, none, none.astype(np.int32)) for seq in sequences])


def test_what_is_on_the_device_is_known_before_each_launch_and_written_only_when_it_changes() -> None:
    written: list[set[int]] = []
    liveness = Liveness(record=lambda sequences: written.append(set(sequences)))
    runner = WatchedRunner(Slow(Clock()), liveness)
    first = runner.launch(plan_for(1, 1, 2))
    second = runner.launch(plan_for(2, 2, 3))  # overlapped: either may be what kills the device
    assert written == [{1, 2}, {1, 2, 3}]
    first.tokens()
    second.tokens()
    runner.launch(plan_for(3, 3)).tokens()
    runner.launch(plan_for(4, 3)).tokens()
    assert written[2:] == [{3}]
    liveness.enter(Phase.IDLE)
    assert written[3:] == [set()]


def test_a_step_that_failed_is_on_the_device_no_more() -> None:
    class Fails(Slow):
        def launch(self, plan: Plan) -> Slow:
            if plan.step == 1:
                raise RuntimeError("at once")
            return super().launch(plan)

        def tokens(self) -> Outcomes:
            raise RuntimeError("late")

    written: list[set[int]] = []
    runner = WatchedRunner(Fails(Clock()), Liveness(record=lambda sequences: written.append(set(sequences))))
    with pytest.raises(RuntimeError, match="at once"):
        runner.launch(plan_for(1, 1))
    with pytest.raises(RuntimeError, match="late"):
        runner.launch(plan_for(2, 2)).tokens()
    runner.launch(plan_for(3, 3))
    assert written == [{1}, {2}, {3}]
