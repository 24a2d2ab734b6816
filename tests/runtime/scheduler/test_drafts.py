"""Guessed tokens: what is right counts, what is wrong leaves no trace."""

from __future__ import annotations

import pytest

from holdfast.runtime.engine import Engine
from holdfast.tests.runtime.fakes import drafting_engine, fake_engine
from holdfast.tests.runtime.worlds import World, world

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def told(here: World) -> list[int]:
    here.open(0, list(range(9)))
    return here.reply(0, 30)


@DEPTHS
def test_guesses_change_nothing_but_the_number_of_steps(depth: int) -> None:
    plain, drafting = (
        world(depth=depth, max_step_tokens=16, make=make) for make in (fake_engine, drafting_engine)
    )
    assert told(drafting) == told(plain)
    counters = drafting.scheduler.counters
    assert (
        0 < counters.accepted < counters.drafted and counters.steps < plain.scheduler.counters.steps * depth
    )
    assert counters.sampled == 30 and drafting.ended[0].work == plain.ended[0].work
    before = drafting.scheduler.counters.prefilled
    drafting.extend(0, [7])
    drafting.reply(0, 2)
    assert drafting.scheduler.counters.prefilled - before <= 2, "the blocks that were sealed are right"


def test_no_guess_takes_a_token_from_a_prompt_beside_it() -> None:
    here = world(depth=1, max_step_tokens=6, make=drafting_engine)
    here.open(0, [1, 2, 3])
    here.generate(0, 30)
    here.run(3)
    here.open(1, list(range(20)))
    here.generate(1, 3)
    here.run()
    assert set(here.ended) == {0, 1} and isinstance(here.engine, Engine)
