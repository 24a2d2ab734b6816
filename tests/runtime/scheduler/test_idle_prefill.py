"""Idle prefill beside turns: what rides along unfelt, the steps that catch up, and steps to measure."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from holdfast.kvstore.keys import BlockHasher
from holdfast.kvstore.pool import BlockPool
from holdfast.runtime.plan import Outcomes, Plan, PlanRow, plan_of
from holdfast.runtime.scheduler.idle_prefill import (
    EVERY,
    FEW,
    LEAST,
    PATIENCE,
    PROBE_EVERY,
    SHARE,
    SOON,
    SOON_ENOUGH,
    IdlePrefill,
)
from holdfast.runtime.scheduler.scheduler import Scheduler
from holdfast.runtime.settings import SchedulerSettings
from holdfast.runtime.verbs import Extend, Generate, Open, Sampling, TokenLimits
from holdfast.tests.runtime.worlds import world

NOTHING = np.empty(0, dtype=np.int64)
NO_TABLE = np.empty(0, dtype=np.int32)
BASE, TOKEN = 0.020, 0.001
"""Seconds of a step that decodes, and of a prompt token."""
WAITING = 10_000
"""Tokens that wait to be computed."""


def decode(seq: int = 0) -> PlanRow:
    return PlanRow(seq, 0, 9, 1, NOTHING, NO_TABLE, sampling=Sampling())


def prompt(count: int, seq: int = 9) -> PlanRow:
    return PlanRow(seq, 0, 0, count, NOTHING, NO_TABLE)


def step(*rows: PlanRow) -> Plan:
    return plan_of(1, rows)


def measured(stretch: float = 1.5, rider: float = TOKEN) -> IdlePrefill:
    """One that has seen what decoding, a prompt of 64 tokens and a few (``rider`` seconds each) take.

    A step has just caught up.
    """
    idle_prefill = IdlePrefill(stretch)
    for _ in range(60):
        idle_prefill.took(step(decode()), BASE)
        idle_prefill.took(step(decode(), prompt(64)), BASE + 64 * TOKEN)
        idle_prefill.took(step(decode(), prompt(LEAST)), BASE + LEAST * rider)
    idle_prefill.limit(500, 1, 1, WAITING)
    return idle_prefill


def test_nothing_is_held_back_where_no_limit_is_set() -> None:
    assert measured(stretch=0.0).limit(500, 1, 1, WAITING) == 500


def test_where_no_turn_runs_a_step_ends_soon() -> None:
    assert measured().limit(500, 0, 0, WAITING) == pytest.approx(SOON / TOKEN, abs=1)
    assert measured().limit(7, 0, 0, WAITING) == 7
    assert IdlePrefill(1.5).limit(500, 0, 0, WAITING) == 500, "before anything is measured"


def test_where_no_other_sequence_runs_it_may_take_longer() -> None:
    limit = measured().limit(500, 0, 0, WAITING, others=False)
    assert limit == pytest.approx(SOON_ENOUGH / TOKEN, abs=1)
    assert measured().limit(500, 1, 1, WAITING, others=False) < limit


def test_beside_decodes_a_step_takes_its_stretch_and_no_more() -> None:
    assert measured().limit(500, 2, 2, WAITING) == pytest.approx(0.5 * BASE / TOKEN, abs=1)
    assert measured(stretch=2.0).limit(500, 1, 1, WAITING) == pytest.approx(BASE / TOKEN, abs=1)
    assert measured(stretch=2.0).limit(7, 1, 1, WAITING) == 7


def test_what_would_not_be_worth_it_does_not_ride() -> None:
    assert measured(rider=2 * TOKEN).limit(500, 1, 1, WAITING) == 0
    assert measured(stretch=1.01).limit(500, 1, 1, WAITING) == 0


def catching_up(comes: Callable[[int], bool], steps: int = 4 * EVERY) -> dict[int, int]:
    """Steps that catch up behind one that has, and what they may compute; with some of them something comes."""
    idle_prefill = measured(rider=2 * TOKEN)
    limits, waiting = {}, WAITING
    for at in range(1, steps):
        idle_prefill.took(step(decode()), BASE)
        waiting += 10 * comes(at)
        limits[at] = idle_prefill.limit(5000, 1, 1, waiting)
        waiting -= limits[at]
    return {at: limit for at, limit in limits.items() if limit > LEAST}


def test_one_step_of_many_catches_up_within_its_share() -> None:
    limits = catching_up(lambda at: True)
    assert list(limits) == [EVERY, 2 * EVERY, 3 * EVERY]
    busy = limits[EVERY] * TOKEN
    assert busy / (busy + EVERY * BASE) == pytest.approx(SHARE, rel=0.02)


def test_what_catches_up_begins_with_what_has_just_come_or_when_nothing_does() -> None:
    assert list(catching_up(lambda at: at % (EVERY + 2) == 0)) == [
        EVERY + 2,
        2 * (EVERY + 2),
        3 * (EVERY + 2),
    ]
    patient = EVERY + PATIENCE
    assert list(catching_up(lambda at: at == 1)) == [patient, 2 * patient]


def test_beside_a_prompt_of_a_turn_none_goes() -> None:
    assert measured().limit(500, 1, 0, WAITING) == 0
    assert measured().limit(500, 2, 1, WAITING) == 0


def test_a_few_go_before_anything_is_measured() -> None:
    assert IdlePrefill(1.5).limit(500, 1, 1, WAITING) == LEAST


def test_one_slow_step_changes_little() -> None:
    idle_prefill = measured()
    before = idle_prefill.limit(500, 1, 1, WAITING)
    idle_prefill.took(step(decode()), 100 * BASE)
    idle_prefill.took(step(prompt(1)), 100 * TOKEN)
    assert idle_prefill.limit(500, 1, 1, WAITING) == pytest.approx(before, rel=0.15)


def test_steps_that_take_thrice_as_long_now_and_then_change_nothing() -> None:
    """As where another process runs for a moment: a mean of them would let twice as many ride."""
    idle_prefill = measured()
    before = idle_prefill.limit(500, 1, 1, 8 * EVERY)
    for at in range(40):
        held_up = 3 if at % 4 == 0 else 1
        idle_prefill.took(step(decode()), held_up * BASE)
        idle_prefill.took(step(decode(), prompt(LEAST)), BASE + LEAST * TOKEN)
    assert idle_prefill.limit(500, 1, 1, 8 * EVERY) == before


def test_what_costs_less_than_can_be_measured_rides_and_is_no_division_by_nothing() -> None:
    idle_prefill = IdlePrefill(1.5)
    for _ in range(20):
        idle_prefill.took(step(decode()), BASE)
        idle_prefill.took(step(decode(), prompt(LEAST)), 0.9 * BASE)
        idle_prefill.took(step(decode(), prompt(64)), 0.9 * BASE)
    assert idle_prefill.limit(500, 1, 1, 8 * EVERY) >= 8 * EVERY


def test_now_and_then_a_step_goes_without_to_be_measured() -> None:
    idle_prefill = measured()
    limits = [idle_prefill.limit(500, 1, 1, WAITING) for _ in range(2 * (PROBE_EVERY + 1))]
    assert [at for at, limit in enumerate(limits) if not limit] == [PROBE_EVERY, 2 * PROBE_EVERY + 1]


def test_where_what_rides_is_soon_all_no_step_catches_up() -> None:
    idle_prefill = measured()
    for _ in range(4 * EVERY):
        idle_prefill.took(step(decode()), BASE)
        assert idle_prefill.limit(500, 1, 1, 8 * EVERY) <= 0.5 * BASE / TOKEN


def test_a_few_tokens_by_themselves_do_not_tell_what_riding_costs() -> None:
    idle_prefill = measured()
    before = idle_prefill.limit(500, 1, 1, WAITING)
    for _ in range(60):
        idle_prefill.took(step(prompt(4)), BASE + 4 * TOKEN)
    assert idle_prefill.limit(500, 1, 1, WAITING) == before


def test_riding_that_was_dear_once_is_tried_again() -> None:
    idle_prefill = measured(rider=20 * TOKEN)
    for _ in range(60 * PROBE_EVERY):
        riders = idle_prefill.limit(500, 1, 1, LEAST)
        idle_prefill.took(step(decode(), prompt(riders)) if riders else step(decode()), BASE + riders * TOKEN)
    limits = sorted(idle_prefill.limit(500, 1, 1, LEAST) for _ in range(EVERY))
    assert limits[1] >= LEAST, "all but one that measures"


def test_input_that_comes_beside_a_reply_is_computed_in_pieces_and_all_of_it() -> None:
    here = world(depth=1, max_step_tokens=64, max_sequences=4, idle_stretch=1.5)
    here.open(0, [1, 2, 3])
    here.generate(0, 30)
    here.step()
    here.open(1, list(range(24)))
    here.step()
    assert here.state(1).computed == LEAST, "not at once, though the step has room"
    here.run()
    assert here.state(1).computed == 23
    here.reply(1, 2)


def test_input_of_a_turn_that_is_due_is_computed_at_once_and_before_others() -> None:
    here = world(depth=1, max_step_tokens=64, max_sequences=4, idle_stretch=1.5)
    here.open(0, [1, 2, 3])
    here.generate(0, 30)
    here.step()
    here.open(1, [7])
    here.open(2, list(range(9)))
    here.extend(1, list(range(20)), due=True)
    here.step()
    assert (here.state(1).computed, here.state(2).computed) == (20, 0)
    here.reply(1, 2)
    here.run()


def test_input_is_computed_as_it_comes_and_few_tokens_of_others_wait() -> None:
    """Four turns decode; 20 tokens come with every second step of theirs, on a device with the costs above.

    Few at a time cost as much as ``FEW`` of them.
    """
    settings = SchedulerSettings(blocks=512, vocab_size=64, max_context=4096, idle_stretch=1.25)
    scheduler = Scheduler(settings, BlockPool(512), BlockHasher(bytes(32), 16))
    for seq in range(4):
        scheduler.apply(Open(0, seq, b"", [seq]), 0.0)
        scheduler.apply(Generate(0, seq, Sampling(), TokenLimits(1000)), 0.0)
    scheduler.apply(Open(0, 9, b"", [9]), 0.0)
    arrived, now, seconds = 1, 0.0, []
    while arrived < 1000:
        if now > arrived * 2 * BASE / 20:
            scheduler.apply(Extend(0, 9, [7] * 20), 0.0)
            arrived += 20
        plan = scheduler.plan(0.0)
        assert plan is not None
        took = BASE + TOKEN * float(np.maximum(FEW, plan.counts[plan.seqs == 9]).sum())
        scheduler.took(plan, took)
        scheduler.commit(plan, Outcomes.of([[1] if draws else [] for draws in plan.draws]), 0.0)
        now += took
        seconds.append(took)
    left = arrived - scheduler.state(9).computed
    assert left * 2 * BASE / 20 <= (2 * EVERY + PATIENCE) * BASE / (1 - SHARE), (
        "no more than came since the last step for it"
    )
    assert (
        sum(took > 1.25 * BASE for took in seconds) <= len(seconds) / EVERY + len(seconds) / PROBE_EVERY + 2
    )


@pytest.mark.parametrize("others", [False, True])
def test_a_step_without_turns_ends_sooner_where_one_could_begin(others: bool) -> None:
    settings = SchedulerSettings(blocks=512, vocab_size=64, max_context=4096, idle_stretch=1.25)
    scheduler = Scheduler(settings, BlockPool(512), BlockHasher(bytes(32), 16))
    if others:
        scheduler.apply(Open(0, 1, b"", [1]), 0.0)
    scheduler.apply(Open(0, 9, b"", [9]), 0.0)
    counts = []
    for _ in range(2):
        scheduler.apply(Extend(0, 9, [7] * 400), 0.0)
        plan = scheduler.plan(0.0)
        assert plan is not None
        counts.append(plan.size)
        scheduler.took(plan, TOKEN * plan.size)
        scheduler.commit(plan, Outcomes.of([[]] * len(plan)), 0.0)
    assert counts == [400, pytest.approx((SOON if others else SOON_ENOUGH) / TOKEN, abs=1)]
