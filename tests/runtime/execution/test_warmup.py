"""The warm-up: two steps of no request, after which the time of a step is known."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.runtime.errors import EngineDied
from holdfast.runtime.execution.warmup import DRAWN, rehearse
from holdfast.runtime.execution.watchdog import WatchedRunner
from holdfast.runtime.link.crash_report import CrashReport
from holdfast.runtime.link.heartbeat import Liveness, StepTimes
from holdfast.runtime.link.messages import Phase
from holdfast.runtime.plan import Handle, Plan, PlanRow, plan_of
from holdfast.runtime.settings import StepSize
from holdfast.tests.runtime.fakes import FakeRunner


@pytest.mark.parametrize(
    ("block_tokens", "context", "rows"),
    [(16, 100, [(0, 15), (15, 1)]), (16, 8, [(0, 7), (7, 1)]), (2, 9, [(0, 1), (1, 1)]), (1, 9, [(0, 1)])],
)
def test_it_stays_within_one_block_and_the_context(
    block_tokens: int, context: int, rows: list[tuple[int, int]]
) -> None:
    runner = FakeRunner(1, block_tokens)
    runner.keep_plans = True
    rehearse(runner, block_tokens, context)
    assert [(row.first, row.count) for rows_of_plan in runner.rows for row in rows_of_plan] == rows


@pytest.mark.parametrize(("block_tokens", "context"), [(16, 1000), (16, 16), (16, 17), (2, 9), (1, 1)])
def test_with_kernels_every_kind_of_step_comes_once_within_two_blocks(
    block_tokens: int, context: int
) -> None:
    blocks = min(2, -(-context // block_tokens))
    runner = FakeRunner(blocks, block_tokens)
    runner.keep_plans = True
    rehearse(runner, block_tokens, context, kernels=True)
    rows = [row for rows_of_plan in runner.rows for row in rows_of_plan]
    assert all(0 <= row.first < row.first + row.count <= context and not row.table.any() for row in rows)
    assert {copy.target for plan in runner.plans for copy in plan.copies} == set(range(1, blocks))
    assert max(row.first for row in rows) == context - 1, "the longest context"
    drawn = {row.sampling for row in rows}
    assert drawn >= set(DRAWN) and any(row.asks.grammar is not None for row in rows)
    assert all(plan.step < -64 for plan in runner.plans), "below those of a calibration"


@pytest.mark.parametrize(
    ("tokens", "rows", "context"), [(96, 12, 1000), (12, 12, 1000), (300, 3, 20), (1, 1, 9)]
)
def test_the_largest_steps_come_first_and_then_all_powers_of_two(
    tokens: int, rows: int, context: int
) -> None:
    runner = FakeRunner(2, 16)
    runner.keep_plans = True
    rehearse(runner, 16, context, kernels=True, largest=StepSize(tokens, rows))
    large = runner.plans[: -len(_rehearsed_alone(context))]
    sizes = [plan.size for plan in large]
    most = min(tokens, rows * context)
    assert max(sizes) == most and max(map(len, large)) == rows
    assert [len(plan) for plan in large[: len(DRAWN)]] == [rows] * len(DRAWN), (
        "each way to draw, at its widest"
    )
    for power in range(most.bit_length()):
        assert 1 << power in {*sizes, most} and (1 << power > rows or 1 << power in map(len, large))
    (scored,) = [ask for plan in large for ask in plan.asks.values()]
    assert scored.scored is not None and len(scored.scored) == min(tokens, context)
    rows_of = [row for some in runner.rows for row in some]
    assert all(0 <= row.first < row.first + row.count <= context and not row.table.any() for row in rows_of)
    assert all(plan.step < -64 for plan in runner.plans)


def _rehearsed_alone(context: int) -> list[Plan]:
    runner = FakeRunner(2, 16)
    runner.keep_plans = True
    rehearse(runner, 16, context, kernels=True)
    return runner.plans


def test_with_kernels_a_step_that_fails_keeps_none_from_being_compiled() -> None:
    class Refusing(FakeRunner):
        def launch(self, plan: Plan) -> Handle:
            handle = super().launch(plan)
            if plan.changes is not None and plan.changes.whole[0].sampling == DRAWN[0]:
                raise ValueError("no kernel")
            return handle

    runner = Refusing(4, 16)
    runner.keep_plans = True
    (error,) = rehearse(runner, 16, 64, kernels=True)
    assert runner.plans[-1].copies and str(error) == "no kernel"


def test_the_first_real_step_has_the_deadline_of_a_step() -> None:
    liveness = Liveness()
    runner = WatchedRunner(FakeRunner(4, 16), liveness)
    assert StepTimes().expect(1)[0] is Phase.COMPILING
    rehearse(runner, 16, 64)
    runner.expect(16)
    beat = liveness.beat()
    assert beat is not None and beat.phase is Phase.STEPPING and beat.deadline < 60


def test_what_fails_is_left_to_the_first_sequence_unless_the_device_is_gone() -> None:
    class Broken:
        def __init__(self, fault: Exception) -> None:
            self.fault = fault

        def launch(self, plan: Plan) -> Handle:
            raise self.fault

    rehearse(Broken(ValueError("no kernel")), 16, 64)
    with pytest.raises(EngineDied):
        rehearse(Broken(EngineDied("the device is gone")), 16, 64)


def test_no_sequence_is_suspected_for_it_and_the_steps_behind_it_run() -> None:
    """The crash report holds no row of the warm-up, as the ids of sequences are not negative."""
    report = CrashReport.new()
    runner = WatchedRunner(FakeRunner(4, 16), Liveness(record=report.record))
    rehearse(runner, 16, 64)
    assert not report.sequences()
    tokens, table = np.zeros(3, dtype=np.int64), np.zeros(1, dtype=np.int32)
    handle = runner.launch(plan_of(7, [PlanRow(5, 0, 0, 3, tokens, table)]))
    assert report.sequences() == {5}
    handle.tokens()
    runner.launch(plan_of(8, [PlanRow(6, 0, 0, 3, tokens, table)]))
    assert report.sequences() == {6}
    report.close()
