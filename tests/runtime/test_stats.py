"""Parts of a step by a clock that is given, gaps only where the device had no work, classes of tokens."""

from __future__ import annotations

from itertools import count

import pytest

from holdfast.runtime.stats import StepClock
from holdfast.tests.runtime.worlds import World, world

STORY = list(range(30, 78))


def clocked(*moments: float) -> StepClock:
    return StepClock(clock=iter(moments).__next__)


def one_step(steps: StepClock) -> float:
    """The seconds without work before it."""
    before = steps.statistics()["t_gap"]
    moments = steps.begin()
    for _ in range(3):
        steps.note(moments)
    steps.landed(moments)
    steps.committed(moments)
    return steps.statistics()["t_gap"] - before


def test_each_part_is_the_time_between_its_moments() -> None:
    steps = clocked(0.0, 1.0, 3.0, 10.0, 14.0, 22.0)
    one_step(steps)
    assert steps.statistics() == {
        "t_plan": 1.0,
        "t_launch": 2.0,
        "t_device": 4.0,
        "t_commit": 8.0,
        "t_gap": 0.0,
    }


def test_a_gap_begins_where_the_step_before_landed() -> None:
    steps = clocked(*range(12))
    assert one_step(steps) == 0.0
    assert one_step(steps) == 7.0 - 4.0


def test_rest_is_no_gap() -> None:
    steps = clocked(*range(12))
    one_step(steps)
    steps.rest()
    assert one_step(steps) == 0.0


def test_a_step_launched_before_the_one_before_landed_left_no_gap() -> None:
    steps = StepClock(clock=count().__next__)
    first, second = steps.begin(), steps.begin()
    for moments in (first, second):
        for _ in range(3):
            steps.note(moments)
    assert steps.landed(first) == 8.0 - 2.0, "launched at 2, here at 8"
    assert steps.landed(second) == 1.0, "the device worked on it alone since the one before"
    assert steps.statistics()["t_gap"] == 0.0


def test_totals_are_those_of_all_steps() -> None:
    steps = StepClock(clock=count().__next__)
    for _ in range(5):
        one_step(steps)
    assert steps.statistics()["t_launch"] == 5.0


def classes(here: World) -> tuple[int, int, int]:
    counters = here.engine.scheduler.counters
    decoded = counters.computed - counters.prefilled - counters.recomputed
    return counters.prefilled, counters.recomputed, decoded


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_are_counted_by_class(depth: int) -> None:
    here = world(depth=depth)
    here.open(0, STORY[:11])
    here.generate(0, 6)
    here.run()
    assert classes(here) == (11, 0, 5)  # the sixth is pending
    here.evict(0)
    here.extend(0, STORY[:3])
    here.generate(0, 2)
    here.run()
    prefilled, recomputed, decoded = classes(here)
    adopted = int(here.engine.statistics()["adopted"])
    assert (prefilled, recomputed + adopted, decoded) == (11 + 1 + 3, 16, 5 + 1)
    assert here.engine.statistics()["prefilled"] == prefilled
