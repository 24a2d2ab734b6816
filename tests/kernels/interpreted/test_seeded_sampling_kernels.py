"""The sampling kernels, interpreted, against the reference: the same token for every row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.kernels.gpu.seeded_sampling import sample
from holdfast.kernels.reference import seeded_sampling

VOCAB = 5_011


def rows(count: int, vocab: int, seed: int, *, coarse: bool = False) -> torch.Tensor:
    """Random logits; ``coarse`` ones have many equals and some that are forbidden."""
    logits = torch.randn((count, vocab), generator=torch.Generator().manual_seed(seed)) * 3
    return torch.where(logits < -6, float("-inf"), logits.round()) if coarse else logits


def both(
    logits: torch.Tensor,
    heat: list[float],
    k: list[int],
    p: list[float],
    candidates: int | None,
    least: float = 0.0,
) -> None:
    count = len(logits)
    arguments = (
        logits,
        torch.tensor(heat),
        torch.tensor(k),
        torch.tensor(p),
        torch.arange(count) * 0x1_2345_6789 - 3,
        torch.arange(count) * 0x7_0000_0001,
    )
    min_p = torch.full((count,), least) if least else None
    expected = seeded_sampling.sample(*arguments, min_p=min_p)
    assert sample(*arguments, min_p=min_p, candidates=candidates).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("heat", "k", "p", "candidates", "coarse"),
    [
        ([0.0, 1.0, 0.7, 1.5], [0, 0, 0, 0], [1.0, 1.0, 1.0, 1.0], 0, False),
        ([0.0, 1.0, 0.7, 1.5], [0, 0, 0, 0], [1.0, 1.0, 1.0, 1.0], 0, True),
        ([0.0, 1.0, 0.7, 1.5], [50, 1, 200, 7], [1.0, 0.9, 0.5, 0.0], 200, False),
        ([0.0, 1.0, 0.7, 1.5], [50, 1, 200, 7], [1.0, 0.9, 0.5, 0.0], 200, True),
        ([1.0, 1.0, 0.0, 2.0], [50, 0, 0, 40], [0.9, 1.0, 1.0, 1.0], 50, True),
        ([1.0, 0.8, 0.0, 2.0], [0, 0, 300, 4_500], [0.9, 0.2, 1.0, 0.999], VOCAB, True),
        ([1.0, 0.8, 0.0, 2.0], [0, 5, 300, 0], [0.9, 0.2, 1.0, 1.0], None, False),
    ],
    ids=[
        *("no limits", "no limits, equals", "all limited", "all limited, equals"),
        *("one unlimited, equals", "top-p alone, equals", "not told"),
    ],
)
def test_samples_equal_those_of_the_reference(
    heat: list[float], k: list[int], p: list[float], candidates: int | None, coarse: bool
) -> None:
    both(rows(4, VOCAB, 1, coarse=coarse), heat, k, p, candidates)


@settings(max_examples=8)
@given(
    vocab=st.integers(1, 300),
    seed=st.integers(0, 99),
    heat=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    k=st.integers(0, 40),
    p=st.floats(0.0, 1.0, width=32),
    coarse=st.booleans(),
)
def test_drawn_limits(vocab: int, seed: int, heat: float, k: int, p: float, coarse: bool) -> None:
    k = min(k, vocab)
    candidates = k if k else (0 if p == 1 else vocab)
    both(rows(1, vocab, seed, coarse=coarse), [heat], [k], [p], candidates)


@pytest.mark.parametrize("least", [0.01, 0.6])
@pytest.mark.parametrize("candidates", [0, 40])
def test_min_p_after_the_other_limits(candidates: int, least: float) -> None:
    k = 40 if candidates == 40 else 0
    both(rows(2, 700, 2), [1.0, 0.5], [k] * 2, [0.8 if candidates else 1.0] * 2, candidates, least)
