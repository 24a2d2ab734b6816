"""From a step's logits to tokens: all edits together in transformers' order, verdicts, log probabilities."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from holdfast.kernels.device import CpuDevice
from holdfast.kernels.reference import backend
from holdfast.runtime.execution.batch import Batch
from holdfast.runtime.execution.sampler import Sampler
from holdfast.runtime.grammar.llguidance import Matchers
from holdfast.runtime.plan import NOTHING_MORE, Changes, Plan, PlanRow, RowAsks, RowFault, Scored, plan_of
from holdfast.runtime.verbs import Sampling

VOCAB = 48
EOS = (0, 1)
TABLE = np.zeros(1, dtype=np.int32)


def row(tokens: list[int], sampling: Sampling, prompt: int = 0, seq: int = 0, early: bool = False) -> PlanRow:
    """A row that computes the last of ``tokens``, of which the first ``prompt`` are the prompt."""
    ids = np.array(tokens)
    return PlanRow(
        seq, 0, len(ids) - 1, 1, ids[-1:], TABLE, sampling,
        past=ids[:-1].astype(np.int32), output_from=prompt, asks=RowAsks(EOS) if early else NOTHING_MORE,
    )  # fmt: skip


def sampler(batch: Batch) -> Sampler:
    return Sampler(batch, Matchers(), CpuDevice(), backend)


def lines_of(plan: Plan, batch: Batch, logits: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    ours, positions = sampler(batch), torch.from_numpy(plan.firsts + plan.counts)
    return ours.draw(plan, ours.rows(plan.slots), np.arange(len(plan)), positions, logits.clone(), last)


def drawn(rows: list[PlanRow], logits: torch.Tensor) -> list[Any]:
    plan, batch = plan_of(1, rows), Batch()
    batch.apply(plan)
    last = torch.tensor([int(one.tokens[-1]) for one in rows])
    lines = lines_of(plan, batch, logits, last).numpy()
    made = sampler(batch).outcomes(plan, np.arange(len(rows)), batch.scores[plan.slots], lines)
    return [one[0] if isinstance(one, list) and len(one) == 1 else one for one in made]


def fed_by(one: PlanRow, logits: torch.Tensor, token: int) -> int:
    """What the row draws where ``token`` is its last one on the device."""
    plan, batch = plan_of(1, [one]), Batch()
    batch.apply(plan)
    return int(lines_of(plan, batch, logits, torch.tensor([token]))[0, 0])


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def theirs(one: PlanRow, tokens: list[int], prompt: int) -> LogitsProcessorList:
    """The processors of transformers for a row, as ``generate`` would order them."""
    how, made = one.sampling, LogitsProcessorList()
    assert how is not None
    if how.logit_bias:
        made.append(SequenceBiasLogitsProcessor({(token,): value for token, value in how.logit_bias}))
    if how.repetition_penalty != 1:
        made.append(RepetitionPenaltyLogitsProcessor(how.repetition_penalty))
    if how.bad_words:
        made.append(NoBadWordsLogitsProcessor([list(word) for word in how.bad_words]))
    if one.asks.forbidden:
        made.append(MinNewTokensLengthLogitsProcessor(prompt, len(tokens) + 1, list(EOS)))
    return made


def test_every_edit_together_is_what_transformers_does() -> None:
    """60 rows, each of another mix and history; greedy, so that the edited logits alone decide."""
    generator = np.random.default_rng(4)
    rows, contexts = [], []
    for seq in range(60):
        tokens = generator.integers(0, VOCAB, 1 + seq % 7 * 5).tolist()
        how = Sampling(
            repetition_penalty=(1.0, 1.4, 3.0)[seq % 3],
            logit_bias=((seq % VOCAB, 4.0), (7, -3.0)) if seq % 2 else (),
            bad_words=tuple((tokens[-1], token) for token in range(0, VOCAB, 2)) if seq % 5 == 0 else (),
        )
        rows.append(row(tokens, how, len(tokens) // 2, seq, early=seq % 4 == 0))
        contexts.append(tokens)
    logits = random_logits(60)
    logits[:, 0] += 6  # the end, or nearly: what forbids it shows
    expected = []
    for at, (one, tokens) in enumerate(zip(rows, contexts, strict=True)):
        scores = theirs(one, tokens, len(tokens) // 2)(torch.tensor([tokens]), logits[at : at + 1].clone())
        expected.append(scores.argmax(-1).item())
    assert drawn(rows, logits) == expected
    assert sum(ours != bare for ours, bare in zip(expected, logits.argmax(-1).tolist(), strict=True)) > 20


def test_the_last_token_comes_from_the_device() -> None:
    """It counts for penalties and words, though the plan of a row that a step in flight feeds has it not."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6] = 2.0, 1.5
    for how in (
        Sampling(repetition_penalty=2.0),
        Sampling(presence_penalty=1.0),
        Sampling(frequency_penalty=1.0),
    ):
        fed = replace(row([3, 9], how, prompt=1), tokens=np.empty(0, dtype=np.int64), fed=True)
        assert [fed_by(fed, logits, token) for token in (5, 9)] == [6, 5]
    fed = row([8, 3, 9], Sampling(bad_words=((3, 4, 5),)))
    assert [fed_by(fed, logits, token) for token in (4, 9)] == [6, 5]


def test_the_prompt_counts_for_repetition_alone() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6] = 2.0, 1.5
    for how, expected in ((Sampling(repetition_penalty=2.0), 6), (Sampling(presence_penalty=2.0), 5)):
        assert drawn([row([5, 5], how, prompt=2)], logits) == [expected]
        assert drawn([row([5, 5], how, prompt=1)], logits) == [6]
        assert drawn([row([5, 9], how, prompt=0)], logits) == [6]
    both = Sampling(repetition_penalty=1.01, presence_penalty=2.0)
    assert drawn([row([5, 9], both, prompt=1), row([5, 9], both, prompt=0)], logits.expand(2, -1)) == [5, 6]


def test_what_a_slot_has_counted_is_its_sequence_s_alone() -> None:
    """Steps over one batch draw what each draws in a batch that begins with it."""
    how = Sampling(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.3)
    logits, batch = random_logits(2) / 3, Batch()
    texts = [[5, 6], [7, 7, 8]]
    for number in range(12):
        rows = [row(tokens, how, prompt=2, seq=seq) for seq, tokens in enumerate(texts)]
        plan, whole = plan_of(1, rows), ()
        if number in (0, 7):  # the second time for one of them alone
            assert plan.changes is not None
            whole = plan.changes.whole[number == 7 :]
        known = [(seq, one[-2]) for seq, one in enumerate(texts) if seq not in [one.number for one in whole]]
        past = np.array(known, dtype=np.int32).reshape(-1, 2)
        plan = replace(plan, changes=Changes(number, whole, past=past))
        batch.apply(plan)
        last = torch.tensor([tokens[-1] for tokens in texts])
        said = lines_of(plan, batch, logits, last)[:, 0].tolist()
        assert said == drawn(rows, logits)
        texts = [[*tokens, token] for tokens, token in zip(texts, said, strict=True)]
        if number == 6:
            texts[1] = [9, 9, *range(10, 20)]
    assert len(set(texts[0])) > 4, "penalties change what is drawn"


def test_rows_that_ask_for_nothing_cost_an_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "sample", None)
    logits = random_logits(3)
    rows = [replace(row([1], Sampling()), past=None) for _ in range(3)]
    assert drawn(rows, logits) == logits.argmax(-1).tolist()


def test_logprobs_are_those_of_the_model() -> None:
    """Of the logits as the model gave them, whatever was done to them before the draw."""
    logits = random_logits(4)
    hows = [
        Sampling(logprobs=0),
        Sampling(),
        Sampling(
            temperature=1.5, seed=4, top_k=3, repetition_penalty=1.7, logit_bias=((9, 50.0),), logprobs=20
        ),
        Sampling(logprobs=3),
    ]
    rows = [row([2, 9, 4], how, seq=seq) for seq, how in enumerate(hows)]
    plain, told = logits.log_softmax(-1), drawn(rows, logits)
    assert isinstance(told[1], int)
    for at, most in ((0, 0), (2, 20), (3, 3)):
        one = told[at]
        assert isinstance(one, Scored)
        assert one.logprobs[0].logprob == pytest.approx(plain[at, one.tokens[0]].item(), abs=1e-5)
        best = plain[at].topk(most)
        assert [token for token, _ in one.logprobs[0].top] == best.indices.tolist()
        assert [value for _, value in one.logprobs[0].top] == pytest.approx(best.values.tolist(), abs=1e-5)
    biased = told[2]
    assert isinstance(biased, Scored) and biased.tokens == [9]


def test_more_logprobs_than_tokens_are_all_tokens() -> None:
    (one,) = drawn([row([1], Sampling(logprobs=20))], random_logits(1)[:, :6])
    assert isinstance(one, Scored) and len(one.logprobs[0].top) == 6


def test_a_row_with_nothing_left_fails_alone() -> None:
    words = tuple((token,) for token in range(VOCAB))
    rows = [row([1], Sampling(bad_words=words), seq=3), row([1], Sampling(1.0), seq=4)]
    fault, token = drawn(rows, random_logits(2))
    assert fault == RowFault("sequence 3: every token is forbidden")
    assert isinstance(token, int)
    broken = random_logits(2)
    broken[0, 7] = float("inf")
    assert drawn(rows, broken)[0] == RowFault("sequence 3: logits are not finite")


def test_a_row_draws_alone_what_it_draws_in_any_company() -> None:
    generator = np.random.default_rng(2)
    hows = [
        Sampling(),
        Sampling(1.0, seed=1),
        Sampling(0.8, 5, 0.9, seed=2, min_p=0.1),
        Sampling(1.2, seed=3, typical_p=0.5, frequency_penalty=0.7),
        Sampling(1.0, seed=4, presence_penalty=-1.0, logit_bias=((3, 2.0),)),
        Sampling(repetition_penalty=1.5, logprobs=2),
        Sampling(1.0, 0, 0.7, seed=6, bad_words=((1, 2), (5,)), logprobs=0),
        Sampling(1.0, seed=7, bad_words=((6,), (7,))),
    ] * 3
    rows = [row(generator.integers(0, VOCAB, 9).tolist(), how, 4, seq) for seq, how in enumerate(hows)]
    logits = random_logits(len(rows), seed=5)
    alone = [drawn([one], logits[at : at + 1])[0] for at, one in enumerate(rows)]
    assert drawn(rows, logits) == alone
