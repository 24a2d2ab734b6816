"""Penalties and log probabilities by Triton, interpreted, against the reference: equal numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.kernels.gpu import penalties
from holdfast.kernels.gpu.seeded_sampling import log_probabilities
from holdfast.kernels.reference import penalties as reference
from holdfast.kernels.reference import seeded_sampling

VOCAB = 9_001


@settings(max_examples=15, deadline=None)
@given(
    said=st.lists(
        st.lists(st.tuples(st.integers(0, 40), st.integers(0, 1)), max_size=60), min_size=1, max_size=3
    ),
    repetition=st.floats(0.5, 2, width=32),
    frequency=st.floats(-2, 2, width=32),
    presence=st.floats(-2, 2, width=32),
)
def test_penalties_are_the_references_to_the_last_bit(
    said: list[list[tuple[int, int]]], repetition: float, frequency: float, presence: float
) -> None:
    """Of tokens that are counted in two calls; in another order than the lines."""
    logits = torch.randn((len(said) + 1, 41), generator=torch.Generator().manual_seed(1)) * 4
    entries = [(line + 2, token, output) for line, one in enumerate(said) for token, output in one]
    columns = torch.tensor(entries, dtype=torch.int64).view(-1, 3).T
    rows = torch.arange(len(said)).flip(0) + 1
    lines = torch.arange(len(said)) + 2
    strengths = [torch.full((len(said),), one).double() for one in (repetition, frequency, presence)]
    found = []
    for by in (reference, penalties):
        made, tally = logits.clone(), torch.zeros((len(said) + 3, 41), dtype=torch.int32)
        for part in (columns[:, :20].contiguous(), columns[:, 20:].contiguous()):
            by.count(tally, *part)
        by.penalize(made, rows, tally, lines, *strengths)
        found.append((made, tally))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_unfit_shapes_are_refused_with_both() -> None:
    tally, none = torch.zeros((2, 4), dtype=torch.int32), torch.zeros(3).long()
    with pytest.raises(ValueError, match=r"lines: shape \(2,\), expected \(3,\)"):
        penalties.count(tally, none[:2], none, none)
    with pytest.raises(ValueError, match=r"tally: shape \(2, 4\), expected \(2, 5\)"):
        penalties.penalize(torch.zeros(1, 5), none[:1], tally, none[:1], *[torch.ones(1)] * 3)


@pytest.mark.parametrize("most", [0, 1, 20])
def test_log_probabilities(most: int) -> None:
    logits = torch.randn((3, VOCAB), generator=torch.Generator().manual_seed(2)) * 5
    logits[1, 7] = float("-inf")
    ids = torch.tensor([3, 7, VOCAB - 1])
    got, expected = log_probabilities(logits, ids, most), seeded_sampling.log_probabilities(logits, ids, most)
    torch.testing.assert_close(got[0], expected[0], atol=1e-12, rtol=1e-12)
    assert got[1].tolist() == expected[1].tolist()
    torch.testing.assert_close(got[2], expected[2], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("vocab", [1, 64, VOCAB])
def test_tokens_without_a_bit_are_forbidden(vocab: int) -> None:
    logits = torch.randn((4, vocab), generator=torch.Generator().manual_seed(3))
    allowed = torch.rand((2, vocab), generator=torch.Generator().manual_seed(4)) < 0.5
    padded = np.zeros((2, -(-vocab // 64) * 64), dtype=bool)
    padded[:, :vocab] = allowed.numpy()
    masks = torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int64))
    rows = torch.tensor([3, 1])
    expected = logits.clone()
    expected[rows] = logits[rows].masked_fill(~allowed, float("-inf"))
    penalties.allow(logits, rows, masks)
    assert torch.equal(logits, expected)
