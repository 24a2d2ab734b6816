"""Heartbeats are in time while the device thread makes progress; else one reports it and none follows."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.runtime.link.heartbeat import (
    FIRST_STEP,
    IDLE_PROMISE,
    INTERVAL,
    SLACK,
    STEP_FLOOR,
    Liveness,
    StepTimes,
)
from holdfast.runtime.link.messages import Heartbeat, Phase


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def beats(liveness: Liveness, clock: Clock, seconds: float) -> list[tuple[float, Heartbeat]]:
    """What a link thread that sleeps as ``due`` says would send."""
    end, sent = clock.now + seconds, []
    while clock.now < end:
        beat = liveness.beat()
        if beat is not None:
            sent.append((clock.now, beat))
        clock.now = min(end, clock.now + max(liveness.due(), 1e-6))
    return sent


def test_an_idle_engine_sends_heartbeats_within_their_deadline() -> None:
    clock = Clock()
    liveness = Liveness(clock)
    liveness.enter(Phase.IDLE)
    sent = beats(liveness, clock, 10.0)
    assert len(sent) == pytest.approx(10.0 / INTERVAL, abs=1)
    assert {beat.phase for _, beat in sent} == {Phase.IDLE}
    for (at, beat), (after, _) in pairwise(sent):
        assert after < at + beat.deadline
    assert sent[0][1].deadline == IDLE_PROMISE + SLACK


def test_a_hung_step_is_reported_once_at_its_limit_and_then_no_heartbeat_follows() -> None:
    clock = Clock()
    liveness = Liveness(clock)
    began = clock.now
    liveness.enter(Phase.STEPPING, 2.0, "step 7")
    sent = beats(liveness, clock, 20.0)
    *before, (told_at, told) = sent
    assert told_at == pytest.approx(began + 2.0, abs=1e-3)
    assert told.deadline == 0.0 and "step 7" in told.detail and "2.0 s allowed" in told.detail
    # No promise reaches beyond the limit either: even if the telling beat is lost, the reader knows.
    assert all(at + beat.deadline <= began + 2.0 + SLACK + 1e-9 for at, beat in before)


def test_heartbeats_resume_when_a_late_step_ends() -> None:
    clock = Clock()
    liveness = Liveness(clock)
    liveness.enter(Phase.STEPPING, 2.0)
    beats(liveness, clock, 5.0)
    liveness.enter(Phase.STEPPING, 2.0)
    assert beats(liveness, clock, 1.0)[0][1].deadline > 0


@given(st.lists(st.tuples(st.floats(0.001, 3.0), st.floats(0.01, 1.0)), min_size=1, max_size=20))
def test_phases_within_their_limits_are_never_overdue(phases: list[tuple[float, float]]) -> None:
    """Phases that use a share of their limit: the reader's deadline never passes between two beats."""
    clock = Clock()
    liveness = Liveness(clock)
    last: tuple[float, Heartbeat] | None = None
    for limit, share in phases:
        liveness.enter(Phase.STEPPING, limit)
        for at, beat in beats(liveness, clock, limit * share * 0.99):
            assert last is None or at <= last[0] + last[1].deadline + 1e-9
            last = at, beat


def test_progress_is_in_the_heartbeat() -> None:
    clock = Clock()
    liveness = Liveness(clock)
    liveness.enter(Phase.LOADING, 60.0, "shard 2 of 3", 0.5)
    assert liveness.beat() == Heartbeat(Phase.LOADING, pytest.approx(60.0 + SLACK), "shard 2 of 3", 0.5)


def test_the_first_step_has_a_longer_limit() -> None:
    assert StepTimes().expect(1) == (Phase.COMPILING, FIRST_STEP)


def test_limits_follow_the_slowest_step_of_a_size() -> None:
    step_times = StepTimes()
    step_times.observe(1, 0.5)
    assert step_times.expect(1) == (Phase.STEPPING, 5.0)
    for _ in range(1000):
        step_times.observe(1, 0.001)
    assert step_times.expect(1) == (Phase.STEPPING, STEP_FLOOR)


def test_a_step_larger_than_all_before_gets_a_proportional_limit() -> None:
    step_times = StepTimes()
    step_times.observe(1, 0.3)
    assert step_times.expect(512)[1] == pytest.approx(10 * 0.3 * 512)
    step_times.observe(512, 4.0)
    assert step_times.expect(512)[1] == pytest.approx(40.0)
    assert step_times.expect(1)[1] == pytest.approx(3.0)


def test_a_step_smaller_than_all_before_gets_the_same_limit() -> None:
    step_times = StepTimes()
    step_times.observe(512, 4.0)
    assert step_times.expect(1) == (Phase.STEPPING, 40.0)
