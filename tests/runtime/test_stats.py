"""The step log: parts of a step by a clock that is given, gaps only where the device had no work, classes."""

from __future__ import annotations

from itertools import count

import pytest

from holdfast.runtime.stats import Counters, StepLog, StepRecord
from holdfast.tests.runtime.worlds import LAUNCH_BOMB, World, world

STORY = list(range(30, 78))


def clocked(*moments: float) -> StepLog:
    return StepLog(Counters(), clock=iter(moments).__next__)


def one_step(log: StepLog, number: int) -> StepRecord:
    timing = log.begin()
    log.planned(timing)
    log.launched(timing)
    log.waits(timing)
    log.landed(timing)
    log.committed(timing, number, rows=2)
    return log.records[-1]


def test_each_part_is_the_time_between_its_moments() -> None:
    log = clocked(0.0, 1.0, 3.0, 10.0, 14.0, 22.0)
    record = one_step(log, 5)
    assert record == StepRecord(5, 2, 1.0, 2.0, 4.0, 8.0, 0.0, 0, 0, 0)
    assert log.statistics() == {
        "t_plan": 1.0,
        "t_launch": 2.0,
        "t_device": 4.0,
        "t_commit": 8.0,
        "t_gap": 0.0,
    }


def test_a_gap_begins_where_the_step_before_landed() -> None:
    log = clocked(*range(12))
    assert one_step(log, 1).t_gap == 0.0
    assert one_step(log, 2).t_gap == 7.0 - 4.0


def test_rest_is_no_gap() -> None:
    log = clocked(*range(12))
    one_step(log, 1)
    log.rest()
    assert one_step(log, 2).t_gap == 0.0


def test_a_step_launched_before_the_one_before_landed_left_no_gap() -> None:
    log = StepLog(Counters(), clock=count().__next__)
    first, second = log.begin(), log.begin()
    log.planned(first)
    log.planned(second)
    log.landed(first)
    log.landed(second)
    assert second.gap == 0.0


def test_it_keeps_so_many_and_totals_of_all() -> None:
    log = StepLog(Counters(), keep=2, clock=count().__next__)
    for number in range(5):
        one_step(log, number)
    assert [record.step for record in log.records] == [3, 4]
    assert log.statistics()["t_launch"] == 5.0


def classes(here: World) -> tuple[int, int, int]:
    records = here.engine.log.records
    return (
        sum(record.prefilled for record in records),
        sum(record.recomputed for record in records),
        sum(record.decoded for record in records),
    )


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_are_counted_by_class(depth: int) -> None:
    here = world(depth=depth)
    here.open(0, STORY[:11])
    here.generate(0, 6)
    here.run()
    assert classes(here) == (11, 0, 5)  # the sixth is pending
    here.engine.scheduler.evict(0)
    here.extend(0, STORY[:3])
    here.generate(0, 2)
    here.run()
    prefilled, recomputed, decoded = classes(here)
    adopted = int(here.engine.statistics()["adopted"])
    assert (prefilled, recomputed + adopted, decoded) == (11 + 1 + 3, 16, 5 + 1)
    assert here.engine.statistics()["prefilled"] == prefilled


def test_what_a_failed_step_cost_is_in_no_record() -> None:
    here = world()
    here.open(0, STORY[:3])
    here.generate(0, 8)
    here.open(1, [STORY[0], LAUNCH_BOMB, 9])
    here.generate(1, 8)
    here.run()
    statistics = here.engine.statistics()
    logged = sum(classes(here))
    assert statistics["isolations"] == 1
    assert 0 < logged < statistics["computed"]
