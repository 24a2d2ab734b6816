"""When a late engine counts as hung; later if it waits for a core."""

from __future__ import annotations

import os

from holdfast.runtime.link.process import PATIENCE, STARVED, TICK, Lateness, waited_of


def seconds_until_over(starved: float) -> float:
    """Of an engine that has no core for a share ``starved`` of the time."""
    late, ticks = Lateness(), 0
    while not late.over:
        ticks += 1
        late.tick(100.0 + ticks * TICK * starved, overdue=True)
    return ticks * TICK


def test_an_engine_that_had_a_core_hangs_after_patience_and_a_starved_one_later() -> None:
    # the first look has nothing to compare with, so that all before it counts as waiting
    assert seconds_until_over(0.0) == PATIENCE + TICK
    assert seconds_until_over(0.75) == 4 * PATIENCE + TICK
    assert seconds_until_over(1.0) == STARVED, "but not for ever"


def test_a_heartbeat_resets_the_lateness() -> None:
    late = Lateness()
    for _ in range(100):
        for _ in range(int(PATIENCE / TICK) - 1):
            late.tick(0.0, overdue=True)
            assert not late.over
        late.tick(0.0, overdue=False)


def test_the_wait_for_a_core_is_read_from_proc() -> None:
    assert waited_of(os.getpid()) >= 0.0
    assert waited_of(1 << 30) == 0.0, "no such process"
