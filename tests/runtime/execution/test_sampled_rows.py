"""What a plan tells of a row's past: the tokens before its last one, where output begins, what may not come."""

from __future__ import annotations

import pytest

from holdfast.runtime.plan import Plan, PlanRow
from holdfast.runtime.verbs import Generate, Open, Refusal, Sampling, TokenLimits
from holdfast.tests.runtime.fakes import fake_engine
from holdfast.tests.runtime.worlds import world

PROMPT = list(range(40, 53))
READING = Sampling(repetition_penalty=1.5)
STOPS = (254, 255)

Told = tuple[PlanRow, list[int] | None]


def planned(
    depth: int,
    sampling: Sampling,
    limits: TokenLimits,
    *,
    generated_from: int = 0,
    evict_every: int = 0,
) -> tuple[list[Told], list[int]]:
    """The rows that sampled, each with its past as it was at launch, and the tokens said."""
    engine, device = fake_engine(world(depth=depth, max_step_tokens=6).settings, vocab_size=200)
    told: list[Told] = []
    device.keep_plans = True
    launch = device.launch

    def listen(plan: Plan):
        handle = launch(plan)
        told.extend(
            (row, None if row.past is None else row.past.tolist())
            for row in device.rows[-1]
            if row.sampling is not None
        )
        return handle

    device.launch = listen  # type: ignore[method-assign]
    for verb in (Open(1, 0, b"", PROMPT), Generate(2, 0, sampling, limits, generated_from)):
        assert not isinstance(engine.apply(verb), Refusal)
    said: list[int] = []
    steps = 0
    while (step := engine.step()) is not None:
        said += [token for row in step.rows for token in row.tokens]
        steps += 1
        if evict_every and steps % evict_every == 0:
            engine.scheduler.evict(0)
    return told, said


@pytest.mark.parametrize("evict_every", [0, 3])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_past_is_all_that_stands_before_the_last_token(depth: int, evict_every: int) -> None:
    told, said = planned(depth, READING, TokenLimits(12), evict_every=evict_every)
    whole = PROMPT + said
    for row, past in told:
        assert past == whole[: row.first + row.count - 1]
        assert row.output_from == len(PROMPT)
    assert {row.first + row.count for row, _ in told} == set(range(len(PROMPT), len(PROMPT) + 12))
    assert any(row.fed for row, _ in told) == (depth == 2)


def test_no_other_row_is_told_the_past() -> None:
    warm = Sampling(1.0, 5, 0.9, seed=7, min_p=0.1, typical_p=0.9, logit_bias=((1, 1.0),), logprobs=3)
    for sampling in (Sampling(), warm, Sampling(bad_words=((1,), (2,)))):
        assert all(past is None for _, past in planned(2, sampling, TokenLimits(4))[0])
    for sampling in (
        READING,
        Sampling(presence_penalty=0.1),
        Sampling(frequency_penalty=0.1),
        Sampling(bad_words=((1,), (2, 3))),
    ):
        assert all(past is not None for _, past in planned(2, sampling, TokenLimits(4))[0])


@pytest.mark.parametrize("begun", [0, 5, 13])
def test_a_reply_begun_again_has_its_first_tokens_as_output(begun: int) -> None:
    told, _ = planned(2, READING, TokenLimits(20), generated_from=begun)
    assert {row.output_from for row, _ in told} == {len(PROMPT) - begun}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("least", "begun"), [(0, 0), (1, 0), (6, 0), (6, 4), (6, 6), (20, 0)])
def test_the_end_is_forbidden_until_the_least_number_of_tokens(depth: int, least: int, begun: int) -> None:
    told, said = planned(depth, Sampling(), TokenLimits(20, STOPS, least), generated_from=begun)
    assert len(said) == 20 - begun
    for row, _ in told:
        before = row.first + row.count - len(PROMPT) + begun  # tokens of the reply that stand already
        assert row.asks.forbidden == (STOPS if before < least else ())
