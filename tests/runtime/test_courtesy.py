"""Idle prefill beside turns: as many tokens as measured step times allow, and steps without, to measure."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.runtime.courtesy import LEAST, PROBE_EVERY, Courtesy
from holdfast.runtime.link.messages import Sampling
from holdfast.runtime.plan import Plan, PlanRow
from holdfast.tests.runtime.worlds import world

NOTHING = np.empty(0, dtype=np.int64)
NO_TABLE = np.empty(0, dtype=np.int32)
BASE, TOKEN = 0.020, 0.001
"""Seconds of a step that decodes, and of a prompt token."""


def decode(seq: int = 0) -> PlanRow:
    return PlanRow(seq, 0, 9, 1, NOTHING, NO_TABLE, sampling=Sampling())


def prompt(count: int, seq: int = 9) -> PlanRow:
    return PlanRow(seq, 0, 0, count, NOTHING, NO_TABLE)


def measured(stretch: float = 1.5) -> Courtesy:
    """One that has seen what decoding and a prompt of 64 tokens take."""
    courtesy = Courtesy(stretch)
    for _ in range(60):
        courtesy.took(Plan(1, (decode(),)), BASE)
        courtesy.took(Plan(2, (decode(), prompt(64))), BASE + 64 * TOKEN)
    return courtesy


def test_nothing_is_held_back_where_no_turn_runs_or_no_limit_is_set() -> None:
    assert measured().limit(500, []) == 500
    assert measured(stretch=0.0).limit(500, [decode()]) == 500


def test_beside_decodes_a_step_takes_its_stretch_and_no_more() -> None:
    assert measured().limit(500, [decode(), decode(1)]) == pytest.approx(0.5 * BASE / TOKEN, abs=1)
    assert measured(stretch=2.0).limit(500, [decode()]) == pytest.approx(BASE / TOKEN, abs=1)
    assert measured(stretch=2.0).limit(7, [decode()]) == 7


def test_beside_a_prompt_too() -> None:
    assert measured().limit(500, [prompt(100)]) == pytest.approx(50, abs=1)
    assert measured().limit(500, [prompt(100), decode()]) == pytest.approx(60, abs=1)


def test_the_least_is_always_allowed_and_all_there_is_before_anything_is_measured() -> None:
    assert measured(stretch=1.01).limit(500, [decode()]) == LEAST
    assert Courtesy(1.5).limit(500, [decode()]) == LEAST


def test_one_slow_step_changes_little() -> None:
    courtesy = measured()
    before = courtesy.limit(500, [decode()])
    courtesy.took(Plan(3, (decode(),)), 100 * BASE)
    courtesy.took(Plan(4, (prompt(1),)), 100 * TOKEN)
    assert courtesy.limit(500, [decode()]) == pytest.approx(before, rel=0.15)


def test_now_and_then_a_step_goes_without_to_be_measured() -> None:
    courtesy = measured()
    limits = [courtesy.limit(500, [decode()]) for _ in range(2 * (PROBE_EVERY + 1))]
    assert [at for at, limit in enumerate(limits) if not limit] == [PROBE_EVERY, 2 * PROBE_EVERY + 1]


def test_input_that_comes_beside_a_reply_is_computed_in_pieces_and_all_of_it() -> None:
    here = world(depth=1, max_step_tokens=64, max_sequences=4, idle_stretch=1.5)
    here.open(0, [1, 2, 3])
    here.generate(0, 12)
    here.step()
    here.open(1, list(range(24)))
    here.step()
    assert here.state(1).computed == LEAST, "not at once, though the step has room"
    here.run()
    assert here.state(1).computed == 23
    here.reply(1, 2)
