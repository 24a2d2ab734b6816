"""Edits of logits against transformers' processors, and the additive penalties against their definition."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from holdfast.kernels.reference import penalties
from holdfast.kernels.reference.penalties import NO_TOKEN, NOTHING

VOCAB = 32


def random_logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows)) * 4


def tallied(prompts: list[list[int]], outputs: list[list[int]]) -> torch.Tensor:
    """A line for each prompt and its output; line 0 is of other tokens."""
    tally = torch.zeros((len(prompts) + 1, VOCAB), dtype=torch.int32)
    entries = [(0, token, 1) for token in range(VOCAB)]
    for line, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), 1):
        entries += [(line, token, 0) for token in prompt] + [(line, token, 1) for token in output]
    penalties.count(tally, *torch.tensor(entries).T)
    return tally


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_is_transformers(penalty: float) -> None:
    logits = random_logits(4)
    before = logits.clone()
    prompts, outputs = [[1, 1, 5], [9]], [[7, 8, 7], []]
    nothing = torch.zeros(2)
    penalties.penalize(
        logits, torch.tensor([2, 0]), tallied(prompts, outputs), torch.tensor([1, 2]),
        torch.full((2,), penalty), nothing, nothing,
    )  # fmt: skip
    theirs = RepetitionPenaltyLogitsProcessor(penalty)
    assert torch.equal(logits[2], theirs(torch.tensor([[1, 1, 5, 7, 8, 7]]), before[2:3].clone())[0])
    assert torch.equal(logits[0], theirs(torch.tensor([[9]]), before[:1].clone())[0])
    assert torch.equal(logits[[1, 3]], before[[1, 3]]), "other rows stay as they are"


def test_presence_and_frequency_regard_the_output_alone() -> None:
    logits = random_logits(3)
    before = logits.clone()
    prompts, outputs = [[4, 4, 4], [2]], [[4, 6, 6], []]
    penalties.penalize(
        logits,
        torch.tensor([1, 2]),
        tallied(prompts, outputs),
        torch.tensor([1, 2]),
        torch.ones(2),
        torch.tensor([0.5, 9.0]),
        torch.tensor([0.25, 9.0]),
    )
    for token in range(VOCAB):
        times = Counter(outputs[0])[token]
        expected = before[1, token] - 0.5 * times - 0.25 * (times > 0)
        assert logits[1, token] == pytest.approx(expected.item(), abs=1e-6)
    assert torch.equal(logits[[0, 2]], before[[0, 2]])


def test_bias_is_transformers() -> None:
    logits = random_logits(2)
    theirs = SequenceBiasLogitsProcessor({(3,): 2.5, (30,): -100.0})(
        torch.zeros((1, 1), dtype=torch.int64), logits[1:].clone()
    )
    penalties.add(logits, torch.tensor([1, 1]), torch.tensor([3, 30]), torch.tensor([2.5, -100.0]))
    assert torch.equal(logits[1], theirs[0])
    assert torch.equal(logits[0], random_logits(2)[0])


@pytest.mark.parametrize("ids", [[5], [9, 5], [9, 9], [1, 2, 3], [8, 1, 2], [3, 9, 1, 2]])
def test_bad_words_are_transformers(ids: list[int]) -> None:
    words = [[7], [9, 5], [9, 6], [1, 2, 3], [1, 2, 4], [2, 4], [3, 9, 1, 2, 11]]
    logits = random_logits(1)
    theirs = NoBadWordsLogitsProcessor(words)(torch.tensor([ids]), logits.clone())
    width = max(map(len, words))
    beginnings = [[NO_TOKEN] * (width - len(word) + 1) + word[:-1] for word in words]
    tail = ([NOTHING] * width + ids)[-width:]
    found = penalties.completes(torch.tensor(beginnings), torch.tensor([tail] * len(words)))
    rows, finals = torch.zeros(len(words), dtype=torch.int64), torch.tensor([word[-1] for word in words])
    penalties.forbid(logits, rows, finals, found)
    assert torch.equal(logits, theirs)
    assert found[0] and not found.all()


def test_forbidding_the_end_is_transformers() -> None:
    logits = random_logits(1)
    theirs = MinNewTokensLengthLogitsProcessor(3, 2, [4, 6])(torch.tensor([[1, 2, 3, 9]]), logits.clone())
    penalties.forbid(logits, torch.tensor([0, 0]), torch.tensor([4, 6]))
    assert torch.equal(logits, theirs)


@pytest.mark.parametrize("vocab", [1, 7, 8, 63, 64, 65, 200])
def test_only_what_a_mask_allows_is_left(vocab: int) -> None:
    chance = np.random.default_rng(vocab)
    logits = torch.from_numpy(chance.normal(size=(5, vocab))).float()
    allowed = chance.random((3, vocab)) < 0.4
    padded = np.zeros((3, 64 * (-(-vocab // 64))), dtype=bool)
    padded[:, :vocab] = allowed
    masks = torch.from_numpy(np.packbits(padded, axis=-1, bitorder="little").view(np.int64))
    rows = torch.tensor([4, 0, 2])
    expected = logits.clone()
    for row, mask in zip(rows.tolist(), allowed, strict=True):
        for token in range(vocab):
            if not mask[token]:
                expected[row, token] = float("-inf")
    penalties.allow(logits, rows, masks)
    assert torch.equal(logits, expected)
