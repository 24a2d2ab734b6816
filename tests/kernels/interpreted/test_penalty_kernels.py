"""Penalties and log probabilities by Triton, interpreted, against the reference: equal numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.kernels.gpu.penalties import allow, penalize
from holdfast.kernels.gpu.seeded_sampling import log_probabilities
from holdfast.kernels.reference import penalties, seeded_sampling
from holdfast.kernels.reference.penalties import Said

VOCAB = 9_001


@settings(max_examples=15, deadline=None)
@given(
    said=st.lists(
        st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=60), min_size=1, max_size=3
    ),
    repetition=st.floats(0.5, 2, width=32),
    frequency=st.floats(-2, 2, width=32),
    presence=st.floats(-2, 2, width=32),
)
def test_penalties_are_the_references_to_the_last_bit(
    said: list[list[tuple[int, bool]]], repetition: float, frequency: float, presence: float
) -> None:
    logits = torch.randn((len(said) + 1, 41), generator=torch.Generator().manual_seed(1)) * 4
    entries = [(token, owner, output) for owner, one in enumerate(said) for token, output in one]
    columns = torch.tensor(entries, dtype=torch.int64).view(-1, 3).T.contiguous()
    rows = torch.arange(len(said)) + 1
    strengths = [torch.full((len(said),), one).double() for one in (repetition, frequency, presence)]
    expected, got = logits.clone(), logits.clone()
    penalties.penalize(expected, Said(rows, *columns), *strengths)
    penalize(got, Said(rows, *columns), *strengths)
    assert torch.equal(got, expected)


def test_unfit_shapes_are_refused_with_both() -> None:
    said = Said(torch.zeros(1).long(), torch.zeros(3).long(), torch.zeros(2).long(), torch.zeros(3).long())
    with pytest.raises(ValueError, match=r"owners: shape \(2,\), expected \(3,\)"):
        penalize(torch.zeros(1, 4), said, *[torch.ones(1)] * 3)


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
    allow(logits, rows, masks)
    assert torch.equal(logits, expected)
