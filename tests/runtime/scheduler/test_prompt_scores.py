"""Log probabilities of a prompt: each of its tokens once, whatever its chunks, preemption and the caches do."""

from __future__ import annotations

import pytest

from holdfast.runtime.engine import Engine
from holdfast.runtime.plan import NOTHING_MORE, Handle, Outcome, Outcomes, Plan, RowFault, Scored
from holdfast.runtime.settings import SchedulerSettings
from holdfast.runtime.verbs import (
    Fork,
    Generate,
    Open,
    Opening,
    Refusal,
    Row,
    Sampling,
    TokenLimits,
    TokenLogprob,
    VerbReply,
)
from holdfast.tests.runtime.fakes import FakeRunner, fake_engine, fake_memory

SCORES = Sampling(prompt_logprobs=1)


class ScoringRunner:
    """The fake device, which gives the token at position p the log probability -p."""

    def __init__(self, device: FakeRunner) -> None:
        self._device = device
        self.scored = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._device, name)

    def launch(self, plan: Plan) -> ScoringHandle:
        self.scored += sum(len(ask.scored) for ask in plan.asks.values() if ask.scored is not None)
        return ScoringHandle(plan, self._device.launch(plan))


class ScoringHandle:
    def __init__(self, plan: Plan, handle: Handle) -> None:
        self._plan, self._handle = plan, handle
        self.moved = handle.moved

    def draw(self) -> None:
        """Does nothing."""

    def tokens(self) -> Outcomes:
        found: list[Outcome] = []
        for at, outcome in enumerate(self._handle.tokens()):
            row = self._plan.asks.get(at, NOTHING_MORE)
            if isinstance(outcome, RowFault) or row.scored is None:
                found.append(outcome)
                continue
            positions = range(row.scored_from + 1, row.scored_from + 1 + len(row.scored))
            prompt = [
                TokenLogprob(-float(position), [(int(token), 0.0)])
                for position, token in zip(positions, row.scored, strict=True)
            ]
            found.append(Scored(outcome if isinstance(outcome, list) else outcome.tokens, [], prompt))
        return Outcomes.of(found)


def engine(**settings: int) -> tuple[Engine, ScoringRunner]:
    given = {"blocks": 64, "block_tokens": 4, "max_context": 200, "max_step_tokens": 16, "max_sequences": 4}
    numbers = SchedulerSettings(vocab_size=256, **{**given, **settings})
    made, device = fake_engine(numbers, memory=fake_memory(32, 4))
    runner = ScoringRunner(device)
    return Engine(made.scheduler, runner, debug=True), runner


def begin(on: Engine, seq: int, prompt: list[int], sampling: Sampling = SCORES, *, most: int = 3) -> object:
    verb = Generate(100 + seq, seq, sampling, TokenLimits(most), tokens=prompt, opening=Opening(b"salt"))
    return on.apply(verb)


def run(on: Engine) -> dict[int, list[Row]]:
    rows: dict[int, list[Row]] = {}
    while (step := on.step()) is not None:
        for row in step.rows:
            rows.setdefault(row.seq, []).append(row)
    return rows


def told(rows: list[Row]) -> list[TokenLogprob]:
    return [score for row in rows for score in row.prompt_logprobs or ()]


def expected(prompt: list[int]) -> list[TokenLogprob]:
    return [TokenLogprob(-float(at), [(token, 0.0)]) for at, token in enumerate(prompt) if at]


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 50])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_is_scored_chunk_by_chunk(length: int, depth: int) -> None:
    on, _ = engine(depth=depth)
    prompt = [(7 * at) % 250 for at in range(length)]
    assert isinstance(begin(on, 0, prompt), VerbReply)
    rows = run(on)[0]
    assert told(rows) == expected(prompt)
    assert max(len(row.prompt_logprobs or ()) for row in rows) <= 16, "a chunk at a time"
    assert sum(len(row.tokens) for row in rows) == 3 and all(row.logprobs is None for row in rows)


def test_what_the_prefix_cache_has_is_computed_again_and_other_turns_still_use_it() -> None:
    on, _ = engine()
    prompt = [(7 * at) % 250 for at in range(50)]
    begin(on, 0, prompt, Sampling())
    first = run(on)[0]
    begin(on, 1, prompt)
    begin(on, 2, prompt, Sampling())
    rows = run(on)
    assert told(rows[1]) == expected(prompt) and not told(rows[2])
    assert first[-1].work is not None and rows[1][-1].work is not None and rows[2][-1].work is not None
    assert rows[1][-1].work.prefilled == first[-1].work.prefilled == 50
    assert rows[2][-1].work.resident >= 48
    assert {tuple(token for row in found for token in row.tokens) for found in (first, *rows.values())} == {
        tuple(token for row in first for token in row.tokens)
    }


@pytest.mark.parametrize("depth", [1, 2])
def test_a_preempted_turn_tells_each_score_once(depth: int) -> None:
    """An older turn grows into its blocks when a part of its prompt is computed."""
    on, runner = engine(blocks=26, max_context=90, max_step_tokens=3, max_sequences=2, depth=depth)
    older, prompt = [5] * 20, [(7 * at) % 250 for at in range(60)]
    begin(on, 0, older, most=60)
    begin(on, 1, prompt, most=5)
    rows = run(on)
    assert on.statistics()["preempted"] > 0
    same = [told(rows[0]) == expected(older), told(rows[1]) == expected(prompt)]
    assert same == [True, True]
    work = rows[1][-1].work
    assert work is not None and work.recomputed > 0 and runner.scored >= 19 + 59
    assert [sum(len(row.tokens) for row in rows[seq]) for seq in (0, 1)] == [60, 5]


def test_a_reply_that_goes_on_scores_its_prompt_alone() -> None:
    on, _ = engine()
    prompt = [(7 * at) % 250 for at in range(20)]
    verb = Generate(
        1, 0, SCORES, TokenLimits(8), generated_from=4, tokens=[*prompt, 1, 2, 3, 4], opening=Opening(b"salt")
    )
    assert isinstance(on.apply(verb), VerbReply)
    assert told(run(on)[0]) == expected(prompt)


def test_only_a_sequence_that_begins_has_scores() -> None:
    on, _ = engine()
    on.apply(Open(1, 0, b"salt", [1, 2, 3]))
    run(on)
    later = on.apply(Generate(2, 0, SCORES, TokenLimits(2)))
    forked = on.apply(Generate(3, 5, SCORES, TokenLimits(2), tokens=[4], opening=Opening(parent=0, at=2)))
    wrong = begin(on, 6, [1, 2], Sampling(prompt_logprobs=21))
    assert all(isinstance(one, Refusal) and one.code == "sampling_invalid" for one in (later, forked, wrong))
    assert isinstance(on.apply(Fork(4, 0, [7])), VerbReply)
